"""Lengths: how many guesses a cascade's judge is asked about at a time.

This module decides that by what the judge's rounds have cost and given so far: it takes the length at which a token of
the judge's takes the least time. That time is all that the level above sees of this one, so if every level keeps to it,
the cascade as a whole is as fast as lengths can make it.

With a_j = P(guess j accepted | those before it were), k guesses give G(k) = 1 + sum over j <= k of a_1 ... a_j tokens.
Where k guesses cost c0(k) and the judge's pass over them c1(k), a token of the judge's costs (c1(k) + c0(k)) / G(k).
The judge may also draft by itself, in one call; that is what no guesses at all stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

MOST = 16  # guesses at a time, at most
FIRST = 4  # before anything was measured
FADING = 0.98  # what counts of the past after each round: some 50 rounds do
BELIEF, WEIGHT = 0.7, 2.0  # acceptance as long as nothing is known, and how many guesses that counts as
OTHERS_WEIGHT = 8.0  # the same where other sequences are known: a few bad guesses do not settle a text
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
class RoundTiming:
    """How long a round took: `num_guesses` in a row, and the judge's pass over `num_tokens` with its verdict."""

    num_guesses: int
    draft_s: float
    num_tokens: int
    pass_s: float


@runtime_checkable
class Lengths(Protocol):
    """Says how long the drafts of a cascade's lower member should be."""

    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        """How many guesses to ask for, for each of these sequences, of which `most[i]` are of use."""
        ...

    def count(self, seq_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Learn from a round's verdicts: how many guesses each sequence had, and how many were accepted."""
        ...

    def time(self, timing: RoundTiming) -> None:
        """Learn from a round's times."""
        ...

    def went_alone(self, seq_ids: Sequence[int], depth: int, taken_s: float | None) -> None:
        """Learn what the judge took for chains of `depth` tokens by itself; None: that was not its usual price."""
        ...

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop what is known of these sequences alone."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same length: drafts are then a function of the text in rejection modes, too."""

    length: int

    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        """What was fixed, or what is of use."""
        return [min(self.length, each) for each in most]

    def count(self, seq_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Nothing is learned."""

    def time(self, timing: RoundTiming) -> None:
        """Nothing is learned."""

    def went_alone(self, seq_ids: Sequence[int], depth: int, taken_s: float | None) -> None:
        """Nothing is learned."""

    def forget(self, seq_ids: Sequence[int]) -> None:
        """There is nothing to drop."""


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


@dataclass(slots=True)
class MeasuredLengths:
    """The best length by what was measured: acceptance by sequence, starting from that of all, and times of all.

    Counts fade with every round, also where it adds nothing to them: what was given up is tried again in time.
    """

    together: Acceptance = field(default_factory=Acceptance)
    apart: dict[int, Acceptance] = field(default_factory=dict)
    drafts: LinearCost = field(default_factory=lambda: LinearCost(flat=False))  # by guesses in a row
    passes: LinearCost = field(default_factory=LinearCost)  # by tokens in all
    alone: LinearCost = field(default_factory=LinearCost)  # by batch: a token each

    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        """For each the length with the least time per token, as if the others were asked for as much."""
        if self.drafts.weight == 0:
            return [min(FIRST, each) for each in most]
        batch, belief = len(seq_ids), self.together.overall()

        def round_s(length: int) -> float:
            if length == 0 and self.alone.weight > 0:
                return self.alone.expect(batch)
            return self.passes.expect(batch * (length + 1)) + (self.drafts.expect(length) if length else 0.0)

        rates = [self.apart.get(seq_id, Acceptance()).rates(belief, OTHERS_WEIGHT) for seq_id in seq_ids]
        return [best_length(own[:each], round_s) for own, each in zip(rates, most, strict=True)]

    def count(self, seq_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Of the lower member's guesses, as the judge judged them."""
        self.together.count(runs)
        for seq_id, run in zip(seq_ids, runs, strict=True):
            self.apart.setdefault(seq_id, Acceptance()).count([run])

    def forget(self, seq_ids: Sequence[int]) -> None:
        """What was known of them alone."""
        for seq_id in seq_ids:
            self.apart.pop(seq_id, None)

    def time(self, timing: RoundTiming) -> None:
        """A pass has its price by its tokens, and drafting by the guesses in a row."""
        self.passes.record(timing.num_tokens, timing.pass_s)
        if timing.num_guesses:
            self.drafts.record(timing.num_guesses, timing.draft_s)

    def went_alone(self, seq_ids: Sequence[int], depth: int, taken_s: float | None) -> None:
        """Every token counts as a round without guesses."""
        if taken_s is not None:
            self.alone.record(len(seq_ids), taken_s / depth)
        for _ in range(depth):
            self.count(seq_ids, [(0, 0)] * len(seq_ids))


def damped(taken_s: float, expected_s: float) -> float:
    """A time, with outliers limited; unchanged where no time was expected."""
    return min(taken_s, OUTLIER * expected_s) if expected_s > 0 else taken_s
