"""A race: one prompt answered twice with the same weights, by plain and by drafted decoding, each with its own clock.

This file decides which side steps next, the one whose own steps have taken less time so far, and what is compared: the
speed of decoding, without the reading of prompts. The sides never compute at the same time, so neither takes cores from
the other, and on the screen they advance as if each had the machine to itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from forerun.accept.delta import Delta
from forerun.accept.outcome import Outcome
from forerun.bench.figures import over
from forerun.bench.lane import Clock, Lane, Pace
from forerun.draft.base import Drafter
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


class RaceSetup:
    """One LLM's weights, and over them an engine for each way to answer: plain, and the LLM's own, which drafts."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.plain = engine_beside(llm, None)
        self.tenants = itertools.count()

    def race(
        self, prompt: str | Sequence[int], params: SamplingParams, clock: Clock = time.perf_counter
    ) -> Iterator[RaceStep]:
        """Answer a prompt plain and drafted, with nothing remembered of earlier answers. Closing it cancels both."""
        ways = {Side.PLAIN: (self.plain, False), Side.SPECULATIVE: (self.llm.engine, None)}
        tenant = str(next(self.tenants))
        lanes = {
            side: Lane(engine, self.llm.requests.sequences(Request.of(prompt, params, speculation, tenant)))
            for side, (engine, speculation) in ways.items()
        }
        try:
            while running := [side for side, lane in lanes.items() if lane.engine.has_work]:
                side = min(running, key=lambda side: lanes[side].clock_s)
                timed = lanes[side].step(clock)
                yield RaceStep(side, timed.deltas[0] if timed.deltas else None, timed.outcome, timed.step_s)
        finally:
            for lane in lanes.values():
                lane.clear()


def engine_beside(llm: LLM, drafter: Drafter | None) -> Engine:
    """Another engine over an LLM's weights, with a cache of its own."""
    engine = llm.engine
    runner = type(engine.runner).of(engine.runner.decoder, llm.plan.cache_tokens)
    return Engine(runner, drafter, options=engine.options, num_ids=engine.num_ids, kernels=engine.kernels)


@dataclass(slots=True)
class Tally(Pace):
    """The totals of one side's steps, in one race or many, and their texts."""

    token_ids: list[int] = field(default_factory=list)

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_tokens": len(self.token_ids),
            "token_ids": self.token_ids,
            "tokens_per_s": self.tokens_per_s,
            "decode_s": self.decode_s,
            "read_s": self.read_s,
            "num_rounds": self.stats.num_rounds,
            "draft_s": self.stats.draft_s,
            "pass_s": self.stats.pass_s,
        }


@dataclass(slots=True)
class Score:
    """Both sides of one race, or of many added up."""

    plain: Tally = field(default_factory=Tally)
    speculative: Tally = field(default_factory=Tally)

    def add(self, step: RaceStep) -> None:
        """One more step of either side."""
        tally = self.of(step.side)
        tally.token_ids += step.delta.token_ids if step.delta else ()
        tally.count(step.outcome, step.step_s)

    def of(self, side: Side) -> Tally:
        """One side."""
        return self.plain if side is Side.PLAIN else self.speculative

    @property
    def speed_up(self) -> float:
        """How many times as fast speculation decodes; 0 before there is something to compare."""
        return over(self.speculative.tokens_per_s, self.plain.tokens_per_s) or 0.0

    @property
    def pays(self) -> bool:
        """Whether speculation is faster."""
        return self.speed_up > 1

    @property
    def same_tokens(self) -> bool:
        """Whether both sides gave the same tokens, all of them."""
        return self.plain.token_ids == self.speculative.token_ids

    @property
    def verdict(self) -> str:
        """Whether speculation pays on this machine, in a sentence."""
        if not self.speed_up:
            return "There is too little text to compare speeds."
        plain, speculative = self.plain.tokens_per_s, self.speculative.tokens_per_s
        speeds = f"{self.speed_up:.2f} times as fast, {speculative:.1f} instead of {plain:.1f} tokens/s"
        return f"Speculation {'pays' if self.pays else 'does not pay'} on this machine with these models: {speeds}."

    @property
    def costs(self) -> str:
        """What a round costs and gives: a drafted pass against a plain one, the drafter's share, the tokens."""
        stats, drafted = self.speculative.stats, self.speculative
        tokens = 1 + (over(stats.num_drafted, stats.num_rounds) or 0.0)
        times, share = over(drafted.pass_s, self.plain.pass_s) or 0.0, over(stats.draft_s, drafted.decode_s) or 0.0
        return (
            f"a pass over {tokens:.1f} tokens takes {times:.2f} times as long as over one, "
            f"the drafter {share:.0%} of the time; "
            f"a round gives {stats.tokens_per_round or 0:.2f} tokens"
        )

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        stats = self.speculative.stats
        return {
            "plain": self.plain.as_object(),
            "speculative": self.speculative.as_object(),
            "speed_up": self.speed_up,
            "pays": self.pays,
            "same_tokens": self.same_tokens,
            "tokens_per_round": stats.tokens_per_round,
            "acceptance_rate": stats.acceptance_rate,
            "acceptance_at_depth": list(stats.acceptance_at_depth),
            "costs": self.costs,
        }
