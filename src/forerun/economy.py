"""The economy of drafting: what guesses give, what they cost, and how many of them pay.

With a_j = P(guess j accepted | those before it were), a round of k guesses gives G(k) = 1 + sum over j <= k of
a_1 ... a_j tokens; where it takes C(k) seconds, a token costs C(k) / G(k), and the depth with the least is the best.
Acceptance and costs are what was seen, the latest counting most. The engine's controller decides by this how far to
draft, a mix which of its arms to ask, and a cascade how long the drafts of its lower members should be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

MOST = 16  # depths at which acceptance is counted
FADING = 0.97  # what counts of the past after each round: some 30 rounds do
BELIEF, WEIGHT = 0.7, 2.0  # acceptance as long as nothing is known, and how many guesses that counts as
OTHERS_WEIGHT = 8.0  # the same where other sequences are known: a few bad guesses do not settle a text
LEAST_LIKE, MOST_LIKE = 4.0, 1000.0  # guesses that what is known of all sequences counts as for one of them
LARGEST_UNIT = 1e12
OUTLIER = 4.0  # times what was expected: a busy machine, not a price
LEVEL_SHARE = 0.05  # of a round's surprise that the level takes; less than sizes take, whose errors it would hide
LATEST = 12  # passes of a size that count
NEAR = 2  # times the largest size that was seen since the level changed: of larger ones that says nothing
LONG_UNSEEN = 64  # passes of other sizes, behind which what is known of a size counts as one pass
NO_TIME_S = 1e-9
SHORT_BITS = 11  # texts of fewer than 2,048 tokens together are priced together; then each doubling for itself
CLEAR, CHANGED = 3, 1.5  # so many rounds in a row that take so many times more, or less, are a change


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


def best_depth(acceptance: Sequence[float], round_s: Callable[[int], float]) -> int:
    """The depth whose tokens cost least, the smallest of several; as many guesses at most as `acceptance` knows of."""
    return min(range(len(acceptance) + 1), key=lambda depth: cost_per_token(depth, acceptance, round_s))


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

    def knows(self, size: float | int) -> bool:
        """Whether what it expects of a size follows from what was seen: that size alone, or several others."""
        if self.weight == 0:
            return False
        middle = self.sizes / self.weight
        return abs(size - middle) < 1e-6 or self.squares / self.weight - middle**2 > 1e-6

    def record(self, size: int, taken_s: float) -> None:
        """Add what a size took."""
        taken_s = damped(taken_s, self.expect(size))
        self.weight = FADING * self.weight + 1
        self.sizes = FADING * self.sizes + size
        self.squares = FADING * self.squares + size**2
        self.seconds = FADING * self.seconds + taken_s
        self.products = FADING * self.products + size * taken_s

    def expect(self, size: float | int) -> float:
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
    """a_j by depth, as counted; the latest rounds count most.

    What is counted weighs more from round to round instead of all that was counted before weighing less: `unit` is what
    a guess of now weighs.
    """

    offered: list[float] = field(default_factory=lambda: [0.0] * MOST)  # by depth: guesses that were up for judgement
    accepted: list[float] = field(default_factory=lambda: [0.0] * MOST)
    unit: float = 1.0

    def rates(self, belief: float = BELIEF, weight: float = WEIGHT) -> list[float]:
        """a_j for every depth: as counted there, starting from what was counted at all depths together."""
        more = WEIGHT * self.unit
        start = more * self.overall(belief, weight)
        return [(a + start) / (o + more) for a, o in zip(self.accepted, self.offered, strict=True)]

    def overall(self, belief: float = BELIEF, weight: float = WEIGHT) -> float:
        """Of all depths together, starting from a belief that counts as `weight` guesses."""
        weight *= self.unit
        return (sum(self.accepted) + weight * belief) / (sum(self.offered) + weight)

    def of_one(self, all_rates: Sequence[float], weight: float) -> list[float]:
        """a_j of one sequence, starting from those of all sequences, which count as `weight` guesses at each depth."""
        more = weight * self.unit
        pairs = zip(self.accepted, self.offered, all_rates, strict=True)
        return [(a + more * rate) / (o + more) for a, o, rate in pairs]

    def limit(self, most: float) -> None:
        """Let what was counted at any depth weigh no more than so many guesses, since it was long ago."""
        share = min(1.0, most * self.unit / max(self.offered)) if any(self.offered) else 1.0
        self.offered = [share * n for n in self.offered]
        self.accepted = [share * n for n in self.accepted]

    def count(self, runs: Sequence[tuple[int, int]]) -> None:
        """A round's guesses and how many of them were accepted, by sequence.

        A guess counts where all before it were accepted.
        """
        self.unit /= FADING
        for num_guesses, num_accepted in runs:
            for depth in range(min(num_guesses, num_accepted + 1, MOST)):
                self.offered[depth] += self.unit
                if depth < num_accepted:
                    self.accepted[depth] += self.unit
        if self.unit > LARGEST_UNIT:
            self.offered = [n / self.unit for n in self.offered]
            self.accepted = [n / self.unit for n in self.accepted]
            self.unit = 1.0


def likeness(apart: Sequence[Acceptance], unknown: float) -> float:
    """How many guesses of one sequence what is known of all of them is worth, by how much they differ.

    The variance between sequences is what is left of that of their shares when chance is taken off (the method of
    moments for a binomial with a beta prior). `unknown` where there is nothing to compare.
    """
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


@dataclass(slots=True)
class Level:
    """How much longer everything takes now than was expected: slowly, or at once where it is clear."""

    factor: float = 1.0
    recent: list[float] = field(default_factory=list)
    num_jumps: int = 0  # times that it changed at once

    def record(self, surprise: float) -> bool:
        """Learn from what was taken over what was expected at this level; whether that is near what is usual now."""
        self.recent = [*self.recent[1 - CLEAR :], surprise * self.factor]
        ratios = [each / self.factor for each in self.recent]
        if len(ratios) == CLEAR and (min(ratios) > CHANGED or max(ratios) < 1 / CHANGED):
            self.factor = sorted(self.recent)[CLEAR // 2]
            self.num_jumps += 1
        elif 1 / CHANGED <= surprise <= CHANGED:
            self.factor *= surprise**LEVEL_SHARE
        return 1 / CHANGED <= self.recent[-1] / self.factor <= CHANGED


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

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self.sizes)

    def expect(self, num_tokens: int) -> float:
        """Seconds with so many tokens; 0 as long as nothing was seen."""
        own = self.sizes.get(size_class(num_tokens))
        if own is not None and (own.num_jumps == self.level.num_jumps or not self.line_holds(num_tokens)):
            return self.level.factor * own.usual_s
        line = self.line if self.line_holds(num_tokens) or not self.before.weight else self.before
        return self.level.factor * line.expect(num_tokens)

    def expect_between(self, num_tokens: float | int) -> float:
        """The same for a number that is expected on average."""
        whole = int(num_tokens)
        more = num_tokens - whole
        return self.expect(whole) if more == 0 else (1 - more) * self.expect(whole) + more * self.expect(whole + 1)

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
        own = self.sizes.get(size)
        if own is not None and own.num_jumps != self.level.num_jumps:
            own = None
        is_usual = own is None or self.level.record(taken_s / max(NO_TIME_S, expected_s))
        at_level_s = taken_s / self.level.factor
        if own is None or own.num_jumps != self.level.num_jumps:
            self.sizes[size] = Size(at_level_s, self.level.num_jumps, last=self.num_passes)
        else:
            own.record(at_level_s, is_usual, self.num_passes)
        if self.num_jumps != self.level.num_jumps:
            self.before = self.line if self.line.weight else self.before
            self.line, self.largest, self.num_jumps = LinearCost(), 0, self.level.num_jumps
        self.largest = max(self.largest, num_tokens)
        if is_usual:
            self.line.record(num_tokens, at_level_s)
        return taken_s * CHANGED < expected_s

    def copy(self) -> PassCost:
        """The same beliefs, held lightly: what is measured soon outweighs them. The level is the same one."""
        sizes = {size: Size(own.usual_s, own.num_jumps) for size, own in self.sizes.items()}
        return PassCost(replace(self.line), self.level, sizes, self.num_jumps, replace(self.before), self.largest)


@dataclass(frozen=True, slots=True)
class Beside:
    """Seconds of rounds that read prompts too, without the prompts, by the tokens of `num_rows` texts and guesses.

    A pass over many tokens is limited by arithmetic: a guess takes `token_s` there, as every token of a prompt does,
    even where a few guesses alone would be as good as free.
    """

    passes: PassCost
    num_rows: int
    token_s: float

    def expect(self, num_tokens: int) -> float:
        """Seconds with so many tokens."""
        return self.expect_between(num_tokens)

    def expect_between(self, num_tokens: float | int) -> float:
        """The same for a number that is expected on average."""
        least_s = self.passes.expect(self.num_rows) + self.token_s * max(0.0, num_tokens - self.num_rows)
        return max(least_s, self.passes.expect_between(num_tokens))


@dataclass(frozen=True, slots=True)
class Alone:
    """Seconds of rounds that read no prompts. Larger passes than were seen cost what a line through those says, and
    `token_s` at least for every token more: at some size passes become limited by arithmetic, as those of prompts are.
    """

    passes: PassCost
    token_s: float

    def expect(self, num_tokens: int) -> float:
        """Seconds with so many tokens."""
        return self.expect_between(num_tokens)

    def expect_between(self, num_tokens: float | int) -> float:
        """The same for a number that is expected on average."""
        expected_s, largest = self.passes.expect_between(num_tokens), max(self.passes.sizes, default=0)
        if num_tokens <= largest:
            return expected_s
        return max(expected_s, self.passes.expect(largest) + self.token_s * (num_tokens - largest))


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

    def alone(self, kind: Kind) -> Alone:
        """The same where no prompts are read."""
        return Alone(self.of(kind), self.level.factor * self.prompt_s)

    def beside_prompts(self, kind: Kind, num_rows: int) -> Beside:
        """What rounds of this kind are taken to cost where prompts are read in the same pass, without the prompts."""
        return Beside(self.of(kind), num_rows, self.level.factor * self.prompt_s)


def size_class(num_tokens: int) -> int:
    """Sizes that are corrected together: each of the small ones by itself, larger ones by eighths of their octave."""
    shift = max(0, num_tokens.bit_length() - 4)
    return num_tokens >> shift << shift


def row_class(num_rows: int) -> int:
    """Batches that are timed together."""
    return num_rows.bit_length()


def damped(taken_s: float, expected_s: float) -> float:
    """A time, with outliers limited; unchanged where no time was expected."""
    return min(taken_s, OUTLIER * expected_s) if expected_s > 0 else taken_s
