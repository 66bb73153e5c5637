"""A race: one prompt answered twice with the same weights, by plain and by drafted decoding, each with its own clock.

This file decides which side steps next: the one whose own steps have taken less time so far. The sides never compute at
the same time, so neither takes cores from the other, and each clock covers its own side's steps alone. On the screen
they advance as if each had the machine to itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from forerun.accept.delta import Delta
from forerun.accept.outcome import Outcome
from forerun.bench.lane import Clock, Lane
from forerun.draft.base import Drafter
from forerun.draft.text.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.llm import LLM
from forerun.request import Request
from forerun.sampling.params import SamplingParams


class Side(StrEnum):
    """The two ways to answer."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"


@dataclass(frozen=True, slots=True)
class RaceStep:
    """One round of one side: what it gained (None while only the prompt is read), and what it took."""

    side: Side
    delta: Delta | None
    outcome: Outcome
    step_s: float


def race(lanes: Mapping[Side, Lane], clock: Clock = time.perf_counter) -> Iterator[RaceStep]:
    """Step all lanes to their ends, always the one with the least time on its clock. Closing it cancels them."""
    try:
        while running := [side for side, lane in lanes.items() if lane.engine.has_work]:
            side = min(running, key=lambda side: lanes[side].clock_s)
            timed = lanes[side].step(clock)
            yield RaceStep(side, timed.deltas[0] if timed.deltas else None, timed.outcome, timed.step_s)
    finally:
        for lane in lanes.values():
            lane.clear()


class Track:
    """One LLM's weights, and over them an engine for each way to answer: plain, its own drafter, n-grams.

    `shown` has the names of both drafters for people; `own` is that of the LLM's.
    """

    def __init__(self, llm: LLM, own: str = "model") -> None:
        self.llm = llm
        self.shown = {"model": own, "ngram": "ngram"}
        self.plain = engine_beside(llm, None)
        self.drafted = {"model": llm.engine, "ngram": engine_beside(llm, NgramDrafter())}

    def race(
        self, prompt: str | Sequence[int], params: SamplingParams, drafter: str, clock: Clock = time.perf_counter
    ) -> Iterator[RaceStep]:
        """Answer a prompt plain and with `drafter`, "model" (the LLM's own) or "ngram"."""
        plain = Lane(self.plain, self.llm.requests.sequences(Request.of(prompt, params, speculation=False)))
        drafted = Lane(self.drafted[drafter], self.llm.requests.sequences(Request.of(prompt, params)))
        yield from race({Side.PLAIN: plain, Side.SPECULATIVE: drafted}, clock)


def engine_beside(llm: LLM, drafter: Drafter | None) -> Engine:
    """Another engine over an LLM's weights, with a cache of its own."""
    runner = type(llm.engine.runner).of(llm.engine.runner.decoder, llm.plan.cache_tokens)
    engine = llm.engine
    return Engine(runner, drafter, options=engine.options, num_ids=engine.num_ids, kernels=engine.kernels)
