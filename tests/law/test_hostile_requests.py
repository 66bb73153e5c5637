"""Hostile requests change no answer of honest requests in the same batch: each equals that of plain decoding.

Hostile requests have numbers at and beyond the limits of every field, values of wrong types, invalid prompts, logits
processors that raise, exit or return invalid logits, and clients that disconnect at any time. Each of them is answered
or gets a named error.

The short form takes FORERUN_FUZZ_S seconds (6 by default) for one drafter; ten minutes of it:

    FORERUN_FUZZ_S=600 .venv/bin/python -m pytest tests/law/test_hostile_requests.py -k short
"""

import asyncio
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.async_llm import AsyncLLM
from forerun.config import Speculation
from forerun.errors import ForerunError, RoundFailed
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from kit.checkpoints import SMALL, TARGET
from kit.oracles import exact_parts
from kit.texts import PROMPTS
from kit.unchecked import unchecked

NUM_HONEST, NUM_HOSTILE, NUM_KNOWN = 8, 4, 24
SECONDS = float(os.environ.get("FORERUN_FUZZ_S", "3"))
PATIENCE_S = 300.0  # for one honest answer
VOCAB = 512

NUMBERS: tuple[Any, ...] = (
    *(sign * x for sign in (1, -1) for x in (0, 1, 2, 2**31, 2**31 - 1, 2**63, 2**63 - 1, 2**64, 2**70, 1e308, 0.5)),
    *(math.nan, math.inf, -math.inf, 10**400, 1e-45, 1e-38, 3.4e38, 1e39, VOCAB, VOCAB - 1),
    *(np.int64(2**63 - 1), np.float32(0.5), np.float64("nan"), Fraction(1, 3), Fraction(10**400)),
)
STRANGE: tuple[Any, ...] = (None, True, "0", "x", b"", [], {}, (), object(), Decimal(1), 1j, [math.nan], {1: 2}, len)
TEXTS: tuple[Any, ...] = ("the", " ", "\ud800", "\0", "é", "t" * 2000, "", b"x", 7, None)
NO_PROMPTS: tuple[Any, ...] = (
    *STRANGE,
    *(5, math.nan, "", [], [[]], [None], [True], [1.5], ["a", 1], [1, -1], [VOCAB], [2**70], "\ud800", "a\0b"),
    *({"prompt": 5}, {"prompt_token_ids": "a"}, {"prompt_token_ids": [10**9]}, {"text": "a"}, range(3), np.zeros(3)),
    *(np.array([[1, 2]]), torch.tensor([1, 2]), torch.tensor([math.nan]), "a" * 10**6, [1] * 10**5),
)


class Mine(Exception):
    """What a hostile request's own code raises."""


RAISED = (Mine, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, StopIteration, BaseException)


