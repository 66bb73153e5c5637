"""Choices for a round: which drafter drafts each sequence, how deep, and the round's expected tokens and seconds.

A row is a sequence of the round. `drafters.py` lists the options that a row has; `measured.py` takes the best choice,
or tries another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from forerun.config import AUTO_DEPTH
from forerun.control.controller import Load
from forerun.control.costs import CostTable, Kind, RowPassCosts
from forerun.control.drafters import BEHIND, NO_MINIMUM, Assignment, DraftOption, MeasuredDrafter, MeasuredDrafters
from forerun.control.trials import HOLD, RETRY
from forerun.draft.base import NO_DRAFT, Budget
from forerun.economy import NO_TIME_S

FAVOR = 0.02  # least margin by which drafting must be faster than plain decoding to be chosen

Options = Mapping[int, DraftOption]  # of a row, by drafter
Choice = Sequence[Assignment | None]  # for every row
DraftToken = tuple[float, int, int, DraftOption]  # minus its survival, its depth, its row, and the row's option


@dataclass(slots=True)
class Planned:
    """A choice for a round, and its expected speed."""

    choice: Choice
    tokens_per_s: float

    @property
    def under_way(self) -> bool:
        """Whether something is drafted, and no drafter has many unread tokens to catch up on first."""
        unread = [num for each in self.choice if each for num in each.option.num_unread.values()]
        return bool(unread) and max(unread) <= BEHIND

    def value(self, scatter: float) -> float:
        """The speed by which it is compared with other plans; `scatter` is the relative noise of round times.

        The best of many noisy estimates is biased upwards, but plain decoding is only one, so it gets a bonus.
        """
        return self.tokens_per_s * (1.0 if any(self.choice) else 1 + favor(len(self.choice), scatter))


def favor(num_rows: int, scatter: float) -> float:
    """The least gain for which rows are drafted, from the noise of round times: one row's mistakes are soon noticed."""
    return max(FAVOR, scatter) if num_rows > 1 else FAVOR


