"""How much faster decoding will be: what held-out drafts give, and what rounds with this drafter take on this machine.

The untrained student is written to a folder and drafts for the target in an engine of its own, over the target's own
runner, for some rounds of one sequence: what they take depends on the network's shape and not on its weights. Whole
rounds are timed, at some depths and without a drafter, by turns; of each the shortest round counts, since neighbours on
the same cores only make times longer. For the same reason no drafted round can be taken for shorter than a plain one,
which it contains: what it took bounds the plain pass, so no prediction exceeds the tokens per round.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forerun.annotations import ProgressCallback
from forerun.config import EngineOptions, Speculation
from forerun.control.controller import FixedDepth
from forerun.draft.base import Drafter
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.engine.engine import Engine
from forerun.heads.student import Student
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.request import Request
from forerun.sampling.params import SamplingParams

CACHE_TOKENS = 2048  # of the drafter while it is timed
TIMED_DEPTHS = (1, 2, 4, 8, 16)  # others lie on the lines between
TURNS, MOST_ROUNDS, TURN_S = 3, 8, 0.4  # a turn has a few rounds, of which the first is not counted, and some time
NO_TIME_S = 1e-9


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round of one sequence, plain and at each depth from 1; a plain one is the shortest."""

    plain_s: float
    drafted_s: Sequence[float]

    @classmethod
    def of(cls, timed_s: Mapping[int, float], depth: int) -> RoundTimes:
        """The times up to this depth, from those at some depths, 0 among them; others lie on the lines between."""
        depths = sorted(each for each in timed_s if each)
        lines = np.interp(range(1, depth + 1), depths, [timed_s[each] for each in depths])
        return cls(min(timed_s.values()), [float(taken_s) for taken_s in lines])

    def best(self, tokens_per_round: Sequence[float]) -> tuple[int, float]:
        """The depth that pays most where rounds give so many tokens, and times as fast as plain decoding that is."""
        rates = [t * self.plain_s / max(NO_TIME_S, s) for t, s in zip(tokens_per_round, self.drafted_s, strict=False)]
        depth = max(range(len(rates)), key=rates.__getitem__)
        return depth + 1, rates[depth]

    @classmethod
    def read(cls, path: Path) -> RoundTimes | None:
        """As they were written; None where that cannot be read."""
        try:
            values = json.loads(path.read_text("utf-8"))
            drafted_s = [float(each_s) for each_s in values["drafted_s"]]
            found = cls(min(float(values["plain_s"]), *drafted_s), drafted_s)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return found if all(each_s > 0 for each_s in (found.plain_s, *drafted_s)) else None


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times rounds of the answer to one prompt, with engines over one LLM's runner."""

    llm: LLM
    prompt: Sequence[int]
    params: SamplingParams

    def round_s(self, drafter: Drafter | None, depth: int) -> float | None:
        """Seconds of the shortest round at this depth; None where the answer was over before any was timed."""
        own = self.llm.engine
        options = EngineOptions(1, own.options.chunk_tokens, prefix_cache=False)
        engine = Engine(
            own.runner, drafter, options=options, controller=FixedDepth(), num_ids=own.num_ids, kernels=own.kernels
        )
        request = Request(prompt_token_ids=tuple(self.prompt), sampling_params=self.params)
        (sequence,) = self.llm.requests.sequences(replace(request, speculation=Speculation(depth)))
        engine.submit(sequence)
        while engine.has_work and not sequence.num_output:
            engine.step()
        times: list[float] = []
        began_s = time.perf_counter()
        while engine.has_work and sequence.room > depth + 1 and len(times) <= MOST_ROUNDS:
            started_s = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - started_s)
            if len(times) > 2 and time.perf_counter() - began_s > TURN_S:
                break
        engine.cancel(sequence.request_id)
        return min(times[1:], default=None)


def round_times(
    llm: LLM,
    target: Blueprint,
    student: Student,
    prompt: Sequence[int],
    params: SamplingParams,
    depth: int,
    progress: ProgressCallback,
) -> RoundTimes | None:
    """What rounds take with this student at depths up to this; None where the context is too short to find out."""
    room = llm.plan.max_model_len - len(prompt) - 1
    if room < 1:
        return None
    watch = Stopwatch(llm, prompt, replace(params, max_tokens=room, ignore_eos=True))
    depths = [0, *(d for d in TIMED_DEPTHS if d < depth), depth]
    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "untrained"
        folder.mkdir()
        student.write(student.weights, folder)
        plan = plan_drafter(student.spec(folder), DraftContext(target, llm.tokenizer))
        drafter = plan.build(dict.fromkeys(plan.models, CACHE_TOKENS), None, llm.engine.runner)
    for turn in range(TURNS):
        for number, each in enumerate(depths):
            progress("timing rounds", (turn + number / len(depths)) / TURNS)
            taken_s = watch.round_s(drafter if each else None, each)
            if taken_s is not None:
                found[each] = min(taken_s, found.get(each, taken_s))
    return RoundTimes.of(found, depth) if 0 in found and len(found) > 1 else None
