"""What measured rounds say of every depth: a speed-up where it was served, and a range where it was not.

A round with guesses takes v times as long as a plain one and gives G tokens, so drafting is G / v times as fast; G is
counted, the speed-up is measured, and v follows. Of depths that were not served two things are assumed: a deeper round
takes no less time, and no more for each of its guesses. That holds where drafting has a fixed cost, where every guess
costs alike, and where a pass costs nothing more until arithmetic limits it. Guesses deeper than any that were judged
may all be accepted, or none. All is done within a repetition, whose runs lie close together in time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.bench.figures import Spread
from forerun.remote.counters import ServedAcceptance

LIKELY = 0.9  # how often a range is expected to hold the speed-up
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)  # Student's, by degrees of freedom from 1
DEEPEST = 16


@dataclass(frozen=True, slots=True)
class RoundEconomy:
    """One repetition at one depth: the speed-up, and what rounds gave."""

    depth: int
    speed_up: float
    acceptance: ServedAcceptance

    @property
    def cost(self) -> float:
        """How many plain rounds a round took."""
        return self.acceptance.tokens_per_round / self.speed_up


@dataclass(frozen=True, slots=True)
class DepthRange:
    """So many guesses a round: `measured` where they were served. Nine in ten ranges hold the speed-up.

    A single repetition does not tell how far repetitions differ: the range is then that of the assumptions alone.
    """

    depth: int
    low: float
    high: float
    measured: Spread | None = None

    @property
    def middle(self) -> float:
        """The measured speed-up, or, in ratios, the middle of the range."""
        return self.measured.median if self.measured else math.sqrt(self.low * self.high)


def cost_bounds(depth: int, costs: Mapping[int, float]) -> tuple[float, float]:
    """Between what a round of this depth costs, in plain rounds, given what rounds of other depths cost."""
    low, high = min(1.0, *costs.values()), math.inf
    for known, cost in costs.items():
        low, high = max(low, cost * min(1.0, depth / known)), min(high, cost * max(1.0, depth / known))
    return min(low, high), max(low, high)  # noise may put them the other way round


def token_bounds(depth: int, rounds: Sequence[RoundEconomy]) -> tuple[float, float] | None:
    """Between what numbers of tokens a round of this depth gives; None where acceptance by depth is not known."""
    deep = [each for each in rounds if each.depth >= depth]
    seen = (min(deep, key=lambda each: each.depth) if deep else max(rounds, key=lambda each: each.depth)).acceptance
    if seen.reached is None or seen.covered is None:
        return None
    low = 1 + seen.covered * sum(seen.reached[:depth])
    unseen = 0 if deep else depth - max(each.depth for each in rounds)
    return low, low + unseen * seen.covered * seen.reached[-1]


def speed_up_bounds(depth: int, rounds: Sequence[RoundEconomy]) -> tuple[float, float] | None:
    """Between what speed-ups a depth lies, by the rounds of one repetition; None where these do not say."""
    measured = [each.speed_up for each in rounds if each.depth == depth]
    if measured:
        return measured[0], measured[0]
    tokens = token_bounds(depth, rounds)
    if tokens is None:
        return None
    least, most = cost_bounds(depth, {each.depth: each.cost for each in rounds})
    return tokens[0] / most, tokens[1] / least


def likely_range(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """From the lower ends of all repetitions down, and from the upper ones up, as far as their means may be off."""

    def end(values: Sequence[float], sign: int) -> float:
        logs = [math.log(value) for value in values]
        mean = statistics.fmean(logs)
        if len(logs) < 2:
            return math.exp(mean)
        t = T_95[min(len(logs) - 1, len(T_95)) - 1]
        return math.exp(mean + sign * t * statistics.stdev(logs) / math.sqrt(len(logs)))

    return end(lows, -1), end(highs, 1)


def depth_ranges(repetitions: Sequence[Sequence[RoundEconomy]]) -> tuple[DepthRange, ...]:
    """All depths from 0 to twice the deepest that was served, as far as repetitions, none of them empty, say."""
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
