"""Figures of a load test (latency percentiles, throughput, service level), and the report.

This file has every formula. Percentiles are nearest-rank, so that each is the time of an actual request. Ratios are
computed within a repetition, whose blocks are close in time, and their median is reported. In JSON, times are in
seconds, shares between 0 and 1, and unknown values null.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forerun.bench.figures import Spread, over
from forerun.errors import InvalidRequest
from forerun.report import json_object
from forerun.traffic.client import ServedModel, TimedAnswer
from forerun.traffic.plan import ServerLoad, SpeculationMode, TrafficPlan, TrafficTurn

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class TrafficBlock:
    """One finished block: its answers in the order of the requests, and its duration until the last answer.

    At a rate, the duration is at least the time in which its requests arrive.
    """

    turn: TrafficTurn
    answers: tuple[TimedAnswer, ...]
    seconds: float

    @property
    def complete(self) -> list[TimedAnswer]:
        """The answers without an error."""
        return [answer for answer in self.answers if not answer.error]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of complete answers per second of the block."""
        return sum(answer.num_tokens for answer in self.complete) / self.seconds


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """A service level: limits on the time to the first token and between tokens, for `percentile` % of requests.

    `between_s` and `first_s` are in seconds; None: no limit.
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
    def has_limits(self) -> bool:
        """Whether there is any limit."""
        return self.between_s is not None or self.first_s is not None

    def is_met_by(self, answer: TimedAnswer) -> bool:
        """Whether a request met the limits; a failed one did not."""
        if answer.error:
            return False
        between, first = answer.between_tokens_s, answer.first_token_s
        slow = self.between_s is not None and between is not None and between > self.between_s
        return not slow and (self.first_s is None or first <= self.first_s)

    @property
    def text(self) -> str:
        """The limits in words."""
        limits = (("between tokens", self.between_s), ("to the first token", self.first_s))
        return " and ".join(f"{1000 * limit:g} ms {name}" for name, limit in limits if limit is not None)


@dataclass(frozen=True, slots=True)
class TimeFigures:
    """Percentiles of times in seconds, by name such as "p50"; None without values.

    `between_tokens_s`: each request's mean time between tokens; `longest_gap_s`: its longest wait within the stream,
    which readers notice if several tokens arrive at once.
    """

    num_answers: int
    first_token_s: Mapping[str, float] | None
    between_tokens_s: Mapping[str, float] | None
    longest_gap_s: Mapping[str, float] | None
    total_s: Mapping[str, float] | None

    @classmethod
    def of(cls, answers: Iterable[TimedAnswer]) -> TimeFigures:
        """The figures of the complete answers."""
        complete = [answer for answer in answers if not answer.error]

        def percentiles(value: Callable[[TimedAnswer], float | None]) -> Mapping[str, float] | None:
            values = [seconds for answer in complete if (seconds := value(answer)) is not None]
            return {f"p{share}": percentile(values, float(share)) for share in PERCENTILES} if values else None

        return cls(
            num_answers=len(complete),
            first_token_s=percentiles(lambda answer: answer.first_token_s),
            between_tokens_s=percentiles(lambda answer: answer.between_tokens_s),
            longest_gap_s=percentiles(lambda answer: answer.longest_gap_s if answer.num_tokens > 1 else None),
            total_s=percentiles(lambda answer: answer.total_s),
        )


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """One load in one mode, over all repetitions.

    `requests_per_s` and `tokens_per_s` count complete answers; `speed_up`: the ratio of `tokens_per_s` to the
    baseline's in the same repetition. `goodput_per_s`: requests per second that met the service level; `kept`: their
    share of all requests, including failed ones; `holds`: whether that share reaches the percentile. `late_s`: the
    maximum delay of sending a request, which is caused by the client. `counted`: whether every answer had a usage.
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
class DifferingAnswer:
    """A request whose answer differs from the baseline's."""

    load: str
    mode: str
    repetition: int
    request: int


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `share` % do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share / 100 * len(ranked)) - 1)]


