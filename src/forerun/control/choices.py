"""Choices for a round: which option each row is drafted by and how far, and what such a round gives and takes.

`measured.py` weighs the choices and takes one, or tries something else; `drafters.py` knows the options that a row has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from forerun.control.drafters import BEHIND, SPREAD, TRIES, Assignment, DraftOption, MeasuredDrafters, RetryTimer
from forerun.control.pass_costs import RowPassCosts
from forerun.draft.base import NO_DRAFT, Budget
from forerun.economy import NO_TIME_S

FAVOR = 0.02  # by which drafting must be better than plain decoding to be chosen, on machines whose rounds are even
ALONE = 0.25  # of how far rounds are off elsewhere: a row's own rounds soon tell, and no others wait for them
AWAKE = 64  # rounds behind a change before which another one is not seen as new
HOLD = 8  # rounds for which a plan is held at most
NOTHING, OTHER_DEPTH = -1, -2  # on trial instead of a drafter: to draft nothing; what is drafted, half or twice as deep
MANY = 5  # members, above which sets of some of them are not looked at

Options = Mapping[int, DraftOption]  # of a row, by drafter
Choice = Sequence[Assignment | None]  # for every row


@dataclass(slots=True)
class Planned:
    """The choice for a round, and what it would be worth."""

    choice: Choice
    tokens_per_s: float

    @property
    def under_way(self) -> bool:
        """Whether something is drafted, and nobody has much to read for it first."""
        unread = [num for each in self.choice if each for num in each.option.num_unread.values()]
        return bool(unread) and max(unread) <= BEHIND

    def value(self, scatter: float) -> float:
        """What it is worth beside others, where rounds are off by `scatter`.

        The best of many noisy estimates is too high; that of plain decoding is not, so it counts as a little better.
        """
        if any(self.choice):
            return self.tokens_per_s
        return self.tokens_per_s * (1 + max(FAVOR, scatter if len(self.choice) > 1 else ALONE * scatter))


@dataclass(slots=True)
class Drafts:
    """The drafts of a round that is being planned: how deep each row is, what they give and what they take."""

    drafters: MeasuredDrafters
    costs: RowPassCosts  # of the target's pass
    depths: list[int]
    num_tokens: float | int  # in that pass
    gain: float
    steps: dict[int, float] = field(default_factory=dict)  # guesses that a member draws, one behind the other
    num_rows: dict[int, int] = field(default_factory=dict)
    num_unread: dict[int, int] = field(default_factory=dict)

    @classmethod
    def none(cls, drafters: MeasuredDrafters, costs: RowPassCosts, num_rows: int) -> Drafts:
        """Of a round in which nothing is drafted."""
        return cls(drafters, costs, [0] * num_rows, num_tokens=num_rows, gain=float(num_rows))

    def deepen(self, row: int, option: DraftOption, depth: int, gain: float) -> None:
        """Draft a row so far, which adds so many accepted guesses."""
        before, self.depths[row] = self.depths[row], depth
        self.num_tokens += option.num_made(depth) - option.num_made(before)
        self.gain += gain
        for member in option.members:
            self.steps[member] = max(self.steps.get(member, 0), option.num_drawn(depth))
            if before == 0:
                self.num_rows[member] = self.num_rows.get(member, 0) + 1
                self.num_unread[member] = self.num_unread.get(member, 0) + option.num_unread.get(member, 0)

    def drafting_s(self) -> float:
        """Seconds that drafting takes."""
        taken_s = 0.0
        for member, steps in self.steps.items():
            taken_s += self.drafters.all[member].cost_s(steps, self.num_rows[member], self.num_unread[member])
        return taken_s

    def round_s(self) -> float:
        """Seconds that the round takes. No pass takes less than one without guesses.

        Where a larger one seems to, that is noise, by which even guesses that are always wrong would pay.
        """
        return max(self.costs.expect(self.num_tokens), self.costs.expect(len(self.depths))) + self.drafting_s()

    def whole_s(self) -> float:
        """Seconds of the round with all that members have to read first, which serves later rounds too."""
        reading_s = sum(self.drafters.all[member].reading_s * num for member, num in self.num_unread.items())
        return self.round_s() + (1 - 1 / SPREAD) * reading_s

    def tokens_per_s(self) -> float:
        """Tokens that the round gives, over the time that it takes."""
        return self.gain / max(NO_TIME_S, self.round_s())

    def guess_s(self) -> float:
        """What one guess of a row alone takes: its part of drafting, and of what the pass takes for so many tokens.

        Passes are compared with half as many guesses more and less: a few alone would show little but noise.
        """
        num_rows = len(self.depths)
        half = max(1.0, (self.num_tokens - num_rows) / 2)
        fewer, more = max(float(num_rows), self.num_tokens - half), self.num_tokens + half
        pass_s = (self.costs.expect(more) - self.costs.expect(fewer)) / (more - fewer)
        return max(0.0, pass_s) + self.drafting_s() / max(self.steps.values())


def speeds(option: DraftOption, drafters: MeasuredDrafters, costs: RowPassCosts) -> list[float]:
    """Tokens per second of a row alone that is drafted by this option, by depth; those of plain decoding first."""
    lines = [drafters.all[member].cost_line(1, option.num_unread.get(member, 0)) for member in option.members]
    first_s, step_s = sum(line[0] for line in lines), sum(line[1] for line in lines)
    chain, num_made = option.budget.nodes == option.budget.depth, option.made
    pass_s, gain = costs.table(2 + option.budget.nodes), 1.0
    plain_s = max(NO_TIME_S, pass_s[1])
    per_s = [1 / plain_s]
    for depth, chance in enumerate(option.survival, 1):
        num_tokens = 1 + (num_made[depth - 1] if num_made else depth if chain else option.num_nodes(depth))
        whole = int(num_tokens)
        taken_s = pass_s[whole]
        if whole != num_tokens:
            taken_s += (num_tokens - whole) * (pass_s[whole + 1] - taken_s)
        gain += chance
        steps = 1 + num_made[depth - 2] if num_made and depth > 1 else depth
        per_s.append(gain / ((taken_s if taken_s > plain_s else plain_s) + first_s + step_s * steps))
    return per_s


def sets(members: Sequence[int]) -> Iterator[frozenset[int]]:
    """The sets of members that are looked at, small ones first, none at all before them."""
    sizes = range(len(members) + 1) if len(members) <= MANY else (0, 1, len(members))
    return (frozenset(chosen) for size in sizes for chosen in itertools.combinations(members, size))


def tokens_of(choice: Choice) -> float:
    """What a round of this choice gives."""
    return float(len(choice)) + sum(each.gain for each in choice if each is not None)


def best_of(options: Options, among: frozenset[int], merging: bool) -> DraftOption | None:
    """The option with the most gain among those that these members can draft, the first of several; None if none.

    A row that must be drafted has an option in every set.
    """
    possible = [option for option in options.values() if merging or len(option.members) == 1]
    inside = [option for option in possible if option.members <= among]
    forced = [option for option in possible or options.values() if not option.free]
    return max(inside or forced, key=lambda option: option.gain, default=None)


def fallbacks(assigned: Assignment | None, options: Options) -> list[Budget]:
    """The budget that was chosen; behind a merged one, which takes the most room, that of its best member."""
    if assigned is None:
        return [NO_DRAFT]
    members = assigned.option.members
    single = best_of(options, members, merging=False) if len(members) > 1 else None
    smaller = [Assignment(single, min(assigned.depth, single.budget.depth))] if single else []
    return [each.budget for each in (assigned, *smaller)]


@dataclass(slots=True)
class TakenPlan:
    """The plan of the last round, which is held for some more as long as little changes."""

    assigned: Mapping[int, Assignment | None] = field(default_factory=dict)  # by sequence
    fallbacks: Sequence[Sequence[Budget]] = ()  # by row: its budget, then smaller ones
    tokens_per_s: float = 0.0  # that it promised
    num_held: int = HOLD  # rounds


@dataclass(slots=True)
class Trials:
    """When plain decoding and another depth are tried again, and what is on trial in the last round."""

    plain: RetryTimer = field(default_factory=RetryTimer)
    other_depth: RetryTimer = field(default_factory=lambda: RetryTimer(num_rounds=TRIES))
    deeper: bool = False  # whether the last depth that was tried was twice what is drafted, not half of it
    num_reading: int = 0  # rounds in a row that read prompts
    tried: int | None = None  # a drafter, NOTHING or OTHER_DEPTH
    patience: int = 0  # rounds that the next trial of that has to wait
    awake: int = AWAKE  # rounds since something changed

    def wake(self) -> bool:
        """Something has changed: try plain decoding soon. False where that was done a short while ago."""
        if self.awake < AWAKE:
            return False
        self.awake = 0
        self.plain.wake()
        return True

    def patience_for(self, trial: int) -> int | None:
        """How long the next trial of this has to wait; None where it is not on trial."""
        return self.patience if trial == self.tried else None

    def count(self, drafted: bool, cheap: bool) -> None:
        """Learn from a round in which something was `drafted`, or nothing; `cheap`: its pass took less than thought."""
        deeper, plain = self.tried == OTHER_DEPTH, self.tried == NOTHING
        self.other_depth.count(int(deeper), self.patience_for(OTHER_DEPTH), cheap and deeper)
        self.plain.count(int(not drafted), self.patience_for(NOTHING), cheap and plain)
