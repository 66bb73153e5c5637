"""The speed-up of every depth: measured, or an interval for depths that were not measured.

A drafted round takes v times as long as a plain one and emits G tokens, so the speed-up is G / v. G is counted, the
speed-up is measured, and v follows. For unmeasured depths it is assumed that the cost of a round does not decrease with
depth, and that its cost per draft token does not increase. Of the draft tokens deeper than any measured draft, any
share may be accepted. All ratios are computed within a repetition, whose runs are close in time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.bench.figures import Spread
from forerun.remote.counters import ServedAcceptance

LIKELY = 0.9  # confidence level of intervals
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)  # Student's t, from 1 degree of freedom
DEEPEST = 16


@dataclass(frozen=True, slots=True)
class RoundEconomy:
    """One repetition at one depth: the speed-up and the acceptance."""

    depth: int
    speed_up: float
    acceptance: ServedAcceptance

    @property
    def cost(self) -> float:
        """The duration of a round, in plain rounds."""
        return self.acceptance.tokens_per_round / self.speed_up


@dataclass(frozen=True, slots=True)
class DepthRange:
    """The 90 % confidence interval of the speed-up at a depth, and the measured speed-up if there is one.

    With a single repetition the interval covers only the assumptions, not the noise.
    """

    depth: int
    low: float
    high: float
    measured: Spread | None = None

    @property
    def middle(self) -> float:
        """The measured speed-up, or the geometric mean of the interval's ends."""
        return self.measured.median if self.measured else math.sqrt(self.low * self.high)


def cost_bounds(depth: int, costs: Mapping[int, float]) -> tuple[float, float]:
    """Bounds of the cost of a round at this depth, in plain rounds, from the costs of other depths."""
    low, high = min(1.0, *costs.values()), math.inf
    for known, cost in costs.items():
        low, high = max(low, cost * min(1.0, depth / known)), min(high, cost * max(1.0, depth / known))
    return min(low, high), max(low, high)  # noise may swap them


def token_bounds(depth: int, rounds: Sequence[RoundEconomy]) -> tuple[float, float] | None:
    """Bounds of the tokens per round at this depth; None if acceptance by depth is unknown."""
    deep = [each for each in rounds if each.depth >= depth]
    seen = (min(deep, key=lambda each: each.depth) if deep else max(rounds, key=lambda each: each.depth)).acceptance
    if seen.reached is None or seen.covered is None:
        return None
    low = 1 + seen.covered * sum(seen.reached[:depth])
    unseen = 0 if deep else depth - max(each.depth for each in rounds)
    return low, low + unseen * seen.covered * seen.reached[-1]


def speed_up_bounds(depth: int, rounds: Sequence[RoundEconomy]) -> tuple[float, float] | None:
    """Bounds of the speed-up at a depth from one repetition; None if unknown."""
    measured = [each.speed_up for each in rounds if each.depth == depth]
    if measured:
        return measured[0], measured[0]
    tokens = token_bounds(depth, rounds)
    if tokens is None:
        return None
    least, most = cost_bounds(depth, {each.depth: each.cost for each in rounds})
    return tokens[0] / most, tokens[1] / least


def likely_range(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """A confidence interval from the lower and upper bounds of all repetitions."""

    def end(values: Sequence[float], sign: int) -> float:
        logs = [math.log(value) for value in values]
        mean = statistics.fmean(logs)
        if len(logs) < 2:
            return math.exp(mean)
        t = T_95[min(len(logs) - 1, len(T_95)) - 1]
        return math.exp(mean + sign * t * statistics.stdev(logs) / math.sqrt(len(logs)))

    return end(lows, -1), end(highs, 1)


def depth_ranges(repetitions: Sequence[Sequence[RoundEconomy]]) -> tuple[DepthRange, ...]:
    """The intervals of all depths from 0 to twice the deepest measured one, without those that are unknown."""
    known = {each.depth for rounds in repetitions for each in rounds}
    if not known:
        return ()
    ranges = [DepthRange(0, 1.0, 1.0, Spread(1.0, 1.0, 1.0))]
    for depth in range(1, min(DEEPEST, max(2 * max(known), 2)) + 1):
        bounds = [each for rounds in repetitions if (each := speed_up_bounds(depth, rounds))]
        if not bounds:
            continue
        lows, highs = zip(*bounds, strict=True)
        measured = Spread.of(each.speed_up for rounds in repetitions for each in rounds if each.depth == depth)
        ranges.append(DepthRange(depth, *likely_range(lows, highs), measured))
    return tuple(ranges)
