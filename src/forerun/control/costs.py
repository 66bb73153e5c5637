"""Costs: how many seconds passes and drafts take by their size, as they were seen to take.

One table holds the target's passes, by tokens, and one for each drafter its drafts, by depth. This file decides which
rounds are timed together, what sizes cost that were not seen, and what a round that took much longer or shorter than
expected says of all others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.economy import NO_TIME_S, damped

LATEST = 32  # rounds of a size that count
KNOWN = 4  # rounds of a size behind which one that took much longer no longer matters
LONG = 64  # rounds behind which what was seen of a size is old, or a change, or waiting for a round without prompts
CHANGED = 1.5  # times more, or less, that a round takes which is odd
CLEAR = 5  # odd rounds in a row that are a change; 3 are chance where one in five is odd, as on a busy machine
SHARE = 0.05  # of a round, in what is known of how far rounds are off, and of how many rows a drafter has guesses for
SHORT_BITS = 11  # texts of fewer than 2,048 tokens together are timed together; then each doubling for itself


@dataclass(slots=True)
class Level:
    """How much longer everything takes now than at first: it changes at once, where many rounds in a row were odd.

    What changes more slowly, or by less, sizes learn by themselves: a level that followed single rounds would drift
    where these are skewed. `scatter` is by how much single rounds are off: 0.1 where most take a tenth more or less
    than is usual.
    """

    factor: float = 1.0
    scatter: float = 0.0
    recent: list[float] = field(default_factory=list)
    num_jumps: int = 0  # times that it changed

    def record(self, surprise: float) -> bool:
        """Learn from what was taken over what was expected at this level; whether it changes."""
        self.recent = [*self.recent[1 - CLEAR :], surprise * self.factor]
        ratios = [each / self.factor for each in self.recent]
        if len(ratios) == CLEAR and (min(ratios) > CHANGED or max(ratios) < 1 / CHANGED):
            self.factor = sorted(self.recent)[CLEAR // 2]
            self.num_jumps += 1
            return True
        if 1 / CHANGED <= surprise <= CHANGED:
            self.scatter += SHARE * (abs(surprise - 1) - self.scatter)
        return False


@dataclass(slots=True)
class Curve:
    """Seconds by size at the usual level, for rounds of one kind.

    Smaller sizes never take more than larger ones: where they seem to, they were seen in a busier moment. Between sizes
    that were seen, and beyond them, lines go on. When the level changes, a new curve begins. Where one size alone was
    seen, all cost the same if the curve is `flat`; else they cost in proportion.
    """

    flat: bool = True
    seen: dict[int, list[float]] = field(default_factory=dict)  # what each size took of late
    last: dict[int, int] = field(default_factory=dict)  # the round in which it was seen
    num_jumps: int = 0  # of the level, when this curve began
    usual_s: dict[int, float] = field(default_factory=dict)  # of what was seen of a size, when it is known
    sizes: list[int] = field(default_factory=list)  # the knots, made when they are needed
    values: list[float] = field(default_factory=list)

    def record(self, size: int, at_level_s: float, now: int = 0) -> None:
        """Add what a size took, `now` by count of rounds. What is old counts as one round, if it is like this one."""
        known = self.seen.get(size, [])
        if known and now - self.last.get(size, 0) > LONG:
            known = [usual(known)] if 1 / CHANGED < at_level_s / usual(known) < CHANGED else []
        self.seen[size] = [*known[-LATEST:], at_level_s]
        self.last[size] = now
        self.usual_s[size], self.sizes = usual(self.seen[size]), []

    def begin_again(self, num_jumps: int, size: int | None = None) -> None:
        """The level has changed by what `size` took: it alone is known at the new one, by rounds before the change."""
        self.seen = {each: known for each, seen in self.seen.items() if each == size and (known := seen[: 1 - CLEAR])}
        self.num_jumps, self.usual_s, self.sizes = num_jumps, {}, []

    def fit(self) -> None:
        """Find the sizes and values between which lines go; what was seen KNOWN times stands against what was not."""
        sizes = sorted(self.seen)
        self.usual_s |= {size: usual(self.seen[size]) for size in sizes if size not in self.usual_s}
        values = [self.usual_s[size] for size in sizes]
        known = [len(self.seen[size]) >= KNOWN for size in sizes]
        most_s = most_known_s = math.inf
        for place in reversed(range(len(sizes))):
            values[place] = min(values[place], most_known_s if known[place] else most_s)
            most_s = min(most_s, values[place])
            most_known_s = values[place] if known[place] else most_known_s
        least_s = 0.0
        for place, value in enumerate(values):
            values[place] = max(value, least_s)
            least_s = values[place] if known[place] else least_s
        self.values = values
        self.sizes = sizes  # last, since an interrupt may come in between

    def expect(self, size: float | int) -> float:
        """Seconds for a size, or for so much on average; 0 as long as nothing was seen."""
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
        steepest = values[0] / first
        if place == 0:
            slope = (values[1] - values[0]) / (sizes[1] - first) if len(sizes) > 1 else 0.0 if self.flat else steepest
            return max(steepest * size, values[0] - slope * (first - size))
        if len(sizes) == 1:
            return values[0] if self.flat else steepest * size
        half = max(first, last / 2)
        return values[-1] + (values[-1] - self.expect(half)) / (last - half) * (size - last)


def usual(seconds: Sequence[float]) -> float:
    """The mean of the middle half, since single rounds may take any time."""
    few = (len(seconds) + 1) // 4
    middle = sorted(seconds)[few : len(seconds) - few]
    return sum(middle) / len(middle)


class Kind(NamedTuple):
    """Rounds that are timed together: about as many rows, texts about as long together, merged trees or not."""

    rows: int
    context: int
    merged: bool

    @classmethod
    def of(cls, num_rows: int, num_context: int = 0, merged: bool = False) -> Kind:
        """That of a round of so many rows, whose texts have so many tokens together."""
        return cls(num_rows.bit_length(), max(0, num_context.bit_length() - SHORT_BITS), merged)

    def distance(self, other: Kind) -> tuple[bool, int]:
        """How unlike they are."""
        return self.merged != other.merged, abs(self.rows - other.rows) + abs(self.context - other.context)


@dataclass(slots=True)
class CostTable:
    """Seconds by kind of round and by size, all at one level.

    A kind that was not seen yet is taken to cost what the most similar one does, and begins there. For passes,
    `prompt_s` is what a token of a prompt takes beside what the pass would take without, at the usual level; 0 if none
    was seen.
    """

    flat: bool = True
    level: Level = field(default_factory=Level)
    kinds: dict[Kind, Curve] = field(default_factory=dict)
    prompt_s: float = 0.0
    num_rounds: int = 0

    def of(self, kind: Kind) -> Curve:
        """The curve of this kind, or else of the most similar one; an empty one as long as nothing was seen."""
        known = self.kinds.get(kind)
        if known is None and self.kinds:
            known = self.kinds[min(self.kinds, key=lambda other: (kind.distance(other), other))]
        return known or Curve(self.flat)

    def new(self, kind: Kind) -> Curve:
        """A curve for this kind, in which all that is known of the most similar one counts as seen once."""
        like = self.of(kind)
        known = {size: [like.expect(size)] for size in like.seen}
        self.kinds[kind] = Curve(self.flat, known, {**like.last}, like.num_jumps)
        return self.kinds[kind]

    def expect(self, kind: Kind, size: float | int) -> float:
        """Seconds for a size now."""
        return self.level.factor * self.of(kind).expect(size)

    def record(self, kind: Kind, size: int, taken_s: float) -> float:
        """Learn from a round: how many times as long as was expected it took; 1.0 where nothing was expected."""
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
        """Learn from a round that read prompts: of its tokens, all but one for each row are counted as theirs."""
        more_s = taken_s / self.level.factor - self.of(kind).expect(num_rows)
        each_s = max(0.0, more_s) / (num_tokens - num_rows)
        self.prompt_s += (damped(each_s, self.prompt_s) - self.prompt_s) / (8 if self.prompt_s else 1)

    def of_rows(self, kind: Kind, num_beside_prompts: int | None = None) -> RowPassCosts:
        """What rows and guesses are taken to cost in rounds of this kind; `num_beside_prompts` rows with prompts."""
        curve = self.of(kind)
        num_free = max(curve.seen, default=0) if num_beside_prompts is None else num_beside_prompts
        return RowPassCosts(curve, self.level.factor, self.prompt_s, num_free)


class RowPassCosts(NamedTuple):
    """Seconds of a round's pass without the prompts that it may read, by the tokens of its texts and guesses.

    A pass over many tokens is limited by arithmetic: there a guess takes what every token of a prompt does. So each
    token above `num_free` counts as that much at least: beside prompts all guesses, elsewhere what is more than the
    largest pass that was seen.
    """

    curve: Curve
    factor: float
    token_s: float
    num_free: int

    def expect(self, num_tokens: float | int) -> float:
        """Seconds with so many tokens, or so many on average."""
        expected_s = self.curve.expect(num_tokens)
        if num_tokens > self.num_free:
            free_s = self.curve.expect(self.num_free) + self.token_s * (num_tokens - self.num_free)
            expected_s = max(expected_s, free_s)
        return self.factor * expected_s


def size_class(size: int) -> int:
    """Sizes that are corrected together: each of the small ones by itself, larger ones by eighths of their octave."""
    shift = max(0, size.bit_length() - 4)
    return size >> shift << shift
