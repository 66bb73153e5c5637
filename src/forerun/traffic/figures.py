"""Figures of a load test: percentiles over requests, throughput, what keeps an agreement on times; and the report.

This file holds every formula. A percentile is the smallest measured value that at least so many of a hundred requests
do not exceed (nearest rank), so it is always a time that a request took. Ratios are formed within a repetition, whose
blocks lie close together in time, and the median is taken over the ratios. In JSON times are in seconds, shares between
0 and 1, and what is not known is null.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forerun.bench.figures import Spread, over
from forerun.errors import InvalidRequest
from forerun.prove.proof import jsonable
from forerun.traffic.client import ServedModel, TimedAnswer
from forerun.traffic.plan import ServerLoad, SpeculationMode, TrafficPlan, TrafficTurn

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class TrafficBlock:
    """One block as it ran: its answers by number of the request, and its seconds until the last of them was over.

    At a rate these are never less than the time within which its requests arrive.
    """

    turn: TrafficTurn
    answers: tuple[TimedAnswer, ...]
    seconds: float

    @property
    def complete(self) -> list[TimedAnswer]:
        """The answers that came to their ends."""
        return [answer for answer in self.answers if not answer.error]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of complete answers over the time of the block."""
        return sum(answer.num_tokens for answer in self.complete) / self.seconds


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """A service-level agreement: how long the first token and the time between tokens may take, for so many of 100.

    `between_s` and `first_s` are in seconds; None is no limit.
    """

    between_s: float | None = None
    first_s: float | None = None
    percentile: float = 95.0

    def __post_init__(self) -> None:
        for name, value in (("sla_between_ms", self.between_s), ("sla_first_ms", self.first_s)):
            if value is not None and not 0 < value < math.inf:
                raise InvalidRequest(name, f"{1000 * value:g} must be a number of milliseconds above 0.")
        if not 0 < self.percentile <= 100:
            raise InvalidRequest("sla_percentile", f"{self.percentile:g} must be above 0 and at most 100.")

    @property
    def asks(self) -> bool:
        """Whether there is any limit."""
        return self.between_s is not None or self.first_s is not None

    def kept_by(self, answer: TimedAnswer) -> bool:
        """Whether one request was served within it."""
        if answer.error:
            return False
        between, first = answer.between_tokens_s, answer.first_token_s
        slow = self.between_s is not None and between is not None and between > self.between_s
        return not slow and (self.first_s is None or first <= self.first_s)

    @property
    def text(self) -> str:
        """For a reader."""
        limits = (("between tokens", self.between_s), ("to the first token", self.first_s))
        return " and ".join(f"{1000 * limit:g} ms {name}" for name, limit in limits if limit is not None)


@dataclass(frozen=True, slots=True)
class TimeFigures:
    """Times of answers in seconds, by percentile over requests, as "p50"; None where no request has any.

    `between_tokens_s` is each request's mean time from one token to the next, `longest_gap_s` its longest wait within
    the stream: where several tokens come at once, it says what the reader sees.
    """

    num_answers: int
    first_token_s: Mapping[str, float] | None
    between_tokens_s: Mapping[str, float] | None
    longest_gap_s: Mapping[str, float] | None
    total_s: Mapping[str, float] | None

    @classmethod
    def of(cls, answers: Iterable[TimedAnswer]) -> TimeFigures:
        """Of the answers that are complete."""
        good = [answer for answer in answers if not answer.error]

        def by(value: Callable[[TimedAnswer], float | None]) -> Mapping[str, float] | None:
            values = [taken for answer in good if (taken := value(answer)) is not None]
            return {f"p{share}": percentile(values, float(share)) for share in PERCENTILES} if values else None

        return cls(
            num_answers=len(good),
            first_token_s=by(lambda answer: answer.first_token_s),
            between_tokens_s=by(lambda answer: answer.between_tokens_s),
            longest_gap_s=by(lambda answer: answer.longest_gap_s if answer.num_tokens > 1 else None),
            total_s=by(lambda answer: answer.total_s),
        )


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """One load in one mode, over all repetitions.

    `requests_per_s` and `tokens_per_s` are of complete answers, over the time of a block; `speed_up` is the second over
    that of the baseline in the same repetition. `goodput_per_s` are the requests a second that were served within the
    agreement, `kept` the share of all requests, failed ones included; `holds` says whether that is as many as it wants.
    `late_s` is how late the client itself sent a request at worst.
    """

    load: ServerLoad
    mode: SpeculationMode
    num_requests: int
    times: TimeFigures
    by_category: Mapping[str, TimeFigures]
    errors: Mapping[str, int]
    requests_per_s: Spread | None
    tokens_per_s: Spread | None
    speed_up: Spread | None
    goodput_per_s: Spread | None
    kept: float | None
    holds: bool | None
    late_s: float
    acceptance_rate: float | None
    tokens_per_round: float | None
    counted: bool