def processor(rng: random.Random) -> Callable[[list[int], Tensor], Any]:
    """A logits processor that misbehaves, in one of many ways, once the text has a certain length."""
    begin = rng.choice([0, 0, 8, 14])

    def edited(change: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
        def edit(logits: Tensor) -> Tensor:
            change(logits)
            return logits

        return edit

    def fail(error: type[BaseException]) -> Callable[[Tensor], Tensor]:
        def act(logits: Tensor) -> Tensor:
            raise error

        return act

    deeds: list[Callable[[Tensor], Any]] = [
        *map(fail, RAISED),
        *(
            lambda logits, value=value: torch.full_like(logits, value)
            for value in (math.nan, math.inf, -math.inf, 3e38)
        ),
        *(lambda logits, value=value: value for value in STRANGE),
        lambda logits: logits[:3],
        lambda logits: logits[None],
        lambda logits: logits.long(),
        lambda logits: logits.double() * 1e300,
        lambda logits: logits.to(torch.bfloat16),
        edited(lambda logits: logits.fill_(math.nan)),
        edited(lambda logits: logits.resize_(7)),
        edited(lambda logits: logits[::2].fill_(math.inf)),
        edited(lambda logits: logits[1:].fill_(-math.inf)),
        edited(lambda logits: time.sleep(0.002)),
    ]
    deed = rng.choice(deeds)

    def process(tokens: list[int], logits: Tensor) -> Any:
        if len(tokens) < begin:
            return logits
        tokens.clear()
        return deed(logits)

    return process


def value_for(name: str, rng: random.Random) -> Any:
    """A value for a sampling parameter: a number, a wrong type, or the right type with invalid content."""
    ids = [rng.choice(NUMBERS) for _ in range(rng.randrange(4))]
    made: dict[str, Callable[[], Any]] = {
        "logit_bias": lambda: {
            rng.choice([*NUMBERS, 1, 2, 5]): rng.choice(NUMBERS) for _ in range(rng.randrange(1, 4))
        },
        "banned_tokens": lambda: rng.choice([ids, range(VOCAB), range(1, VOCAB), [2]]),
        "stop_token_ids": lambda: rng.choice([ids, range(VOCAB), [2, 3]]),
        "stop": lambda: rng.choice([rng.choice(TEXTS), [rng.choice(TEXTS) for _ in range(rng.randrange(70))]]),
        "bad_words": lambda: rng.choice([rng.choice(TEXTS), [rng.choice(TEXTS) for _ in range(rng.randrange(40))]]),
        "logits_processors": lambda: [processor(rng) for _ in range(rng.randrange(1, 3))],
    }
    if name in made and rng.random() < 0.8:
        return made[name]()
    return rng.choice(NUMBERS if rng.random() < 0.8 else STRANGE)


PARAMETERS = tuple(each.name for each in fields(SamplingParams))
SHAPE = tuple(each.name for each in fields(Speculation))


@dataclass(slots=True)
class Hostile:
    """One hostile request, a function of its seed."""

    seed: str

    async def ask(self, front: AsyncLLM) -> str:
        """Send the request; the kind of answer, or the name of its ForerunError. Any other error is raised."""
        rng = random.Random(self.seed)
        kinds = "field field field fields processor processor speculation speculation prompt tenant"
        kind = rng.choice(kinds.split())
        try:
            asked = SamplingParams(**({"max_tokens": rng.choice([1, 12, 60, None])} | self.params(kind, rng)))
            prompt = rng.choice(NO_PROMPTS if kind == "prompt" else PROMPTS)
            speculation = (
                self.bad_speculation(rng) if kind == "speculation" else rng.choice([None, True, False, 0, 4, 256])
            )
            tenant = rng.choice(STRANGE) if kind == "tenant" else rng.choice(["", "a", "\ud800"])
            stay_s = rng.choice([0.0, 0.01, 0.1, 0.5, 3.0])
            return await self.within(
                stay_s, self.read(front, rng, prompt, asked, speculation=speculation, tenant=tenant)
            )
        except (ForerunError, Mine) as error:
            return type(error).__name__

    def params(self, kind: str, rng: random.Random) -> dict[str, Any]:
        """Its sampling parameters."""
        found: dict[str, Any] = {"temperature": rng.choice([0, 1.0]), "seed": rng.randrange(9)}
        if kind == "processor":
            return found | {"logits_processors": [processor(rng)], "n": rng.choice([1, 1, 2])}
        names = rng.sample(PARAMETERS, {"field": 1, "fields": 4}.get(kind, 0))
        return found | {name: value_for(name, rng) for name in names}

    def bad_speculation(self, rng: random.Random) -> Any:
        """A value for `speculation`: of any type, or a Speculation with fields at and beyond their limits."""
        if rng.random() < 0.3:
            return rng.choice([*NUMBERS, *STRANGE])
        shape = {
            "depth": rng.choice([1, 6, 256]),
            "width": rng.choice([1, 2, 256]),
            "nodes": rng.choice([None, 3, 512]),
        }
        return Speculation(**(shape | {name: rng.choice(NUMBERS) for name in rng.sample(SHAPE, rng.randrange(2))}))

    async def read(self, front: AsyncLLM, rng: random.Random, *args: Any, **others: Any) -> str:
        """Read the entire answer, or a part of its stream."""
        if rng.random() < 0.5:
            await front.generate(*args, **others)
            return "answer"
        left = rng.randrange(20)
        async for _ in front.stream(*args, **others):
            if (left := left - 1) < 0:
                return "left the loop"
        return "stream"

    async def within(self, stay_s: float, work: Any) -> str:
        """Await the work, and cancel it after `stay_s` seconds."""
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait([task], timeout=stay_s)
        if done:
            return str(task.result())
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.done(), "a cancelled request does not return"
        return "cancelled" if task.cancelled() else str(task.result())


@dataclass(slots=True)
class Siege:
    """Honest and hostile requests to one engine, for `seconds`."""

    front: AsyncLLM
    known: Sequence[tuple[str, SamplingParams, Any, dict[str, object]]]  # prompt, parameters, speculation, plain answer
    until_s: float
    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)
    num_honest: int = 0

    @property
    def goes_on(self) -> bool:
        """False once the time is over and enough requests were answered; on a busy machine that may take longer."""
        enough = self.num_honest > self.seconds / 2 and self.outcomes.total() > self.seconds * 2
        late_s = time.monotonic() - self.until_s
        return late_s < 0 or (late_s < PATIENCE_S and not (enough and self.outcomes["InvalidRequest"]))

    async def honest(self, number: int) -> None:
        rng = random.Random(number)
        while self.goes_on:
            prompt, params, speculation, expected = rng.choice(self.known)
            answer = await asyncio.wait_for(self.front.generate(prompt, params, speculation=speculation), PATIENCE_S)
            assert exact_parts(answer) == expected, "a hostile request changed an honest answer"
            self.num_honest += 1

    async def hostile(self, number: int, seed: int) -> None:
        count = 0
        while self.goes_on:
            request = Hostile(f"{seed} {number} {count}")
            try:
                self.outcomes[await request.ask(self.front)] += 1
            except BaseException as error:
                raise AssertionError(f"request {request.seed!r} got an error that is not named: {error!r}") from error
            count += 1

    async def run(self, seed: int) -> None:
        workers = [self.honest(i) for i in range(NUM_HONEST)] + [self.hostile(i, seed) for i in range(NUM_HOSTILE)]
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker)


