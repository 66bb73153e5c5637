"""The economy of drafting: expected tokens and seconds by draft depth, and the depth with the least time per token.

With the acceptance rates a_j = P(draft token j accepted | those before it were), a round of depth k yields
G(k) = 1 + sum over j <= k of a_1 ... a_j tokens. If it takes C(k) seconds, the best depth minimises C(k) / G(k). Rates
and costs are measured, with more weight on recent rounds. The controller uses this module to choose depths, a mix to
choose among its drafters, and a cascade to choose the depths of its lower members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST = 16  # depths at which acceptance is counted
FADING = 0.97  # weight of earlier rounds relative to the next one: about 30 rounds count
BELIEF, WEIGHT = 0.7, 2.0  # acceptance rate assumed at first, and the number of draft tokens that it counts as
OTHERS_WEIGHT = 8.0  # the same where the rates of other sequences are known: a few rejections do not outweigh those
LEAST_LIKE, MOST_LIKE = 4.0, 1000.0  # bounds of `likeness`
LARGEST_UNIT = 1e12  # of `Acceptance.unit`, above which counts are rescaled
OUTLIER = 4.0  # times longer than expected are limited to this ratio, as they come from a busy machine
NO_TIME_S = 1e-9  # a time that stands for 0 where it is divided by


def expected_tokens(acceptance: Sequence[float], depth: int) -> float:
    """G(depth): the expected tokens of a round, including the one after the accepted draft tokens."""
    total, reached = 1.0, 1.0
    for chance in acceptance[:depth]:
        reached *= chance
        total += reached
    return total


def cost_per_token(depth: int, acceptance: Sequence[float], round_s: Callable[[int], float]) -> float:
    """Seconds per token of rounds with this depth, which take `round_s(depth)`."""
    return round_s(depth) / expected_tokens(acceptance, depth)


def best_depth(acceptance: Sequence[float], round_s: Callable[[int], float]) -> int:
    """The depth with the least seconds per token, the smallest of several; at most `len(acceptance)`."""
    return min(range(len(acceptance) + 1), key=lambda depth: cost_per_token(depth, acceptance, round_s))


@dataclass(slots=True)
class LinearCost:
    """Seconds by size: a straight line by least squares, with more weight on recent measurements.

    Neither the intercept nor the slope is negative. With measurements of a single size, other sizes cost the same if
    `flat`, and otherwise in proportion to their size.
    """

    flat: bool = True
    weight: float = 0.0
    sizes: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    products: float = 0.0

    def record(self, size: int, taken_s: float) -> None:
        """Add the seconds measured for a size."""
        taken_s = damped(taken_s, self.expect(size))
        self.weight = FADING * self.weight + 1
        self.sizes = FADING * self.sizes + size
        self.squares = FADING * self.squares + size**2
        self.seconds = FADING * self.seconds + taken_s
        self.products = FADING * self.products + size * taken_s

    def expect(self, size: float | int) -> float:
        """Seconds for a size; 0 without measurements."""
        first_s, each_s = self.straight()
        return first_s + each_s * size

    def straight(self) -> tuple[float, float]:
        """The intercept and the slope, in seconds."""
        if self.weight == 0:
            return 0.0, 0.0
        middle, level = self.sizes / self.weight, self.seconds / self.weight
        spread = self.squares / self.weight - middle**2
        steepest = level / middle
        if spread > 1e-6:
            slope = min(max(0.0, (self.products / self.weight - middle * level) / spread), steepest)
        else:
            slope = 0.0 if self.flat else steepest
        return level - slope * middle, slope


@dataclass(slots=True)
class Acceptance:
    """Counts of offered and accepted draft tokens by depth, with more weight on recent rounds.

    The weight of new counts (`unit`) grows from round to round, so that old counts need not be scaled down.
    """

    offered: list[float] = field(default_factory=lambda: [0.0] * MOST)  # by depth: draft tokens that were judged
    accepted: list[float] = field(default_factory=lambda: [0.0] * MOST)
    unit: float = 1.0

    def rates(self, belief: float = BELIEF, weight: float = WEIGHT) -> list[float]:
        """The acceptance rate a_j of every depth; the prior is the rate of all depths together."""
        more = WEIGHT * self.unit
        start = more * self.overall(belief, weight)
        return [(a + start) / (o + more) for a, o in zip(self.accepted, self.offered, strict=True)]

    def overall(self, belief: float = BELIEF, weight: float = WEIGHT) -> float:
        """The acceptance rate of all depths together; the prior rate `belief` counts as `weight` draft tokens."""
        weight *= self.unit
        return (sum(self.accepted) + weight * belief) / (sum(self.offered) + weight)

    def of_one(self, all_rates: Sequence[float], weight: float) -> list[float]:
        """The rates of one sequence; the prior, the rates of all, counts as `weight` draft tokens at each depth."""
        more = weight * self.unit
        pairs = zip(self.accepted, self.offered, all_rates, strict=True)
        return [(a + more * rate) / (o + more) for a, o, rate in pairs]

    def limit(self, most: float) -> None:
        """Scale old counts down, so that those at any depth weigh at most as much as `most` new draft tokens."""
        share = min(1.0, most * self.unit / max(self.offered)) if any(self.offered) else 1.0
        self.offered = [share * n for n in self.offered]
        self.accepted = [share * n for n in self.accepted]

    def count(self, runs: Sequence[tuple[int, int]]) -> None:
        """Count a round: for each sequence the numbers of drafted and of accepted tokens.

        A draft token counts as offered if all before it were accepted.
        """
        self.unit /= FADING
        for num_drafted, num_accepted in runs:
            for depth in range(min(num_drafted, num_accepted + 1, MOST)):
                self.offered[depth] += self.unit
                if depth < num_accepted:
                    self.accepted[depth] += self.unit
        if self.unit > LARGEST_UNIT:
            self.offered = [n / self.unit for n in self.offered]
            self.accepted = [n / self.unit for n in self.accepted]
            self.unit = 1.0


def likeness(apart: Sequence[Acceptance], unknown: float) -> float:
    """How many draft tokens the common rates should count as for one sequence: the more, the less sequences differ.

    The variance between sequences is that of their rates minus the part that chance explains (the method of moments for
    a binomial with a beta prior). Returns `unknown` if there is nothing to compare.
    """
    if len(apart) < 2:
        return unknown
    counts = [(sum(one.accepted) / one.unit, sum(one.offered) / one.unit) for one in apart]
    counts = [(right, num) for right, num in counts if num > 0]
    total, num_right = sum(num for _, num in counts), sum(right for right, _ in counts)
    share = num_right / total if total else 0.0
    chance = share * (1 - share)
    if len(counts) < 2 or chance == 0:
        return unknown
    seen = sum(num * (right / num - share) ** 2 for right, num in counts) - (len(counts) - 1) * chance
    between = seen / (total - sum(num**2 for _, num in counts) / total)
    return min(max(LEAST_LIKE, chance / between), MOST_LIKE) if between > 0 else MOST_LIKE


def damped(taken_s: float, expected_s: float) -> float:
    """A time, limited to OUTLIER times the expected one; unchanged if no time was expected."""
    return min(taken_s, OUTLIER * expected_s) if expected_s > 0 else taken_s
