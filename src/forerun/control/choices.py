"""Choices for a round: which option each row is drafted by and how far, and what such a round gives and takes.

`measured.py` weighs the choices and takes one, or tries something else; `drafters.py` knows the options that a row has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from forerun.config import AUTO_DEPTH
from forerun.control.controller import Load
from forerun.control.costs import CostTable, Kind, RowPassCosts
from forerun.control.drafters import BEHIND, NO_MINIMUM, Assignment, DraftOption, MeasuredDrafter, MeasuredDrafters
from forerun.control.trials import HOLD
from forerun.draft.base import NO_DRAFT, Budget
from forerun.economy import NO_TIME_S

FAVOR = 0.02  # by which drafting must be better than plain decoding to be chosen, on machines whose rounds are even
ALONE = 0.25  # of how far rounds are off elsewhere: a row's own rounds soon tell, and no others wait for them
FINE = 16  # guesses that are weighed one by one; many more are weighed by a sixteenth at a time

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
        return self.tokens_per_s * (1.0 if any(self.choice) else 1 + favor(len(self.choice), scatter))


def favor(num_rows: int, scatter: float) -> float:
    """By how much drafting must be better than plain decoding, where rounds are off by `scatter`."""
    return max(FAVOR, scatter if num_rows > 1 else ALONE * scatter)


@dataclass(slots=True)
class Drafts:
    """The drafts of a round that is being planned: how deep each row is, what they give and what they take."""

    drafters: MeasuredDrafters
    costs: RowPassCosts  # of the target's pass
    depths: list[int]
    num_tokens: float | int  # in that pass
    gain: float
    plain_s: float = 0.0  # of that pass without guesses, when it is known
    steps: dict[int, float] = field(default_factory=dict)  # guesses that a member draws, one behind the other
    num_rows: dict[int, int] = field(default_factory=dict)
    num_unread: dict[int, int] = field(default_factory=dict)

    def deepen(self, row: int, option: DraftOption, depth: int, gain: float) -> None:
        """Draft a row so far, which adds so many accepted guesses."""
        before, self.depths[row] = self.depths[row], depth
        is_whole_chain = not option.made and option.budget.nodes == option.budget.depth
        self.num_tokens += depth - before if is_whole_chain else option.num_made(depth) - option.num_made(before)
        self.gain += gain
        for member in option.members:
            self.steps[member] = max(self.steps.get(member, 0), option.num_drawn(depth) if option.made else depth)
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
        if not self.plain_s:
            self.plain_s = self.costs.expect(len(self.depths))
        return max(self.costs.expect(self.num_tokens), self.plain_s) + self.drafting_s()

    def whole_s(self) -> float:
        """Seconds of the round with all that members have to read first, which serves later rounds too."""
        reading_s = sum(self.drafters.all[member].reading_s * num for member, num in self.num_unread.items())
        return self.round_s() + (1 - 1 / BEHIND) * reading_s

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


def tokens_of(choice: Choice) -> float:
    """What a round of this choice gives."""
    return float(len(choice)) + sum(each.gain for each in choice if each is not None)


def best_of(options: Options, among: Set[int], merging: bool) -> DraftOption | None:
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


@dataclass(frozen=True, slots=True)
class DepthRule:
    """How far a lone row is drafted in the rounds behind a plan, by what its drafter estimates of each draft.

    `round_s` are the seconds of rounds by depth, from 0 on, none of them 0; drafting has to be better than plain
    decoding by `favor`.
    """

    round_s: Sequence[float]
    favor: float

    @property
    def min_survival(self) -> float:
        """The survival below which a guess pays at no depth."""
        least_s = min(more_s - less_s for less_s, more_s in pairwise(self.round_s))
        return max(NO_MINIMUM, least_s / self.round_s[0])

    def depth(self, survival: Sequence[float]) -> int:
        """The depth that gives most tokens per second, where guesses survive so."""
        best, depth, gain = (1 + self.favor) / self.round_s[0], 0, 1.0
        for number, (chance, taken_s) in enumerate(zip(survival, self.round_s[1:], strict=False), 1):
            gain += chance
            if gain > best * taken_s:
                best, depth = gain / taken_s, number
        return depth


@dataclass(slots=True)
class TakenPlan:
    """The plan of the last round, which is held for some more as long as little changes."""

    assigned: Mapping[int, Assignment | None] = field(default_factory=dict)  # by sequence
    fallbacks: Sequence[Sequence[Budget]] = ()  # by row: its budget, then smaller ones
    tokens_per_s: float = 0.0  # that it promised
    num_held: int = HOLD  # rounds
    estimated: bool = False  # whether it rests on what drafters said of the guesses of that round
    rule: DepthRule | None = None  # for a lone row, by what the drafter says in the rounds to come


@dataclass(frozen=True, slots=True)
class Weighing:
    """Finds the choices that are best for a round of this load, by what passes and drafters are known to take and give.

    Prompts in the same pass count only in that guesses beside them take more.
    """

    costs: CostTable
    drafters: MeasuredDrafters
    load: Load

    def plans(self, rows: Sequence[Options]) -> Iterator[Planned]:
        """The best plans with no member, with each alone, and with all, which are merged or not."""
        members = sorted({member for options in rows for option in options.values() for member in option.members})
        looked_at = set[tuple[int, ...]]()
        for among in (set[int](), *({member} for member in members), set(members)):
            for merging in (False, True) if len(among) > 1 else (False,):
                chosen = [best_of(options, among, merging) for options in rows]
                key = tuple(map(id, chosen))
                if key not in looked_at:
                    looked_at.add(key)
                    yield self.deepest(chosen)

    def deepest(self, chosen: Sequence[DraftOption | None]) -> Planned:
        """How far each row should be drafted if it is drafted by this option."""
        if not any(chosen):
            return Planned(
                [None] * len(chosen), len(chosen) / max(NO_TIME_S, self.prices(len(chosen)).expect(len(chosen)))
            )
        drafts = self.drafts([option for option in chosen if option], len(chosen))
        guesses: list[tuple[float, int, int, DraftOption]] = []
        for row, option in enumerate(chosen):
            if option is not None and option.free:
                guesses += [(-chance, depth, row, option) for depth, chance in enumerate(option.survival, 1)]
            elif option is not None:
                drafts.deepen(row, option, option.budget.depth, option.gain)
        best, depths, step = drafts.tokens_per_s(), list(drafts.depths), max(1, len(guesses) // FINE)
        rest = -sum(guess[0] for guess in guesses)
        for number, (chance, depth, row, option) in enumerate(sorted(guesses, key=lambda guess: guess[:3]), 1):
            drafts.deepen(row, option, depth, -chance)
            rest += chance
            if number <= FINE or number % step == 0 or number == len(guesses):
                taken_s = max(NO_TIME_S, drafts.round_s())
                if drafts.gain > best * taken_s:
                    best, depths = drafts.gain / taken_s, list(drafts.depths)
                elif drafts.gain + rest <= best * taken_s:
                    break  # more guesses take no less time, and give no more than the rest of their chances
        pairs = zip(chosen, depths, strict=True)
        return Planned([Assignment(option, depth) if option and depth else None for option, depth in pairs], best)

    def drafts_of(self, choice: Choice) -> Drafts:
        """The drafts of a choice."""
        assigned = [each for each in choice if each is not None]
        drafts = self.drafts([each.option for each in assigned], len(choice))
        for row, each in enumerate(assigned):
            drafts.deepen(row, each.option, each.depth, each.gain)
        return drafts

    def drafts(self, options: Sequence[DraftOption], num_rows: int) -> Drafts:
        """The drafts of a round of so many rows in which some have these options, before any is drafted."""
        return Drafts(self.drafters, self.prices(num_rows, options), [0] * num_rows, num_rows, gain=float(num_rows))

    def prices(self, num_rows: int, options: Sequence[DraftOption] = ()) -> RowPassCosts:
        """What passes of so many rows take, some of which are drafted by these options."""
        return self.costs.of_rows(self.kind(num_rows, options), num_rows if self.load.reads else None)

    def least_survival(self) -> float:
        """The survival below which draft tokens cannot save time, whatever their number: passes cost more for each.

        Between sizes that were seen the cost is linear, so its average for a token is least at one of them, or at the
        largest draft.
        """
        num_rows = len(self.load.seq_ids)
        prices = self.prices(num_rows)
        plain_s = max(NO_TIME_S, prices.expect(num_rows))
        sizes = [size for size in prices.curve.seen if size > num_rows] + [num_rows * (1 + AUTO_DEPTH)]
        each_s = min((prices.expect(size) - plain_s) / (size - num_rows) for size in sizes)
        return max(0.0, min(1.0, each_s * num_rows / plain_s))

    def rule(self, drafter: MeasuredDrafter, deepest: int) -> DepthRule:
        """How far a lone row pays by the estimates of a lone drafter; `deepest` is the most that is looked at."""
        prices = self.prices(1)
        plain_s = max(NO_TIME_S, prices.expect(1))
        drafted_s = [max(plain_s, prices.expect(1 + d)) + drafter.cost_s(d, 1) for d in range(1, 1 + deepest)]
        return DepthRule([plain_s, *drafted_s], favor(1, self.costs.level.scatter))

    def kind(self, num_rows: int, options: Sequence[DraftOption] = ()) -> Kind:
        """The kind of the round in which rows are drafted by these options."""
        return Kind.of(num_rows, self.load.num_context, merged=any(len(option.members) > 1 for option in options))