@dataclass(frozen=True, slots=True)
class OtherAnswer:
    """A request that a mode answered otherwise than the baseline did."""

    load: str
    mode: str
    repetition: int
    request: int


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` of a hundred do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share / 100 * len(ranked)) - 1)]


def traffic_figures(
    plan: TrafficPlan,
    blocks: Sequence[TrafficBlock],
    agreement: ServiceLevel,
    category: Callable[[int, int], str] = lambda repetition, index: "",
) -> list[TrafficFigures]:
    """What the blocks of a plan show, by load and mode; `category` is that of a repetition's request."""
    figures = []
    for load in plan.loads:
        plain = {b.turn.repetition: b for b in blocks if (b.turn.load, b.turn.mode) == (load, plan.baseline)}
        for mode in plan.modes:
            of_mode = [block for block in blocks if (block.turn.load, block.turn.mode) == (load, mode)]
            figures.append(figures_of(of_mode, plain, agreement, category))
    return figures


def figures_of(
    blocks: Sequence[TrafficBlock],
    plain: Mapping[int, TrafficBlock],
    agreement: ServiceLevel,
    category: Callable[[int, int], str],
) -> TrafficFigures:
    """One load in one mode."""
    answers = [answer for block in blocks for answer in block.answers]
    complete = [answer for answer in answers if not answer.error]
    kinds: dict[str, list[TimedAnswer]] = {}
    for block in blocks:
        for answer in block.answers:
            kinds.setdefault(category(block.turn.repetition, answer.index), []).append(answer)
    kept = sum(map(agreement.kept_by, answers)) / len(answers)
    ratios = [(block.tokens_per_s, plain[block.turn.repetition].tokens_per_s) for block in blocks]
    guesses = [answer.speculation for answer in answers if answer.speculation]
    drafted, accepted, rounds = (
        sum(each.get(name) or 0 for each in guesses) for name in ("num_drafted", "num_accepted", "num_rounds")
    )
    return TrafficFigures(
        load=blocks[0].turn.load,
        mode=blocks[0].turn.mode,
        num_requests=len(answers),
        times=TimeFigures.of(answers),
        by_category={kind: TimeFigures.of(times) for kind, times in kinds.items() if kind},
        errors=dict(Counter(answer.error for answer in answers if answer.error)),
        requests_per_s=Spread.of(len(block.complete) / block.seconds for block in blocks),
        tokens_per_s=Spread.of(block.tokens_per_s for block in blocks),
        speed_up=Spread.of(times / other for times, other in ratios if other),
        goodput_per_s=Spread.of(sum(map(agreement.kept_by, b.answers)) / b.seconds for b in blocks),
        kept=kept if agreement.asks else None,
        holds=kept >= agreement.percentile / 100 if agreement.asks else None,
        late_s=max(answer.sent_s - answer.due_s for answer in answers),
        acceptance_rate=over(accepted, drafted),
        tokens_per_round=over(accepted + rounds, rounds),
        counted=all(answer.counted for answer in complete),
    )


def differences(plan: TrafficPlan, blocks: Sequence[TrafficBlock]) -> list[OtherAnswer]:
    """The complete answers that differ from the baseline's to the same request."""
    texts = {(b.turn, answer.index): answer.digest for b in blocks for answer in b.complete}
    others = []
    for (turn, index), digest in texts.items():
        if texts.get((replace(turn, mode=plan.baseline), index), digest) != digest:
            others.append(OtherAnswer(turn.load.name, turn.mode.shown, turn.repetition, index))
    return others


def capacity(figures: Sequence[TrafficFigures], mode: SpeculationMode) -> tuple[TrafficFigures | None, bool]:
    """The heaviest load of a mode up to which the agreement holds, and whether a heavier one that breaks it was run."""
    of_mode = [each for each in figures if each.mode == mode]
    kinds = [each for each in of_mode if each.load.kind == "rate"] or of_mode
    best: TrafficFigures | None = None
    for each in sorted(kinds, key=lambda each: each.load.value):
        if not each.holds:
            return best, True
        best = each
    return best, False


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """A whole load test. `compared` says whether answers of modes had to be the same; `others` are those that were not.

    `num_prompts` counts the different prompts; where requests are more, some were asked again.
    """

    url: str
    model: ServedModel
    plan: TrafficPlan
    agreement: ServiceLevel
    num_prompts: int
    figures: Sequence[TrafficFigures]
    blocks: Sequence[TrafficBlock]
    others: Sequence[OtherAnswer]

    @property
    def compared(self) -> bool:
        """Whether there were modes whose answers have to be equal."""
        return self.model.forerun and len(self.plan.modes) > 1

    @property
    def same_answers(self) -> bool | None:
        """Whether they were; None where nothing was compared."""
        return not self.others if self.compared else None

    def of(self, mode: SpeculationMode) -> list[TrafficFigures]:
        """The figures of a mode."""
        return [each for each in self.figures if each.mode == mode]

    def as_object(self) -> dict[str, Any]:
        """For JSON; `requests` has every request with its times."""
        values: dict[str, Any] = jsonable(
            {
                "url": self.url,
                "model": asdict(self.model),
                "plan": asdict(self.plan),
                "agreement": asdict(self.agreement),
                "num_prompts": self.num_prompts,
                "same_answers": self.same_answers,
                "differences": [asdict(other) for other in self.others],
                "capacity": [self.capacity_object(mode) for mode in self.plan.modes] if self.agreement.asks else None,
                "cells": [asdict(each) | {"mode": each.mode.name} for each in self.figures],
                "requests": [request for block in self.blocks for request in requests_of_block(block)],
            }
        )
        return values

    def capacity_object(self, mode: SpeculationMode) -> dict[str, Any]:
        """How heavy a load of this mode keeps the agreement."""
        best, broken = capacity(self.figures, mode)
        served = best.requests_per_s.median if best and best.requests_per_s else None
        load = best and asdict(best.load)
        return {"mode": mode.name, "load": load, "requests_per_s": served, "a_heavier_load_breaks_it": broken}


def requests_of_block(block: TrafficBlock) -> list[dict[str, Any]]:
    """Every request of a block; a failed one has its error in place of times."""
    turn = block.turn
    shared = {"load": asdict(turn.load), "mode": turn.mode.name, "repetition": turn.repetition}
    times = ("first_token_s", "between_tokens_s", "longest_gap_s", "total_s")
    return [
        {**shared, "request": answer.index, "num_tokens": answer.num_tokens, "error": answer.error or None}
        | {name: getattr(answer, name) for name in times if not answer.error}
        for answer in block.answers
    ]
