"""In the engine, past answers draft for later requests of the same tenant, and of no other tenant.

The drafts of a request, round by round, must be the same as if other tenants had sent no request. And an answer is
stored in full and once, however its sequence ended and however often it was preempted.
"""

import asyncio
import random
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from forerun.async_llm import AsyncLLM
from forerun.config import EngineOptions, Speculation
from forerun.draft.text.suffix import SuffixDrafter
from forerun.llm import LLM
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.engines import plain
from kit.unchecked import unchecked
from law.fuzz import bench_of, run

PROMPTS = ("Once upon a time", "Lily and Tom went to the park.", "One day, a big dog")
DEEP = Speculation(6)


def params_with(seed: int = 0, **others: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "seed": seed, "max_tokens": 32, "ignore_eos": True} | others))


def suffix(draft: str = "suffix", **options: Any) -> LLM:
    return LLM(str(TARGET), draft, dtype="float32", **options)


def ask(
    llm: LLM, prompt: str, params: SamplingParams, tenant: str = "", speculation: bool | Speculation = DEEP
) -> tuple[int, ...]:
    with unchecked():
        return llm.generate(prompt, params, speculation=speculation, tenant=tenant)[0].outputs[0].token_ids


def past_of(llm: LLM) -> list[tuple[str, tuple[int, ...]]]:
    """The stored answers: (tenant, tokens)."""
    assert isinstance(llm.drafter, SuffixDrafter)
    return [(kept.tenant, tuple(kept.tokens)) for kept in llm.drafter.past.answers.values()]


def effort(llm: LLM) -> tuple[int, int, int, int]:
    """Counters that are not times."""
    stats = llm.stats
    return stats.num_passes, stats.num_rounds, stats.num_drafted, stats.num_accepted


def spent(llm: LLM, prompt: str, params: SamplingParams, tenant: str) -> tuple[int, ...]:
    """The increase of the counters by this request."""
    before = effort(llm)
    assert ask(llm, prompt, params, tenant) == ask(plain(), prompt, params)
    return tuple(now - then for now, then in zip(effort(llm), before, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_past_answers_draft_for_their_own_tenant_only(temperature: float) -> None:
    llm, params = suffix(), params_with(3, temperature=temperature, max_tokens=64)
    fresh = spent(llm, PROMPTS[0], params, "a")
    known = spent(llm, PROMPTS[0], params, "a")
    assert known[1] < fresh[1] / 2  # rounds
    assert known[3] > fresh[3]
    for stranger in ("b", "", "A"):
        assert spent(llm, PROMPTS[0], params, stranger) == fresh
    assert spent(llm, PROMPTS[0], params, "b")[1] < fresh[1] / 2


@pytest.mark.parametrize("speculation", [False, Speculation(5), Speculation(4, 3, 9)])
def test_an_answer_is_stored_in_full_however_it_ended(speculation: bool | Speculation) -> None:
    """By its limit, a stop string or a stop id inside an accepted run; undrafted answers too."""
    llm, answers = suffix(), []
    whole = ask(plain(), PROMPTS[0], params_with())
    text = plain().generate(PROMPTS[0], params_with())[0].outputs[0].text
    ends: list[dict[str, Any]] = [
        *({"max_tokens": n} for n in (1, 2, 7, 32)),
        *({"stop": text[n : n + 4]} for n in (20, 40)),
        *({"stop_token_ids": [whole[n]]} for n in (3, 19)),
    ]
    for _ in range(2):
        answers += [("a", ask(llm, PROMPTS[0], params_with(**end), "a", speculation)) for end in ends]
    assert past_of(llm) == answers
    assert (llm.stats.num_accepted > 0) == bool(speculation)


def test_a_cancelled_answer_is_stored_up_to_its_last_token() -> None:
    llm, received = suffix(), []
    for delta in llm.stream(PROMPTS[0], params_with(), speculation=DEEP, tenant="a"):
        received += delta.token_ids
        if len(received) > 9:
            break
    assert past_of(llm) == [("a", tuple(received))]


def test_preempted_answers_are_stored_once_and_in_full() -> None:
    """In a cache too small for all, sequences are preempted and resumed; their answers are those of plain decoding."""
    dice, requests, drafter = random.Random(4), bench_of("float32").requests(), SuffixDrafter()
    asked = [
        ([1, *dice.choices(range(3, 512), k=20)], params_with(i, temperature=i % 2, max_tokens=60)) for i in range(8)
    ]
    options = EngineOptions(max_num_seqs=8, chunk_tokens=32)
    engine = bench_of("float32").engine(drafter, num_tokens=400, options=options)
    texts = [requests.sequences(Request.of(p, q, DEEP, "ab"[i % 2]))[0] for i, (p, q) in enumerate(asked)]
    found = run(engine, texts)
    assert found == run(bench_of("float32").engine(), [requests.sequences(Request.of(p, q))[0] for p, q in asked])
    assert sum(text.num_preempted for text in texts) > 1
    assert engine.stats.num_accepted > 0
    kept = sorted((k.tenant, tuple(k.tokens)) for k in drafter.past.answers.values())
    assert kept == sorted(("ab"[i % 2], tuple(text[21:])) for i, text in enumerate(found))
    assert not drafter.sequences


def test_answers_in_a_file_draft_after_a_restart(tmp_path: Path) -> None:
    spec, params = f"suffix:{tmp_path / 'past'}", params_with(max_tokens=64)
    first = suffix(spec)
    fresh = spent(first, PROMPTS[0], params, "a")
    second = suffix(spec)
    assert past_of(second) == past_of(first)
    assert spent(second, PROMPTS[0], params, "b") == fresh
    assert spent(second, PROMPTS[0], params, "a")[1] < fresh[1] / 2
    assert len(past_of(suffix(spec))) == 3
    stream = second.stream(PROMPTS[1], params, tenant="c")
    begun = next(stream).token_ids
    second.close()
    assert past_of(suffix(spec))[3:] == [("c", begun)], "what was unfinished when the LLM was closed"


def test_every_front_door_stores_answers_under_their_tenant() -> None:
    llm = suffix()

    async def work(front: AsyncLLM) -> None:
        await front.generate(PROMPTS[0], params_with(n=2), tenant="async")
        assert [delta async for delta in front.stream(PROMPTS[0], params_with(), tenant="streamed")]

    async def main() -> None:
        async with AsyncLLM(llm) as front:
            await work(front)

    llm.generate(list(PROMPTS), params_with(), tenant="batch")
    assert list(llm.stream(PROMPTS[0], params_with(), tenant="stream"))
    asyncio.run(main())
    llm.generate(PROMPTS[0], params_with())
    owners = [tenant for tenant, _ in past_of(llm)]
    assert owners == ["batch"] * 3 + ["stream"] + ["async"] * 2 + ["streamed", ""]


def test_no_draw_depends_on_the_tenant() -> None:
    """Nor does anything else in a row's sampling parameters."""
    params = params_with(5, temperature=1.0, repetition_penalty=1.2, top_k=20)
    (one,), (other,) = (plain().requests.sequences(Request.of([1, 5, 6], params, tenant=tenant)) for tenant in "ab")
    assert one.sampling() != other.sampling()
    assert astuple(one.sampling())[1:-1] == astuple(other.sampling())[1:-1]
    assert ask(plain(), PROMPTS[0], params, "a") == ask(plain(), PROMPTS[0], params, "b")