def known_answers() -> list[tuple[str, SamplingParams, Any, dict[str, object]]]:
    """Honest requests of many kinds, and the answer of plain decoding to each."""
    plain, found = LLM(str(TARGET), dtype="float32"), []
    speculations = (None, False, 2, Speculation(3, 3, 8), 7)
    for i in range(NUM_KNOWN):
        kinds: tuple[dict[str, Any], ...] = (
            {},
            {"repetition_penalty": 1.3},
            {"stop": ["the", "was"]},
            {"top_k": 20, "min_p": 0.01},
            {"n": 2},
            {"logit_bias": {5: 2.0}, "min_tokens": 4},
        )
        settings = {"temperature": i % 3 / 2, "seed": i, "max_tokens": 10 + i % 9, "logprobs": i % 3} | kinds[
            i % len(kinds)
        ]
        params = SamplingParams(**settings)
        answer = dict(exact_parts(plain.generate(PROMPTS[i % 5], params, use_tqdm=False)[0]))
        found.append((PROMPTS[i % 5], params, speculations[i % len(speculations)], answer))
    return found


def besiege(draft: str | None, seconds: float, seed: int) -> None:
    """Run a siege, then check that the engine holds no state of any request and still has its drafter."""
    llm = LLM(str(TARGET), draft, dtype="float32", max_num_seqs=10, max_model_len=128)
    known = known_answers()

    async def main() -> Siege:
        async with AsyncLLM(llm) as front:
            siege = Siege(front, known, time.monotonic() + seconds, seconds)
            await siege.run(seed)
            return siege

    with unchecked():
        siege = asyncio.run(main())
    print(f"\n{draft}: {siege.num_honest} honest answers; hostile:", dict(siege.outcomes.most_common()))
    assert siege.num_honest > seconds / 2
    assert siege.outcomes.total() > seconds * 2
    assert siege.outcomes["InvalidRequest"] > 0
    assert siege.outcomes[RoundFailed.__name__] == 0, "a request's data got as far as breaking rounds"
    engine = llm.engine
    assert engine.recovery.strikes == 0
    assert engine.drafter is llm.drafter
    assert not engine.has_work
    assert not engine.active.readers
    assert not llm.driver.jobs
    assert engine.runner.cache.num_rows == 0
    engine.runner.cache.check()


def test_hostile_requests_change_no_honest_answer_short() -> None:
    besiege(f"mix[ngram,model:{SMALL}]", SECONDS, seed=int(os.environ.get("FORERUN_FUZZ_SEED", "0")))


@pytest.mark.full
@pytest.mark.parametrize(
    "draft", [None, "suffix", f"model:{SMALL}", "early-exit:2", f"cascade[ngram,model:{SMALL}]"], ids=str
)
def test_hostile_requests_change_no_honest_answer(draft: str | None) -> None:
    besiege(draft, max(SECONDS, 60.0), seed=1)
