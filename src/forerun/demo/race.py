"""A race: one prompt answered twice over the same weights, plain and drafted, each side on a clock of its own.

Decides who steps next: the side whose own steps have taken less time so far. Sides never run at once, so neither
takes cores from the other, and a side's clock holds its own steps alone; yet they move as if each had the machine to
itself. Knows nothing of what is shown or of how the numbers are summed up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from forerun.accept.outcome import Outcome, Stats
from forerun.draft.base import Drafter
from forerun.draft.ngram import NgramDrafter
from forerun.engine.delta import Delta
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence as EngineSequence
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams

Clock = Callable[[], float]


class Side(StrEnum):
    """The two ways to answer."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"


@dataclass(frozen=True, slots=True)
class Step:
    """One round of one side: what it gained (None while only the prompt is read), and what it took."""

    side: Side
    delta: Delta | None
    outcome: Outcome
    step_s: float


class Ledger(Stats):
    """Counters that keep what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []

    def record(self, outcome: Outcome) -> None:
        """Add one round."""
        super().record(outcome)
        self.outcomes.append(outcome)


@dataclass(slots=True)
class Lane:
    """One side's engine and sequence, and how long its steps have taken. The engine's counters start anew."""

    side: Side
    engine: Engine
    sequence: EngineSequence
    clock_s: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        assert not self.engine.has_work, "a lane's engine works for it alone, or its clock would hold others' time"
        self.engine.stats = self.ledger
        self.engine.submit(self.sequence)

    def step(self, clock: Clock) -> Step:
        """One timed round."""
        started_s = clock()
        deltas = self.engine.step()
        step_s = clock() - started_s
        self.clock_s += step_s
        return Step(self.side, deltas[0] if deltas else None, self.ledger.outcomes[-1], step_s)


def race(lanes: Sequence[Lane], clock: Clock = time.perf_counter) -> Iterator[Step]:
    """Step all lanes to their ends, always the one with the least time on its clock. Closing it cancels them."""
    try:
        while running := [lane for lane in lanes if lane.engine.has_work]:
            yield min(running, key=lambda lane: lane.clock_s).step(clock)
    finally:
        for lane in lanes:
            lane.engine.cancel(lane.sequence.request_id)


class Track:
    """One LLM's weights, and over them an engine for each way to answer: plain, its own drafter, n-grams."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.plain = engine_beside(llm, None)
        self.drafted = {"model": llm.engine, "ngram": engine_beside(llm, NgramDrafter())}

    def race(
        self, prompt: str | Sequence[int], params: SamplingParams, drafter: str, clock: Clock = time.perf_counter
    ) -> Iterator[Step]:
        """Answer a prompt plain and with `drafter`, "model" (the LLM's own) or "ngram"."""
        (plain,) = self.llm.requests.sequences(prompt, params, wish=False)
        (drafted,) = self.llm.requests.sequences(prompt, params)
        yield from race(
            [Lane(Side.PLAIN, self.plain, plain), Lane(Side.SPECULATIVE, self.drafted[drafter], drafted)], clock
        )


def engine_beside(llm: LLM, drafter: Drafter | None) -> Engine:
    """Another engine over an LLM's weights, with a cache of its own."""
    runner = type(llm.engine.runner).of(llm.engine.runner.decoder, llm.plan.cache_tokens)
    return Engine(runner, drafter, options=llm.engine.options, num_ids=llm.engine.num_ids)
