"""The economy of drafting: what guesses give, what they cost, and how many of them pay.

With a_j = P(guess j accepted | those before it were), a round of k guesses gives G(k) = 1 + sum over j <= k of
a_1 ... a_j tokens; where it takes C(k) seconds, a token costs C(k) / G(k), and the depth with the least is the best.
Acceptance and costs are what was seen, the latest counting most. The engine's controller decides by this how far to
draft, a mix which of its arms to ask, and a cascade how long the drafts of its lower members should be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST = 16  # depths at which acceptance is counted
FADING = 0.98  # what counts of the past after each round: some 50 rounds do
BELIEF, WEIGHT = 0.7, 2.0  # acceptance as long as nothing is known, and how many guesses that counts as
OTHERS_WEIGHT = 8.0  # the same where other sequences are known: a few bad guesses do not settle a text
OUTLIER = 4.0  # times what was expected: a busy machine, not a price


def expected_tokens(acceptance: Sequence[float], depth: int) -> float:
    """G(depth): what a round gives, the token behind the accepted guesses among it."""
    total, reached = 1.0, 1.0
    for chance in acceptance[:depth]:
        reached *= chance
        total += reached
    return total


def cost_per_token(depth: int, acceptance: Sequence[float], round_s: Callable[[int], float]) -> float:
    """Seconds per token where `depth` guesses are judged at a time, in rounds of `round_s(depth)`."""
    return round_s(depth) / expected_tokens(acceptance, depth)


def best_depth(acceptance: Sequence[float], round_s: Callable[[int], float], least: int = 0) -> int:
    """The depth from `least` on whose tokens cost least, the smallest of several; `acceptance` knows of the deepest."""
    return min(range(least, len(acceptance) + 1), key=lambda depth: cost_per_token(depth, acceptance, round_s))


@dataclass(slots=True)
class LinearCost:
    """Seconds by size: the straight line through what was seen, by least squares, the latest counting most.

    Neither nothing at all nor one more is taken to cost less than nothing. What was seen at one size only is taken to
    cost the same at others, or, unless `flat`, in proportion.
    """

    flat: bool = True
    weight: float = 0.0
    sizes: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    products: float = 0.0

    def record(self, size: int, taken_s: float) -> None:
        """Add what a size took."""
        taken_s = damped(taken_s, self.expect(size))
        self.weight = FADING * self.weight + 1
        self.sizes = FADING * self.sizes + size
        self.squares = FADING * self.squares + size**2
        self.seconds = FADING * self.seconds + taken_s
        self.products = FADING * self.products + size * taken_s

    def expect(self, size: int) -> float:
        """Seconds for a size; 0 as long as nothing was seen."""
        if self.weight == 0:
            return 0.0
        middle, level = self.sizes / self.weight, self.seconds / self.weight
        spread = self.squares / self.weight - middle**2
        steepest = level / middle
        if spread > 1e-6:
            slope = min(max(0.0, (self.products / self.weight - middle * level) / spread), steepest)
        else:
            slope = 0.0 if self.flat else steepest
        return level + slope * (size - middle)


@dataclass(slots=True)
class Acceptance:
    """a_j by depth, as counted; the latest rounds count most."""

    offered: list[float] = field(default_factory=lambda: [0.0] * MOST)  # by depth: guesses that were up for judgement
    accepted: list[float] = field(default_factory=lambda: [0.0] * MOST)

    def rates(self, belief: float = BELIEF, weight: float = WEIGHT) -> list[float]:
        """a_j for every depth: as counted there, starting from what was counted at all depths together."""
        overall = self.overall(belief, weight)
        return [(a + WEIGHT * overall) / (o + WEIGHT) for a, o in zip(self.accepted, self.offered, strict=True)]

    def overall(self, belief: float = BELIEF, weight: float = WEIGHT) -> float:
        """Of all depths together, starting from a belief that counts as `weight` guesses."""
        return (sum(self.accepted) + weight * belief) / (sum(self.offered) + weight)

    def count(self, runs: Sequence[tuple[int, int]]) -> None:
        """A round's guesses and how many of them were accepted, by sequence.

        A guess counts where all before it were accepted.
        """
        self.offered = [FADING * n for n in self.offered]
        self.accepted = [FADING * n for n in self.accepted]
        for num_guesses, num_accepted in runs:
            for depth in range(min(num_guesses, num_accepted + 1, MOST)):
                self.offered[depth] += 1
                self.accepted[depth] += depth < num_accepted


def damped(taken_s: float, expected_s: float) -> float:
    """A time, with outliers limited; unchanged where no time was expected."""
    return min(taken_s, OUTLIER * expected_s) if expected_s > 0 else taken_s
