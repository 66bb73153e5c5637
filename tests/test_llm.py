"""LLM: what results hold and in which order, what is refused and how, and that nothing is left in the engine.

That drafting changes no token is tested in tests/law; here it is tested of log-probabilities, streams and requests
with different speculation settings.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forerun.accept.commit import Origin
from forerun.config import Speculation
from forerun.errors import ForerunError, InvalidRequest, NotEnoughMemory, PromptTooLong, UnknownDrafter
from forerun.llm import LLM
from forerun.output import RequestOutput
from forerun.sampling.logprobs import TokenLogprobs
from forerun.sampling.params import SamplingParams
from kit.assertions import assert_empty
from kit.checkpoints import SMALL, TARGET
from kit.engines import plain
from kit.oracles import exact_parts
from kit.texts import PROMPTS
from kit.unchecked import unchecked

TREE = Speculation(4, 3, 9)


@cache
def with_model() -> LLM:
    return LLM(str(TARGET), f"model:{SMALL}", dtype="float32")


@cache
def with_ngrams() -> LLM:
    return LLM(str(TARGET), "ngram", dtype="float32")


def params_with(seed: int | None = 0, **others: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": seed, "max_tokens": 16, "ignore_eos": True} | others))


def tokens_of(results: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in result.outputs] for result in results]


def test_results_hold_the_request_and_come_in_the_order_of_the_prompts() -> None:
    """The shortest is finished first, the order is that of the prompts."""
    llm = with_model()
    prompts: list[str | Sequence[int]] = [
        PROMPTS[0],
        llm.tokenizer.encode(PROMPTS[1]),
        tuple(llm.tokenizer.encode(PROMPTS[2])),
        PROMPTS[3],
    ]
    params = [params_with(seed, max_tokens=20 - 5 * seed, logprobs=seed) for seed in range(4)]
    results = llm.generate(prompts, params, speculation=4)
    for prompt, asked, result in zip(prompts, params, results, strict=True):
        (answer,) = result.outputs
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        assert result.prompt_token_ids == tuple(ids)
        assert result.seed == asked.seed
        assert result.fingerprint == llm.fingerprint
        assert result.prompt_logprobs == ()
        assert answer.index == 0
        assert len(answer.token_ids) == len(answer.origins) == len(answer.logprobs) == asked.max_tokens
        assert [alternatives.token_id for alternatives in answer.logprobs] == list(answer.token_ids)
        assert {len(alternatives.top_ids) for alternatives in answer.logprobs} == {asked.logprobs}
        whole = llm.tokenizer.decode([*ids, *answer.token_ids], skip_special_tokens=True)
        assert whole == llm.tokenizer.decode(ids, skip_special_tokens=True) + answer.text
        assert (answer.finish_reason, answer.stop_reason) == ("length", None)
    assert {Origin.TARGET, Origin.DRAFTED} < {origin for r in results for origin in r.outputs[0].origins}
    assert results == llm.generate(prompts, params)
    assert_empty(llm)


def test_prompts_may_be_one_or_several_and_text_or_token_ids() -> None:
    llm, ids = plain(), plain().tokenizer.encode(PROMPTS[0])
    (expected,) = llm.generate(PROMPTS[0], params_with())
    for prompts in ([PROMPTS[0]], ids, tuple(ids), [ids], (tuple(ids),), (PROMPTS[0],)):
        assert llm.generate(prompts, params_with()) == [expected]
    both: list[str | list[int]] = [PROMPTS[0], ids]
    assert llm.generate(both, params_with()) == [expected] * 2
    assert llm.generate(both[::-1], [params_with(), params_with()]) == [expected] * 2
    assert llm.generate([], params_with()) == []
    with_defaults = llm.stream(PROMPTS[0])
    assert next(with_defaults).finish_reason is None
    assert isinstance(with_defaults, Generator)
    with_defaults.close()


def test_samples_differ_from_each_other_and_repeat_with_their_seed() -> None:
    warm = {"temperature": 1.6, "logprobs": 1, "max_tokens": 10}
    for llm in (plain(), with_model()):
        (three,) = llm.generate(PROMPTS[0], params_with(7, n=3, **warm))
        (five,) = llm.generate(PROMPTS[0], params_with(7, n=5, **warm))
        assert [sample.index for sample in five.outputs] == [0, 1, 2, 3, 4]
        assert len({sample.token_ids for sample in five.outputs}) == 5
        assert exact_parts(three)["samples"] == exact_parts(five)["samples"][:3]
        assert exact_parts(five) == exact_parts(plain().generate(PROMPTS[0], params_with(7, n=5, **warm))[0])
        (one,) = llm.generate(PROMPTS[0], params_with(7, **warm))
        assert one.outputs[0].token_ids == five.outputs[0].token_ids
        greedy = llm.generate(PROMPTS[0], params_with(7, n=2, temperature=0.0))[0].outputs
        assert greedy[0].token_ids == greedy[1].token_ids
        assert_empty(llm)


def test_the_reported_seed_reproduces_the_answer() -> None:
    llm = with_ngrams()
    drawn = llm.generate([PROMPTS[0]] * 4, params_with(None, n=2, temperature=3.0))
    assert len({result.seed for result in drawn}) == 4
    assert len({sample for answers in tokens_of(drawn) for sample in answers}) == 8
    assert all(0 <= result.seed < 2**64 for result in drawn)
    again = llm.generate([PROMPTS[0]] * 4, [params_with(r.seed, n=2, temperature=3.0) for r in drawn])
    assert list(map(exact_parts, again)) == list(map(exact_parts, drawn))
    (negative,) = llm.generate(PROMPTS[0], params_with(-1))
    assert negative.seed == 2**64 - 1
    assert exact_parts(llm.generate(PROMPTS[0], params_with(negative.seed))[0]) == exact_parts(negative)


REFUSED: list[tuple[Callable[[Any], object], type[ForerunError], str]] = [  # of calls that type checkers refuse, too
    (lambda llm: llm.generate("\ud800"), InvalidRequest, "prompt: .*not valid Unicode"),
    (
        lambda llm: llm.generate("a" * 99 + "\udcff"),
        InvalidRequest,
        r"aa.udcff' is not valid Unicode text: encode it as",
    ),
    (lambda llm: llm.generate("a " * 9000), PromptTooLong, "prompt: .*maximum context length is 512 tokens.*: shorten"),
    (lambda llm: llm.generate(["The", []]), InvalidRequest, "prompt: it is empty.*give at least one"),
    (lambda llm: llm.generate("a", None, speculation=1.5), InvalidRequest, "speculation: 1.5 cannot be served"),
    (lambda llm: llm.generate("a", {"temperature": 1}), InvalidRequest, "sampling_params: "),
    (lambda llm: llm.generate(["a", "b"], []), InvalidRequest, "sampling_params: 0 sets of .* for 2 prompts"),
    (lambda llm: llm.generate("a", params_with(stop_token_ids=[512])), InvalidRequest, "stop_token_ids: .*512"),
    (lambda llm: llm.stream(5), InvalidRequest, "prompt: 5 is not a prompt"),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_invalid_requests_are_refused_before_anything_runs(
    call: Callable[[LLM], object], kind: type[ForerunError], message: str
) -> None:
    llm = with_ngrams()
    rounds = llm.stats.num_passes
    with unchecked(), pytest.raises(kind, match=message):
        call(llm)
    assert llm.stats.num_passes == rounds
    assert_empty(llm)


BUILDS: list[tuple[dict[str, Any], type[ForerunError], str]] = [
    ({"draft": "crystal-ball:x"}, UnknownDrafter, "no drafter 'crystal-ball': choose one of .*mtp, ngram"),
    ({"draft": ""}, UnknownDrafter, "draft"),
    ({"draft": 7}, UnknownDrafter, "draft: 7 is neither"),
    ({"dtype": "int4"}, InvalidRequest, "dtype: 'int4' is not known: use auto, "),
    ({"dtype": 7}, InvalidRequest, "dtype: 7 "),
    ({"max_model_len": 513}, InvalidRequest, "max_model_len: 513 must be at most 512, the positions of"),
    ({"max_model_len": 1}, InvalidRequest, "max_model_len: 1 must be a whole number of at least 2"),
    ({"max_model_len": 100.5}, InvalidRequest, "max_model_len: 100.5 must be a whole number"),
    ({"max_num_seqs": 0}, InvalidRequest, "max_num_seqs: 0 must be a whole number of at least 1"),
    ({"max_num_seqs": "many"}, InvalidRequest, "max_num_seqs: 'many' must be a whole number"),
    ({"chunk_tokens": 0}, InvalidRequest, "chunk_tokens: 0 must be a whole number of at least 1"),
    ({"threads": 0}, InvalidRequest, "threads: 0 must be a whole number of at least 1"),
    ({"threads": 1025}, InvalidRequest, "threads: 1025 is above 1024"),
    ({"seed": 1.5}, InvalidRequest, "seed: 1.5 "),
    ({"speculation": -2}, InvalidRequest, "speculation.depth: -2 cannot"),
    ({"speculation": "yes"}, InvalidRequest, "speculation: 'yes' cannot be served"),
    ({"verification": "exact"}, InvalidRequest, "verification: 'exact' must be one of"),
    ({"memory_bytes": "1GB"}, InvalidRequest, "memory_bytes: '1GB' must be a whole number"),
    (
        {"memory_bytes": 2_000_000},
        NotEnoughMemory,
        r"max_model_len 512 needs 2.\d+ MB \(1.\d+ MB weights, 1,024 cache slots at 1.28 kB\).* 2.00 MB; lower",
    ),
    ({"memory_bytes": 0}, NotEnoughMemory, "needs .* but the memory budget is 0 B; no max_model_len is small"),
]


@pytest.mark.parametrize(("settings", "kind", "message"), BUILDS, ids=lambda value: str(value)[:40])
def test_invalid_settings_are_refused_with_a_remedy(
    settings: dict[str, Any], kind: type[ForerunError], message: str
) -> None:
    with unchecked(), pytest.raises(kind, match=message):
        LLM(str(TARGET), **({"dtype": "float32"} | settings))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("make", [plain, with_ngrams, with_model])
def test_the_pieces_of_a_stream_make_the_answer(make: Callable[[], LLM], n: int) -> None:
    llm, asked = make(), params_with(3, n=n, logprobs=2, stop=["the"], max_tokens=24)
    deltas = list(llm.stream(PROMPTS[1], asked))
    (result,) = llm.generate(PROMPTS[1], asked)
    for sample in result.outputs:
        own = [delta for delta in deltas if delta.sample == sample.index]
        assert tuple(token for delta in own for token in delta.token_ids) == sample.token_ids
        assert "".join(delta.text for delta in own) == sample.text
        assert tuple(alternatives for delta in own for alternatives in delta.logprobs) == sample.logprobs
        assert len([origin for delta in own for origin in delta.origins]) == len(sample.origins)
        assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
        assert (own[-1].finish_reason, own[-1].stop_reason) == (sample.finish_reason, sample.stop_reason)
    assert_empty(llm)


@pytest.mark.parametrize("num_read", [0, 1, 4])
@pytest.mark.parametrize("make", [plain, with_ngrams, with_model])
def test_closing_a_stream_frees_everything(make: Callable[[], LLM], num_read: int) -> None:
    llm = make()
    stream = llm.stream(PROMPTS[1], params_with(n=2, max_tokens=64), speculation=TREE)
    read = [next(stream) for _ in range(num_read)]
    assert all(delta.finish_reason is None for delta in read)
    assert llm.engine.has_work == (num_read > 0)
    assert isinstance(stream, Generator)
    stream.close()
    assert_empty(llm)
    assert list(stream) == []
    assert exact_parts(llm.generate(PROMPTS[0], params_with())[0]) == exact_parts(
        plain().generate(PROMPTS[0], params_with())[0]
    )


class Faulty(Exception):
    """What a logits processor raises."""


def test_a_processor_that_fails_only_on_rejected_draft_tokens_fails_no_request() -> None:
    """A failure on a text that plain decoding never reaches must not end a request that is drafted."""
    params = params_with(3, max_tokens=24)
    (answer,) = plain().generate(PROMPTS[0], params)[0].outputs
    prompt = plain().tokenizer.encode(PROMPTS[0])
    text = [*prompt, *answer.token_ids]

    def picky(tokens: Sequence[int], logits: Tensor) -> Tensor:
        if list(tokens) != text[: len(tokens)]:
            failures.append(tuple(tokens))
            raise Faulty("not the plain text")
        return logits

    for make in (plain, with_ngrams, with_model):
        failures: list[tuple[int, ...]] = []
        asked = replace(params, logits_processors=[picky])
        assert make().generate(PROMPTS[0], asked, speculation=4)[0].outputs[0].token_ids == answer.token_ids
        if make is not with_ngrams:  # compiled verification runs no processor on draft tokens that are rejected
            assert bool(failures) == (make is with_model)
        assert_empty(make())


@cache
def law(tokens: tuple[int, ...]) -> Tensor:
    """transformers' log-probabilities after every token."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def assert_logprobs(found: Sequence[TokenLogprobs], tokens: tuple[int, ...], first: int, top: int) -> None:
    """Log-probabilities of `tokens[first:]`, alternatives by falling probability."""
    assert [alternatives.token_id for alternatives in found] == list(tokens[first : first + len(found)])
    for alternatives, right in zip(found, law(tokens)[first - 1 :], strict=False):
        assert alternatives.logprob == pytest.approx(float(right[alternatives.token_id]), abs=1e-4)
        assert len(alternatives.top_ids) == len(alternatives.top_logprobs) == top
        assert list(alternatives.top_logprobs) == sorted(alternatives.top_logprobs, reverse=True)
        assert list(alternatives.top_logprobs) == pytest.approx(right.topk(top).values.tolist(), abs=1e-4)
        assert right[list(alternatives.top_ids)].tolist() == pytest.approx(list(alternatives.top_logprobs), abs=1e-4)
        larger = int((right > right[alternatives.token_id] + 1e-4).sum())
        assert larger < alternatives.rank <= 1 + int((right > right[alternatives.token_id] - 1e-4).sum())
        if alternatives.rank <= top:
            assert alternatives.top_ids[alternatives.rank - 1] == alternatives.token_id