@dataclass(slots=True)
class Drafts:
    """The drafts of a round that is being planned, with its expected tokens (`gain`) and seconds.

    A member is a drafter of a mix, or the only drafter.
    """

    drafters: MeasuredDrafters
    costs: RowPassCosts  # of the target's pass
    rooms: Sequence[int]  # by row: tokens that may follow, so the number of rounds that are left at most
    depths: list[int]  # by row
    num_tokens: float | int  # in the target's pass
    gain: float
    steps: dict[int, float] = field(default_factory=dict)  # by member: draft tokens that it draws one after the other
    num_rows: dict[int, int] = field(default_factory=dict)  # by member: rows that it drafts
    num_read: dict[int, float] = field(default_factory=dict)  # by member: unread tokens, shared by the rounds to come

    def deepen(self, row: int, option: DraftOption, depth: int, gain: float) -> None:
        """Draft a row to this depth, which adds `gain` expected accepted tokens."""
        before, self.depths[row] = self.depths[row], depth
        is_whole_chain = not option.made and option.budget.nodes == option.budget.depth
        self.num_tokens += depth - before if is_whole_chain else option.num_made(depth) - option.num_made(before)
        self.gain += gain
        for member in option.members:
            self.steps[member] = max(self.steps.get(member, 0), option.num_drawn(depth) if option.made else depth)
            if before == 0:
                self.num_rows[member] = self.num_rows.get(member, 0) + 1
                num_rounds = max(1, min(RETRY, self.rooms[row] // 4))  # for which the row will probably be drafted
                self.num_read[member] = self.num_read.get(member, 0) + option.num_unread.get(member, 0) / num_rounds

    def drafting_s(self) -> float:
        """Expected seconds of drafting."""
        taken_s = 0.0
        for member, steps in self.steps.items():
            taken_s += self.drafters.all[member].cost_s(steps, self.num_rows[member], self.num_read[member])
        return taken_s

    def round_s(self) -> float:
        """Expected seconds of the round."""
        return self.costs.expect(self.num_tokens) + self.drafting_s()

    def tokens_per_s(self) -> float:
        """Expected speed of the round."""
        return self.gain / max(NO_TIME_S, self.round_s())

    def token_s(self) -> float:
        """Seconds per draft token of a lone row, in the draft and in the pass.

        The pass is compared at half as many draft tokens more and less: smaller differences are mostly noise.
        """
        num_rows = len(self.depths)
        half = max(1.0, (self.num_tokens - num_rows) / 2)
        fewer, more = max(float(num_rows), self.num_tokens - half), self.num_tokens + half
        pass_s = (self.costs.expect(more) - self.costs.expect(fewer)) / (more - fewer)
        return pass_s + self.drafting_s() / max(self.steps.values())


def tokens_of(choice: Choice) -> float:
    """Expected tokens of a round with this choice."""
    return float(len(choice)) + sum(each.gain for each in choice if each is not None)


def best_of(options: Options, among: Set[int]) -> DraftOption | None:
    """The option with the highest gain that needs only the members `among`; None if there is none.

    A row whose request fixes the depth has an option for any set of members.
    """
    inside = [option for option in options.values() if option.members <= among]
    forced = [option for option in options.values() if not option.free]
    return max(inside or forced, key=lambda option: option.gain, default=None)


def fallbacks(assigned: Assignment | None, options: Options) -> list[Budget]:
    """The chosen budget; after a merged one, which needs the most cache slots, that of its best member."""
    if assigned is None:
        return [NO_DRAFT]
    members = [option for option in options.values() if option.members < assigned.option.members]
    best = sorted(members, key=lambda option: option.gain)[-1:]
    return [assigned.budget, *(Assignment(option, min(assigned.depth, option.budget.depth)).budget for option in best)]


@dataclass(frozen=True)
class DepthRule:
    """Chooses the depth of a lone row from the survival that its drafter estimates for the draft of this round.

    `round_s[d]` are the expected seconds of a round of depth d, all above 0; `favor` is the margin as in `favor`.
    """

    round_s: Sequence[float]
    favor: float

    @cached_property
    def min_survival(self) -> float:
        """The survival below which a draft token saves no time at any depth."""
        least_s = min(more_s - less_s for less_s, more_s in pairwise(self.round_s))
        return max(NO_MINIMUM, least_s / self.round_s[0])

    def depth(self, survival: Sequence[float]) -> int:
        """The depth with the highest expected speed, given the survival by depth."""
        best, depth, gain = (1 + self.favor) / self.round_s[0], 0, 1.0
        for number, (chance, taken_s) in enumerate(zip(survival, self.round_s[1:], strict=False), 1):
            gain += chance
            if gain > best * taken_s:
                best, depth = gain / taken_s, number
        return depth


@dataclass(slots=True)
class TakenPlan:
    """The plan of the last round, which is kept for the next rounds while the sequences stay the same."""

    assigned: Mapping[int, Assignment | None] = field(default_factory=dict)  # by sequence
    fallbacks: Sequence[Sequence[Budget]] = ()  # by row: its budget, then smaller ones
    tokens_per_s: float = 0.0  # expected
    num_held: int = HOLD  # rounds for which it was kept; HOLD: it is not kept
    estimated: bool = False  # whether it depends on drafters' estimates for that round
    rule: DepthRule | None = None  # decides the depth of a lone row in the next rounds
    is_new: bool = True  # whether this is its first round: in later ones drafters have few unread tokens


@dataclass(frozen=True, slots=True)
class ChoiceSearch:
    """Finds the best choices for a round of this load, from measured costs and acceptance.

    The time of prompts in the same pass is left out, except that draft tokens cost more next to them.
    """

    costs: CostTable
    drafters: MeasuredDrafters
    load: Load

    def plans(self, rows: Sequence[Options]) -> Iterator[Planned]:
        """The best plans without drafting, with each member alone, and with all members, merged."""
        members = sorted({member for options in rows for option in options.values() for member in option.members})
        looked_at = set[tuple[int, ...]]()
        for among in (set[int](), *({member} for member in members), set(members)):
            chosen = [best_of(options, among) for options in rows]
            key = tuple(map(id, chosen))
            if key not in looked_at:
                looked_at.add(key)
                yield self.deepest(chosen)

    def deepest(self, chosen: Sequence[DraftOption | None]) -> Planned:
        """The best depths of rows with these options: draft tokens are added one by one, the likeliest first.

        If no draft token is worth adding in this order, whole depths may be: a drafting step costs little more for
        several rows than for one.
        """
        planned = self.deepened(chosen, lambda token: token[:3])
        if any(planned.choice) or not any(chosen):
            return planned
        by_depth = self.deepened(chosen, lambda token: (token[1], token[0], token[2]))
        return max(planned, by_depth, key=lambda each: each.tokens_per_s)

    def deepened(
        self, chosen: Sequence[DraftOption | None], order: Callable[[DraftToken], tuple[float, ...]]
    ) -> Planned:
        """The best depths if draft tokens are added in this order: AUTO_DEPTH one by one, then several at once."""
        if not any(chosen):
            plain_s = max(NO_TIME_S, self.prices(len(chosen)).expect(len(chosen)))
            return Planned([None] * len(chosen), len(chosen) / plain_s)
        drafts = self.drafts([option for option in chosen if option], len(chosen))
        tokens: list[DraftToken] = []
        for row, option in enumerate(chosen):
            if option is not None and option.free:
                tokens += [(-chance, depth, row, option) for depth, chance in enumerate(option.survival, 1)]
            elif option is not None:
                drafts.deepen(row, option, option.budget.depth, option.gain)
        best, depths, step = drafts.tokens_per_s(), list(drafts.depths), max(1, len(tokens) // AUTO_DEPTH)
        rest = -sum(token[0] for token in tokens)
        for number, (chance, depth, row, option) in enumerate(sorted(tokens, key=order), 1):
            drafts.deepen(row, option, depth, -chance)
            rest += chance
            if number <= AUTO_DEPTH or number % step == 0 or number == len(tokens):
                taken_s = max(NO_TIME_S, drafts.round_s())
                if drafts.gain > best * taken_s:
                    best, depths = drafts.gain / taken_s, list(drafts.depths)
                elif drafts.gain + rest <= best * taken_s:
                    break  # more draft tokens take no less time, and add at most `rest` accepted tokens
        pairs = zip(chosen, depths, strict=True)
        return Planned([Assignment(option, depth) if option and depth else None for option, depth in pairs], best)

    def drafts_of(self, choice: Choice) -> Drafts:
        """The drafts of a choice."""
        drafts = self.drafts([each.option for each in choice if each is not None], len(choice))
        for row, each in enumerate(choice):
            if each is not None:
                drafts.deepen(row, each.option, each.depth, each.gain)
        return drafts

    def whole_s(self, choice: Choice) -> float:
        """Expected seconds of a round with this choice if it is charged for all tokens that drafters read in it."""
        last_round = replace(self, load=replace(self.load, rooms=[1] * len(choice)))
        return last_round.drafts_of(choice).round_s()

    def drafts(self, options: Sequence[DraftOption], num_rows: int) -> Drafts:
        """The drafts of a round in which some rows have these options, with all depths still 0."""
        costs, gain = self.prices(num_rows, options), float(num_rows)
        return Drafts(self.drafters, costs, self.load.rooms, [0] * num_rows, num_rows, gain)

    def prices(self, num_rows: int, options: Sequence[DraftOption] = ()) -> RowPassCosts:
        """Pass costs for `num_rows` sequences, some of them drafted by `options`."""
        return self.costs.of_rows(self.kind(num_rows, options), num_rows if self.load.reads else None)

    def least_survival(self) -> float:
        """The survival below which no number of draft tokens saves time.

        That is the least average cost of an additional token, over the time per token of plain decoding. Costs are
        linear between measured sizes, so the least average is at one of these, or at the largest draft.
        """
        num_rows = len(self.load.seq_ids)
        prices = self.prices(num_rows)
        plain_s = max(NO_TIME_S, prices.expect(num_rows))
        sizes = [size for size in prices.curve.seen if size > num_rows] + [num_rows * (1 + AUTO_DEPTH)]
        each_s = min((prices.expect(size) - plain_s) / (size - num_rows) for size in sizes)
        return max(0.0, min(1.0, each_s * num_rows / plain_s))

    def rule(self, drafter: MeasuredDrafter, deepest: int) -> DepthRule:
        """The rule for a lone row that a lone drafter drafts, up to the depth `deepest`."""
        prices = self.prices(1)
        drafting_s = [0.0, *(drafter.cost_s(depth, 1) for depth in range(1, 1 + deepest))]
        round_s = [max(NO_TIME_S, prices.expect(1 + depth) + each_s) for depth, each_s in enumerate(drafting_s)]
        return DepthRule(round_s, favor(1, self.costs.level.scatter))

    def kind(self, num_rows: int, options: Sequence[DraftOption] = ()) -> Kind:
        """The kind of a round in which rows are drafted by these options."""
        return Kind.of(num_rows, self.load.num_context, merged=any(len(option.members) > 1 for option in options))
