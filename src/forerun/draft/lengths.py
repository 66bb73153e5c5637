"""Lengths: how many guesses a cascade's judge is asked about at a time.

Decides by what its rounds have cost and given so far: the length at which a token of the judge's takes the least time.
That time is all that the level above sees of this one, so if every level keeps to it, the cascade as a whole is as
fast as lengths can make it. Knows nothing of models or tokens.

With a_j = P(guess j accepted | those before it were), k guesses give G(k) = 1 + sum over j <= k of a_1 ... a_j tokens.
Where a guess costs c0 and the judge's pass over k guesses c1(k), a token of the judge's costs (c1(k) + k c0) / G(k).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

MOST = 16  # guesses at a time, at most
FIRST = 4  # before anything was measured
FADING = 0.98  # what counts of the past after each round: some 50 rounds do
BELIEF, WEIGHT = 0.7, 2.0  # acceptance as long as nothing is known, and how many guesses that counts as
OUTLIER = 4.0  # times what was expected: a busy machine, not a price


def expected_tokens(acceptance: Sequence[float], length: int) -> float:
    """G(length): what a round gives, the token behind the accepted guesses among it."""
    total, reached = 1.0, 1.0
    for chance in acceptance[:length]:
        reached *= chance
        total += reached
    return total


def cost_per_token(length: int, acceptance: Sequence[float], round_s: Callable[[int], float]) -> float:
    """Seconds per token where `length` guesses are judged at a time, in rounds of `round_s(length)`."""
    return round_s(length) / expected_tokens(acceptance, length)


def best_length(acceptance: Sequence[float], round_s: Callable[[int], float]) -> int:
    """The length whose tokens cost least, the shortest of several; as many guesses at most as `acceptance` knows of."""
    return min(range(len(acceptance) + 1), key=lambda length: cost_per_token(length, acceptance, round_s))


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a round took: drafting `num_guesses` in a row, and the judge's pass over `num_tokens` in all."""

    num_guesses: int
    draft_s: float
    num_tokens: int
    pass_s: float


@runtime_checkable
class Lengths(Protocol):
    """Says how long the drafts of a cascade's lower member should be."""

    def best(self, batch: int, most: int) -> int:
        """How many guesses to ask for, for each of `batch` sequences, where `most` are of use."""
        ...

    def count(self, runs: Sequence[tuple[int, int]]) -> None:
        """Learn from a round's verdicts: how many guesses each sequence had, and how many were accepted."""
        ...

    def time(self, timing: Timing) -> None:
        """Learn from a round's times."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same length: drafts are then a function of the text in rejection modes, too."""

    length: int

    def best(self, batch: int, most: int) -> int:
        """What was fixed, or what is of use."""
        return min(self.length, most)

    def count(self, runs: Sequence[tuple[int, int]]) -> None:
        """Nothing is learned."""

    def time(self, timing: Timing) -> None:
        """Nothing is learned."""


@dataclass(slots=True)
class Line:
    """Seconds by size: the straight line through what was seen, by least squares, the latest counting most.

    Neither nothing at all nor one more is taken to cost less than nothing. What was seen at one size only is taken to
    cost the same at others.
    """

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
        slope = (self.products / self.weight - middle * level) / spread if spread > 1e-6 else 0.0
        return level + min(max(0.0, slope), level / middle) * (size - middle)


@dataclass(slots=True)
class Acceptance:
    """a_j by depth, as counted; the latest rounds count most."""

    offered: list[float] = field(default_factory=lambda: [0.0] * MOST)  # by depth: guesses that were up for judgement
    accepted: list[float] = field(default_factory=lambda: [0.0] * MOST)

    def rates(self) -> list[float]:
        """a_j for every depth: as counted there, starting from what was counted at all depths together."""
        overall = (sum(self.accepted) + WEIGHT * BELIEF) / (sum(self.offered) + WEIGHT)
        return [(a + WEIGHT * overall) / (o + WEIGHT) for a, o in zip(self.accepted, self.offered, strict=True)]

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


@dataclass(slots=True)
class MeasuredLengths:
    """The best length by what was measured.

    Counts fade with every round, also where it adds nothing to them: what was given up is tried again in time.
    """

    guesses: Acceptance = field(default_factory=Acceptance)
    passes: Line = field(default_factory=Line)
    num_guesses: float = 0.0
    guesses_s: float = 0.0

    def best(self, batch: int, most: int) -> int:
        """The length with the least time per token, for passes over `batch` chains."""
        if self.num_guesses == 0:
            return min(FIRST, most)
        guess_s = self.guesses_s / self.num_guesses
        return best_length(self.guesses.rates()[:most], lambda k: self.passes.expect(batch * (k + 1)) + k * guess_s)

    def count(self, runs: Sequence[tuple[int, int]]) -> None:
        """Of the lower member's guesses, as the judge judged them."""
        self.guesses.count(runs)

    def time(self, timing: Timing) -> None:
        """The price of a guess is that of a row of them, shared out; the price of a pass depends on its tokens."""
        self.passes.record(timing.num_tokens, timing.pass_s)
        if timing.num_guesses == 0:
            return
        each_s = self.guesses_s / self.num_guesses if self.num_guesses > 0 else 0.0
        draft_s = damped(timing.draft_s, timing.num_guesses * each_s)
        self.num_guesses = FADING * self.num_guesses + timing.num_guesses
        self.guesses_s = FADING * self.guesses_s + draft_s


def damped(taken_s: float, expected_s: float) -> float:
    """A time, or what an outlier counts as; whatever it was where nothing was expected."""
    return min(taken_s, OUTLIER * expected_s) if expected_s > 0 else taken_s