def traffic_figures(
    plan: TrafficPlan,
    blocks: Sequence[TrafficBlock],
    agreement: ServiceLevel,
    category: Callable[[int, int], str] = lambda repetition, index: "",
) -> list[TrafficFigures]:
    """The figures by load and mode; `category(repetition, index)` is that of a request's prompt."""
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
    """The figures of one load in one mode."""
    answers = [answer for block in blocks for answer in block.answers]
    complete = [answer for answer in answers if not answer.error]
    kinds: dict[str, list[TimedAnswer]] = {}
    for block in blocks:
        for answer in block.answers:
            kinds.setdefault(category(block.turn.repetition, answer.index), []).append(answer)
    kept = sum(map(agreement.is_met_by, answers)) / len(answers)
    ratios = [(block.tokens_per_s, plain[block.turn.repetition].tokens_per_s) for block in blocks]
    counts = [answer.speculation for answer in answers if answer.speculation]
    drafted, accepted, rounds = (
        sum(each.get(name) or 0 for each in counts) for name in ("num_drafted", "num_accepted", "num_rounds")
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
        goodput_per_s=Spread.of(sum(map(agreement.is_met_by, b.answers)) / b.seconds for b in blocks),
        kept=kept if agreement.has_limits else None,
        holds=kept >= agreement.percentile / 100 if agreement.has_limits else None,
        late_s=max(answer.sent_s - answer.due_s for answer in answers),
        acceptance_rate=over(accepted, drafted),
        tokens_per_round=over(accepted + rounds, rounds),
        counted=all(answer.counted for answer in complete),
    )


def differences(plan: TrafficPlan, blocks: Sequence[TrafficBlock]) -> list[DifferingAnswer]:
    """The complete answers that differ from the baseline's answer to the same request."""
    texts = {(b.turn, answer.index): answer.digest for b in blocks for answer in b.complete}
    differing = []
    for (turn, index), digest in texts.items():
        if texts.get((replace(turn, mode=plan.baseline), index), digest) != digest:
            differing.append(DifferingAnswer(turn.load.name, turn.mode.shown, turn.repetition, index))
    return differing


def capacity(figures: Sequence[TrafficFigures], mode: SpeculationMode) -> tuple[TrafficFigures | None, bool]:
    """(the highest load up to which the service level was met, whether a higher load violated it) for a mode."""
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
    """The results of a load test. `differing`: the answers that differ from the baseline's.

    `num_prompts`: distinct prompts; with more requests, prompts are repeated.
    """

    url: str
    model: ServedModel
    plan: TrafficPlan
    agreement: ServiceLevel
    num_prompts: int
    figures: Sequence[TrafficFigures]
    blocks: Sequence[TrafficBlock]
    differing: Sequence[DifferingAnswer]

    @property
    def compared(self) -> bool:
        """Whether there were several modes, whose answers must be equal."""
        return self.model.forerun and len(self.plan.modes) > 1

    @property
    def same_answers(self) -> bool | None:
        """Whether the answers of all modes were equal; None if not compared."""
        return not self.differing if self.compared else None

    def of(self, mode: SpeculationMode) -> list[TrafficFigures]:
        """The figures of a mode."""
        return [each for each in self.figures if each.mode == mode]

    def as_object(self) -> dict[str, Any]:
        """The report as JSON; `requests` has every request with its times."""
        return json_object(
            url=self.url,
            model=self.model,
            plan=self.plan,
            agreement=self.agreement,
            num_prompts=self.num_prompts,
            same_answers=self.same_answers,
            differences=self.differing,
            capacity=[self.capacity_object(mode) for mode in self.plan.modes] if self.agreement.has_limits else None,
            cells=[asdict(each) | {"mode": each.mode.name} for each in self.figures],
            requests=[request for block in self.blocks for request in requests_of_block(block)],
        )

    def capacity_object(self, mode: SpeculationMode) -> dict[str, Any]:
        """The capacity of a mode as JSON."""
        best, violated = capacity(self.figures, mode)
        served = best.requests_per_s.median if best and best.requests_per_s else None
        load = best and best.load
        return {"mode": mode.name, "load": load, "requests_per_s": served, "a_heavier_load_breaks_it": violated}


def requests_of_block(block: TrafficBlock) -> list[dict[str, Any]]:
    """Every request of a block as JSON; a failed one has an error instead of times."""
    turn = block.turn
    shared = {"load": turn.load, "mode": turn.mode.name, "repetition": turn.repetition}
    times = ("first_token_s", "between_tokens_s", "longest_gap_s", "total_s")
    return [
        {**shared, "request": answer.index, "num_tokens": answer.num_tokens, "error": answer.error or None}
        | {name: getattr(answer, name) for name in times if not answer.error}
        for answer in block.answers
    ]
