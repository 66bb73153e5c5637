"""Costs: the measured seconds of passes and drafts, by size.

One table holds the target's passes, by number of tokens; each drafter has one for its drafts, by depth. This file
decides which rounds are timed together, how costs are interpolated between measured sizes, and when a run of unusually
long or short rounds means that the whole machine has become slower or faster.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from forerun.economy import NO_TIME_S, damped

LATEST = 32  # measurements of a size that are kept
KNOWN = 4  # measurements after which a size is trusted over its neighbours
LONG = 64  # rounds after which a measurement is old, and for which trials wait for a round without prefill
CHANGED = 1.5  # a round is odd if it took this many times longer or shorter than expected
CLEAR = 5  # odd rounds in a row that mean a change; 3 happen by chance where one in five is odd, as on a busy machine
SHARE = 0.05  # weight of a new round in moving averages
SHORT_BITS = 11  # sequences of less than 2,048 tokens in total are timed together; beyond, each doubling separately


@dataclass(slots=True)
class Level:
    """How many times longer everything takes now than at first. It changes at once, after CLEAR odd rounds in a row.

    Slower and smaller changes are learned by the curves: a level that followed single rounds would drift, since their
    times are skewed. `scatter` is the typical relative deviation of a round from its expected time.
    """

    factor: float = 1.0
    scatter: float = 0.0
    recent: list[float] = field(default_factory=list)
    num_jumps: int = 0  # how often the factor changed

    def record(self, surprise: float) -> bool:
        """Learn from a round's time over its expected time (`surprise`). Returns whether the level changes."""
        self.recent = [*self.recent[1 - CLEAR :], surprise]
        if len(self.recent) == CLEAR and (min(self.recent) > CHANGED or max(self.recent) < 1 / CHANGED):
            self.factor *= sorted(self.recent)[CLEAR // 2]
            self.recent = []
            self.num_jumps += 1
            return True
        if 1 / CHANGED <= surprise <= CHANGED:
            self.scatter += SHARE * (abs(surprise - 1) - self.scatter)
        return False


@dataclass(slots=True)
class Curve:
    """Seconds by size, at level 1, for rounds of one kind: linear between the measured sizes, and beyond them.

    The curve never falls: a small size that seems to take more than a larger one was measured in a busier moment. A
    change of the level starts the curve again. With one measured size, all sizes cost the same if the curve is `flat`,
    and otherwise they cost in proportion to their size.
    """

    flat: bool = True
    seen: dict[int, list[float]] = field(default_factory=dict)  # recent measurements of each size
    last: dict[int, int] = field(default_factory=dict)  # the round in which each size was last measured
    num_jumps: int = 0  # `Level.num_jumps` when this curve began
    usual_s: dict[int, float] = field(default_factory=dict)  # `usual` of `seen`, where it has been computed
    sizes: list[int] = field(default_factory=list)  # measured sizes in order; empty until `fit`
    values: list[float] = field(default_factory=list)  # their seconds

    def record(self, size: int, at_level_s: float, now: int = 0) -> None:
        """Add a measurement, made in round `now`. Old ones count as one measurement, or not at all if they differ."""
        known = self.seen.get(size, [])
        if known and now - self.last.get(size, 0) > LONG:
            known = [usual(known)] if 1 / CHANGED < at_level_s / usual(known) < CHANGED else []
        self.seen[size] = [*known[-LATEST:], at_level_s]
        self.last[size] = now
        self.usual_s[size], self.sizes = usual(self.seen[size]), []

    def begin_again(self, num_jumps: int, size: int | None = None) -> None:
        """Forget all measurements, as the level has changed; those of `size` from before the change are kept."""
        self.seen = {each: known for each, seen in self.seen.items() if each == size and (known := seen[: 1 - CLEAR])}
        self.num_jumps, self.usual_s, self.sizes = num_jumps, {}, []

    def fit(self) -> None:
        """Compute `sizes` and `values`, made monotone; sizes with KNOWN measurements prevail over those with fewer."""
        sizes = sorted(self.seen)
        self.usual_s |= {size: usual(self.seen[size]) for size in sizes if size not in self.usual_s}
        values = [self.usual_s[size] for size in sizes]
        if values != sorted(values):
            values = rising(values, [len(self.seen[size]) >= KNOWN for size in sizes])
        self.values = values
        self.sizes = sizes  # last, since an interrupt may come in between

    def expect(self, size: float | int) -> float:
        """Seconds for a size, which may be an average; 0 without measurements."""
        if not self.sizes:
            if not self.seen:
                return 0.0
            self.fit()
        sizes, values = self.sizes, self.values
        place = bisect_right(sizes, size)
        if 0 < place < len(sizes):
            start, end, low, high = sizes[place - 1], sizes[place], values[place - 1], values[place]
            return low + (high - low) * (size - start) / (end - start)
        first, last = sizes[0], sizes[-1]
        if size == last:
            return values[-1]
        if len(sizes) == 1:
            return values[0] if self.flat else values[0] / first * size
        if place == 0:
            slope = (values[1] - values[0]) / (sizes[1] - first)
            return max(values[0] / first * size, values[0] - slope * (first - size))
        half = max(first, last / 2)
        return values[-1] + (values[-1] - self.expect(half)) / (last - half) * (size - last)


def rising(values: Sequence[float], known: Sequence[bool]) -> list[float]:
    """The values made monotone: each is lowered to the least one after it, then raised to the last known one before it.

    A known value is lowered by known ones only.
    """
    result, most_s, most_known_s = [*values], math.inf, math.inf
    for place in reversed(range(len(result))):
        result[place] = min(result[place], most_known_s if known[place] else most_s)
        most_s = min(most_s, result[place])
        most_known_s = result[place] if known[place] else most_known_s
    return list(accumulate(result, max))


def usual(seconds: Sequence[float]) -> float:
    """The mean of the middle half, since single rounds may take any time."""
    few = (len(seconds) + 1) // 4
    middle = sorted(seconds)[few : len(seconds) - few]
    return sum(middle) / len(middle)


class Kind(NamedTuple):
    """Rounds that are timed together: of similar batch size and total context, with merged trees or without."""

    rows: int
    context: int
    merged: bool

    @classmethod
    def of(cls, num_rows: int, num_context: int = 0, merged: bool = False) -> Kind:
        """The kind of a round with `num_rows` sequences, whose texts have `num_context` tokens in total."""
        return cls(num_rows.bit_length(), max(0, num_context.bit_length() - SHORT_BITS), merged)

    def distance(self, other: Kind) -> tuple[bool, int]:
        """A key that sorts other kinds by similarity to this one."""
        return self.merged != other.merged, abs(self.rows - other.rows) + abs(self.context - other.context)


@dataclass(slots=True)
class CostTable:
    """Seconds by kind of round and by size, with one level for all.

    A kind without measurements is assumed to cost the same as the most similar one, and starts from its values. For
    passes, `prompt_s` is the additional time per prefilled token at level 1; 0 if unknown.
    """

    flat: bool = True
    level: Level = field(default_factory=Level)
    kinds: dict[Kind, Curve] = field(default_factory=dict)
    prompt_s: float = 0.0
    num_rounds: int = 0

    def of(self, kind: Kind) -> Curve:
        """The curve of this kind, or else of the most similar one; an empty one without measurements."""
        known = self.kinds.get(kind)
        if known is None and self.kinds:
            known = self.kinds[min(self.kinds, key=lambda other: (kind.distance(other), other))]
        return known or Curve(self.flat)

    def new(self, kind: Kind) -> Curve:
        """A new curve for this kind, which starts with one measurement for each size of the most similar kind."""
        like = self.of(kind)
        known = {size: [like.expect(size)] for size in like.seen}
        self.kinds[kind] = Curve(self.flat, known, {**like.last}, like.num_jumps)
        return self.kinds[kind]

    def expect(self, kind: Kind, size: float | int) -> float:
        """Seconds for a size, at the present level."""
        return self.level.factor * self.of(kind).expect(size)

    def record(self, kind: Kind, size: int, taken_s: float) -> float:
        """Learn from a round. Returns its time over the expected time, or 1.0 if there was no expectation."""
        curve, size = self.kinds.get(kind) or self.new(kind), size_class(size)
        if curve.num_jumps != self.level.num_jumps:
            curve.begin_again(self.level.num_jumps)
        expected_s = self.level.factor * curve.expect(size)
        if size in curve.seen:
            before = self.level.factor
            if self.level.record(taken_s / max(NO_TIME_S, expected_s)):
                fits = 1 / CHANGED < taken_s * before / (expected_s * self.level.factor) < CHANGED
                curve.begin_again(self.level.num_jumps, size if fits else None)
        self.num_rounds += 1
        curve.record(size, damped(taken_s / self.level.factor, curve.expect(size)), self.num_rounds)
        return taken_s / expected_s if expected_s else 1.0

    def record_reading(self, kind: Kind, num_rows: int, num_tokens: int, taken_s: float) -> None:
        """Learn `prompt_s` from a round with prefill; all its tokens but one per sequence count as prefilled."""
        more_s = taken_s / self.level.factor - self.of(kind).expect(num_rows)
        each_s = max(0.0, more_s) / (num_tokens - num_rows)
        self.prompt_s += (damped(each_s, self.prompt_s) - self.prompt_s) / (8 if self.prompt_s else 1)

    def of_rows(self, kind: Kind, num_beside_prompts: int | None = None) -> RowPassCosts:
        """Pass costs for rounds of this kind; `num_beside_prompts` is the batch size of a round that also prefills."""
        curve = self.of(kind)
        num_free = max(curve.seen, default=0) if num_beside_prompts is None else num_beside_prompts
        return RowPassCosts(curve, self.level.factor, self.prompt_s, num_free)


class RowPassCosts(NamedTuple):
    """Seconds of a pass by its number of roots and draft tokens, without prompts that are prefilled in it.

    A pass over many tokens is limited by arithmetic; there a draft token costs as much as a prefilled one (`token_s`).
    So each token above `num_free` costs at least that: next to prompts every draft token, otherwise those above the
    largest measured pass.
    """

    curve: Curve
    factor: float
    token_s: float
    num_free: int

    def expect(self, num_tokens: float | int) -> float:
        """Seconds for a number of tokens, which may be an average."""
        expected_s = self.curve.expect(num_tokens)
        if num_tokens > self.num_free:
            free_s = self.curve.expect(self.num_free) + self.token_s * (num_tokens - self.num_free)
            expected_s = max(expected_s, free_s)
        return self.factor * expected_s


def size_class(size: int) -> int:
    """The size rounded down to its class: every size below 16 is one, then there are eight per doubling."""
    shift = max(0, size.bit_length() - 4)
    return size >> shift << shift