def test_logprobs_are_those_of_transformers() -> None:
    """Those before any logits transform, for prompt and answer, with and without a drafter."""
    asked = params_with(
        4, temperature=0.6, top_k=20, repetition_penalty=1.2, logprobs=5, prompt_logprobs=3, max_tokens=24
    )
    for llm, speculation in ((plain(), False), (with_model(), TREE), (with_ngrams(), 4)):
        for result in llm.generate(list(PROMPTS[:2]), asked, speculation=speculation):
            (answer,) = result.outputs
            tokens = result.prompt_token_ids + answer.token_ids
            assert len(answer.logprobs) == 24
            assert len(result.prompt_logprobs) == len(result.prompt_token_ids) - 1
            assert_logprobs(result.prompt_logprobs, tokens, 1, 3)
            assert_logprobs(answer.logprobs, tokens, len(result.prompt_token_ids), 5)


SPECULATIONS = (False, 1, None, 6, Speculation(3, 2, 5), True, 0, Speculation(5, 4, 16), Speculation(2, 5, 7), 3)


@pytest.mark.parametrize("make", [with_ngrams, with_model])
def test_requests_with_different_speculation_run_in_one_batch(make: Callable[[], LLM]) -> None:
    llm = make()
    prompts = [PROMPTS[i % 5] for i in range(len(SPECULATIONS))]
    params = [params_with(seed, temperature=seed % 3 / 2, max_tokens=20 + seed) for seed in range(len(SPECULATIONS))]
    streams = [
        llm.stream(p, q, speculation=speculation)
        for p, q, speculation in zip(prompts, params, SPECULATIONS, strict=True)
    ]
    pieces = [[next(stream)] for stream in streams]
    assert len(llm.engine.sequences) > len(SPECULATIONS) // 2, "they are not in one batch"
    for deltas, stream in zip(pieces, streams, strict=True):
        deltas += stream
    token_ids = [[tuple(token for delta in deltas for token in delta.token_ids)] for deltas in pieces]
    assert token_ids == tokens_of(plain().generate(prompts, params))
    for speculation, deltas in zip(SPECULATIONS, pieces, strict=True):
        deepest = max(sum(origin is Origin.DRAFTED for origin in delta.origins) for delta in deltas)
        limit = Speculation.of(speculation, Speculation()).depth
        assert deepest <= limit
        if limit == 0:
            assert {origin for delta in deltas for origin in delta.origins} == {Origin.TARGET}
    assert_empty(llm)


def test_a_request_names_a_drafter_by_its_arm_and_the_default_may_be_no_drafting() -> None:
    llm = LLM(str(TARGET), "ngram", dtype="float32", speculation=False)
    expected = list(map(exact_parts, plain().generate(list(PROMPTS), params_with())))
    assert list(map(exact_parts, llm.generate(list(PROMPTS), params_with()))) == expected
    assert llm.stats.num_drafted == 0
    assert (
        list(map(exact_parts, llm.generate(list(PROMPTS), params_with(), speculation=Speculation(4, drafter="ngram"))))
        == expected
    )
    assert llm.stats.num_drafted > 0


def test_progress_goes_from_0_to_1() -> None:
    seen_of: dict[str, list[float]] = {}
    llm = LLM(str(TARGET), dtype="float32", progress=lambda what, part: seen_of.setdefault(what, []).append(part))
    params = [params_with(max_tokens=3 + i) for i in range(4)]
    llm.generate(list(PROMPTS[:4]), params, progress=lambda what, part: seen_of.setdefault(what, []).append(part))
    assert set(seen_of) == {f"loading {TARGET}", "generating"}
    for parts in seen_of.values():
        assert parts == sorted(parts)
        assert 0 <= parts[0] < parts[-1] == 1.0
