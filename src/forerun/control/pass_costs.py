"""Pass costs: how long the target's part of a round takes, by its tokens, as rounds were seen to take.

This file decides which rounds are priced together, how sizes that were not seen are priced, and what a round that took
much longer or shorter than expected says of all others. What drafting takes is in `drafters.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from forerun.economy import CHANGED, CLEAR, NO_TIME_S, Level, LinearCost, damped

LATEST = 12  # passes of a size that count
NEAR = 2  # times the largest size that was seen since the level changed: of larger ones that says nothing
LONG_UNSEEN = 64  # passes of other sizes, behind which what is known of a size counts as one pass
SHORT_BITS = 11  # texts of fewer than 2,048 tokens together are priced together; then each doubling for itself
NOISE = 1.03  # times that a pass may seem to take of what a larger one does


@dataclass(slots=True)
class Size:
    """Seconds of passes of a size at the usual level; `odd_s` are the last ones' that were far from it.

    `num_jumps` is how often the level had changed at once when this size was last seen.
    """

    usual_s: float
    num_jumps: int
    num_seen: int = 1
    odd_s: list[float] = field(default_factory=list)
    last: int = 0  # pass of this size, counting those of all sizes

    def record(self, taken_s: float, is_usual: bool, number: int) -> None:
        """Learn from a pass. What is far from usual counts if it comes CLEAR times; what is old counts little."""
        if number - self.last > LONG_UNSEEN:
            self.num_seen = 1
        self.last = number
        if not is_usual:
            alike = [each for each in self.odd_s if each / CHANGED < taken_s < each * CHANGED]
            self.odd_s = [*alike, taken_s]
            if len(self.odd_s) < CLEAR:
                return
        self.num_seen = min(self.num_seen + 1, LATEST) if is_usual else 1
        self.usual_s += (taken_s - self.usual_s) / self.num_seen
        self.odd_s = []


@dataclass(slots=True)
class PassCost:
    """Seconds that the target takes for a round, by the tokens in its pass.

    Every size is known by itself once it was seen, others by a line through what was seen. `level` follows what makes
    all sizes dearer, such as a busy machine.
    """

    line: LinearCost = field(default_factory=LinearCost)
    level: Level = field(default_factory=Level)
    sizes: dict[int, Size] = field(default_factory=dict)
    num_jumps: int = 0  # of the level, when the line began
    before: LinearCost = field(default_factory=LinearCost)  # the line until then
    largest: int = 0  # size since then
    num_passes: int = 0

    def expect(self, num_tokens: float | int) -> float:
        """Seconds with so many tokens, or so many on average; 0 as long as nothing was seen."""
        whole = int(num_tokens)
        more = num_tokens - whole
        if more:
            return (1 - more) * self.expect(whole) + more * self.expect(whole + 1)
        seen = self.sizes.get(size_class(whole))
        if seen is not None and (seen.num_jumps == self.level.num_jumps or not self.line_holds(whole)):
            return self.level.factor * seen.usual_s
        line = self.line if self.line_holds(whole) or not self.before.weight else self.before
        return self.level.factor * line.expect(whole)

    def table(self, most: int) -> list[float]:
        """Seconds with 0, 1, ... tokens."""
        jumps, factor, sizes = self.level.num_jumps, self.level.factor, self.sizes
        if not (self.line_holds(0) and self.line_holds(most)):
            return [self.expect(num_tokens) for num_tokens in range(most + 1)]
        first_s, each_s = self.line.straight()
        table = [factor * (first_s + each_s * num_tokens) for num_tokens in range(most + 1)]
        for num_tokens in range(most + 1):
            size = sizes.get(size_class(num_tokens))
            if size is not None and size.num_jumps == jumps:
                table[num_tokens] = factor * size.usual_s
        return table

    def line_holds(self, num_tokens: int) -> bool:
        """Whether what was seen since the level changed says something of this size.

        Of much larger ones it does not: passes would seem to cost the same for any number of tokens.
        """
        near = num_tokens <= NEAR * self.largest
        return self.num_jumps == self.level.num_jumps and near and self.line.knows(num_tokens)

    def record(self, num_tokens: int, taken_s: float) -> bool:
        """Learn from a round; whether it took much less than was expected.

        What changes the level may change what sizes cost beside each other: each is learned anew.
        """
        self.num_passes += 1
        size, expected_s = size_class(num_tokens), self.expect(num_tokens)
        seen = self.sizes.get(size)
        if seen is not None and seen.num_jumps != self.level.num_jumps:
            seen = None
        is_usual = seen is None or self.level.record(taken_s / max(NO_TIME_S, expected_s))
        at_level_s = taken_s / self.level.factor
        if seen is None or seen.num_jumps != self.level.num_jumps:
            self.sizes[size] = Size(at_level_s, self.level.num_jumps, last=self.num_passes)
        else:
            seen.record(at_level_s, is_usual, self.num_passes)
        if self.num_jumps != self.level.num_jumps:
            self.before = self.line if self.line.weight else self.before
            self.line, self.largest, self.num_jumps = LinearCost(), 0, self.level.num_jumps
        self.largest = max(self.largest, num_tokens)
        if is_usual:
            self.line.record(num_tokens, at_level_s)
        self.lower_smaller(size)
        return taken_s * CHANGED < expected_s

    def lower_smaller(self, size: int) -> None:
        """Smaller passes take no longer than larger ones: where they seemed to, they were seen in a busier moment."""
        seen = self.sizes[size]
        for smaller, other in self.sizes.items() if seen.num_seen >= CLEAR else ():
            if smaller < size and other.num_jumps == seen.num_jumps and other.usual_s > NOISE * seen.usual_s:
                other.usual_s, other.num_seen = NOISE * seen.usual_s, 1

    def copy(self) -> PassCost:
        """These sizes, each counted as one pass, so that what is measured soon outweighs them; the level is shared."""
        sizes = {size: Size(seen.usual_s, seen.num_jumps) for size, seen in self.sizes.items()}
        return PassCost(replace(self.line), self.level, sizes, self.num_jumps, replace(self.before), self.largest)


@dataclass(frozen=True, slots=True)
class RowPassCosts:
    """Seconds of a round's pass without the prompts that it may read, by the tokens of its texts and guesses.

    A pass over many tokens is limited by arithmetic: there a guess takes `token_s`, as every token of a prompt does.
    So each token above `num_free` counts as that much at least: beside prompts all guesses, elsewhere what is more than
    the largest pass that was seen.
    """

    passes: PassCost
    token_s: float
    num_free: int

    def expect(self, num_tokens: float | int) -> float:
        """Seconds with so many tokens, or so many on average."""
        expected_s = self.passes.expect(num_tokens)
        if num_tokens <= self.num_free:
            return expected_s
        return max(expected_s, self.passes.expect(self.num_free) + self.token_s * (num_tokens - self.num_free))

    def table(self, most: int) -> list[float]:
        """Seconds with 0, 1, ... tokens."""
        table = self.passes.table(most)
        if most > self.num_free:
            free_s = self.passes.expect(self.num_free)
            for num_tokens in range(self.num_free + 1, most + 1):
                table[num_tokens] = max(table[num_tokens], free_s + self.token_s * (num_tokens - self.num_free))
        return table


class Kind(NamedTuple):
    """Rounds that are priced together: about as many rows, texts about as long together, merged trees or not."""

    rows: int
    context: int
    merged: bool

    @classmethod
    def of(cls, num_rows: int, num_context: int, merged: bool = False) -> Kind:
        """That of a round of so many rows, whose texts have so many tokens together."""
        return cls(row_class(num_rows), max(0, num_context.bit_length() - SHORT_BITS), merged)

    def distance(self, other: Kind) -> tuple[bool, int]:
        """How unlike they are."""
        return self.merged != other.merged, abs(self.rows - other.rows) + abs(self.context - other.context)


@dataclass(slots=True)
class PassCosts:
    """Seconds that the target takes for rounds: a PassCost for every kind of them, all at one level.

    A kind that was not seen yet is taken to cost what the most similar one does, and begins there. `prompt_s` is what a
    token of a prompt takes beside what the pass would take without prompts, at the usual level; 0 if none was seen.
    """

    level: Level = field(default_factory=Level)
    kinds: dict[Kind, PassCost] = field(default_factory=dict)
    prompt_s: float = 0.0

    def of(self, kind: Kind) -> PassCost:
        """What rounds of this kind are taken to cost; nothing as long as nothing was seen."""
        known = self.kinds.get(kind)
        if known is None and self.kinds:
            known = self.kinds[min(self.kinds, key=lambda other: (kind.distance(other), other))]
        return known or PassCost(level=self.level)

    def record(self, kind: Kind, num_tokens: int, taken_s: float) -> bool:
        """Learn from a round; whether it took much less than was expected."""
        if kind not in self.kinds:
            self.kinds[kind] = self.of(kind).copy()
        return self.kinds[kind].record(num_tokens, taken_s)

    def record_reading(self, kind: Kind, num_rows: int, num_tokens: int, taken_s: float) -> None:
        """Learn from a round that read prompts: of its tokens, all but one for each row are counted as theirs."""
        more_s = (taken_s - self.of(kind).expect(num_rows)) / self.level.factor
        each_s = max(0.0, more_s) / (num_tokens - num_rows)
        self.prompt_s += (damped(each_s, self.prompt_s) - self.prompt_s) / (8 if self.prompt_s else 1)

    def of_rows(self, kind: Kind, num_beside_prompts: int | None = None) -> RowPassCosts:
        """What rows and guesses are taken to cost in rounds of this kind; `num_beside_prompts` rows with prompts."""
        passes = self.of(kind)
        num_free = max(passes.sizes, default=0) if num_beside_prompts is None else num_beside_prompts
        return RowPassCosts(passes, self.level.factor * self.prompt_s, num_free)


def size_class(num_tokens: int) -> int:
    """Sizes that are corrected together: each of the small ones by itself, larger ones by eighths of their octave."""
    shift = max(0, num_tokens.bit_length() - 4)
    return num_tokens >> shift << shift


def row_class(num_rows: int) -> int:
    """Batches that are timed together."""
    return num_rows.bit_length()
