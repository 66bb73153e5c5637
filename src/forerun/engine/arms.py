"""Arms: which member of a mix drafts each row of the next round, or whether all of them draft it together.

The choice is made for all rows at once from the gain and the cost of earlier rounds, because a member that drafts one
row costs little more for the next. For every set of members each row gets the one with the highest expected gain; the
set whose rounds give most tokens per second is taken. A member's chains have the length that has paid best, and at most
the one asked for. Arms without measurements count as good and free, and arms that were not used for long are tried
again. The choice is deterministic, and made before anything is drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forerun.accept.outcome import Outcome, RowOutcome
from forerun.config import Speculation
from forerun.draft.base import MERGED, NO_DRAFT, Budget, Outlook
from forerun.economy import FADING, Acceptance, LinearCost, best_depth, damped, expected_tokens

WEIGHT = 4.0  # guesses that the belief in what an arm promises counts as
TRIES = 6  # rounds in which every arm is tried at first
RETRY, LONGEST = 24, 512  # rounds out of use after which one is tried again: twice as many each time, up to this
BEHIND = 16  # unread tokens of one sequence above which a member's time is that of its text
SPREAD = 16  # rounds over which the reading of such a text is spread: what is read once serves them all
MANY = 5  # members, above which sets of some of them are not looked at
NO_TIME_S = 1e-9


@dataclass(frozen=True, slots=True)
class Option:
    """One way to draft a row: within `budget`, which names the arm, by `members`.

    `promised` is how many guesses would be accepted going by what they say, `gain` going by what is known of them;
    `num_unread` is what a member would have to read first, at most.
    """

    budget: Budget
    members: frozenset[int]
    promised: float
    gain: float
    num_unread: Mapping[int, int]


@dataclass(slots=True)
class Arm:
    """The measurements of an arm. Counts fade with its own rounds; an arm that is not used keeps its measurements."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    promised: float = 0.0
    accepted: float = 0.0
    num_rounds: int = 0
    rested: int = 0  # rounds since it was last in use, in which it could have been
    patience: int = RETRY
    drafts: LinearCost = field(default_factory=lambda: LinearCost(flat=False))  # by guesses asked for, over all rows
    reading_s: float = 0.0  # for a token of unread text

    @property
    def trust(self) -> float:
        """How many guesses are accepted for each that it promised."""
        return (self.accepted + WEIGHT) / (self.promised + WEIGHT)

    @property
    def due(self) -> bool:
        """Whether it should be tried."""
        return self.num_rounds < TRIES or self.rested >= self.patience

    def promise(self, expected: float | None, depth: int) -> float:
        """How many of `depth` guesses would be accepted: what it expects itself, or else by depth as before."""
        return expected_tokens(self.acceptance.rates(), depth) - 1 if expected is None else min(expected, float(depth))

    def count(self, rows: Sequence[tuple[RowOutcome, Option]]) -> None:
        """Learn from the rows that it drafted in a round."""
        self.acceptance.count([(row.offered, row.accepted) for row, _ in rows])
        self.promised = FADING * self.promised + sum(option.promised for _, option in rows)
        self.accepted = FADING * self.accepted + sum(row.accepted for row, _ in rows)

    def time(self, num_guesses: int, num_unread: Sequence[int], taken_s: float) -> None:
        """Learn from how long it took, as one of those who drafted."""
        expected_s = self.drafts.expect(num_guesses)
        if max(num_unread) <= BEHIND:
            self.drafts.record(num_guesses, taken_s)
        else:
            each_s = max(0.0, taken_s - expected_s) / sum(num_unread)
            self.reading_s = (self.reading_s + damped(each_s, self.reading_s)) / 2 if self.reading_s else each_s

    def cost_s(self, num_guesses: int, num_unread: int) -> float:
        """What it would take to draft so many, and its part of reading what is unread."""
        return self.drafts.expect(num_guesses) + self.reading_s * num_unread / SPREAD


Choice = list[Option | None]


@dataclass(slots=True)
class Arms:
    """Chooses for every round, and learns from it. Rows are known by their sequences' ids for that long."""

    arms: list[Arm] = field(default_factory=list)  # the members, then the one that merges
    plain: LinearCost = field(default_factory=LinearCost)  # the target's pass by nodes: chains and members' trees
    merging: LinearCost = field(default_factory=LinearCost)  # the same with a merged tree among them
    options: dict[int, dict[int, Option]] = field(default_factory=dict)  # of the round under way
    tried: int | None = None

    def choose(
        self, seq_ids: Sequence[int], wishes: Sequence[Speculation], rooms: Sequence[int], outlook: Outlook
    ) -> list[list[Budget]]:
        """For every row the budget that it should have, and behind it those to fall back on where that does not fit."""
        if not self.arms:
            self.arms = [Arm() for _ in range(len(outlook.arms) + 1)]
        names = [*outlook.arms, MERGED]
        rows, free = [], []
        for i, (wish, room) in enumerate(zip(wishes, rooms, strict=True)):
            rows.append(self.row(i, wish, room, outlook))
            free.append(wish.drafter not in names)
        self.options = dict(zip(seq_ids, rows, strict=True))
        held = [
            own if is_free else {arm: option for arm, option in own.items() if names[arm] == wish.drafter}
            for own, is_free, wish in zip(rows, free, wishes, strict=True)
        ]
        self.tried = self.trial(held, free)
        return [fallbacks(option, own) for option, own in zip(self.best(held, free), rows, strict=True)]

    def row(self, i: int, wish: Speculation, room: int, outlook: Outlook) -> dict[int, Option]:
        """All ways to draft a row, by arm; the merged one where there is more than one way."""
        found: dict[int, Option] = {}
        most = NO_DRAFT
        for arm, (own, learned) in enumerate(zip(outlook.arms.values(), self.arms, strict=False)):
            budget = Budget.of(wish, min(room, own.limit[i]))
            if budget.depth == 0:
                continue
            most = max(most, budget, key=lambda each: (each.depth, each.nodes))
            expected = own.expected[i] if own.expected else None
            if expected is None and budget.width == 1:
                depth = self.depth(learned, budget.depth, len(outlook.limit))
                budget = replace(budget, depth=depth, nodes=depth)
            promised = learned.promise(expected, budget.depth)
            unread = {arm: own.unread[i]}
            gain = min(promised * learned.trust, float(budget.depth))
            found[arm] = Option(replace(budget, arm=arm), frozenset([arm]), promised, gain, unread)
        if len(found) > 1 or (wish.drafter == MERGED and found):
            found[len(outlook.arms)] = self.merged(found, most, len(outlook.arms))
        return found

    def depth(self, learned: Arm, most: int, batch: int) -> int:
        """How long a member's chains pay best, if it drafted every row; `most` until something is known of it."""
        if learned.num_rounds < TRIES or 0 in (self.plain.weight, learned.drafts.weight):
            return most

        def round_s(depth: int) -> float:
            return self.plain.expect(batch * (1 + depth)) + learned.drafts.expect(batch * depth)

        return best_depth(learned.acceptance.rates()[:most], round_s, least=1)

    def merged(self, found: Mapping[int, Option], most: Budget, num_members: int) -> Option:
        """All members together, within the largest budget of theirs: no worse than the best of them."""
        promised = max(option.gain for option in found.values())
        gain = min(promised * max(1.0, self.arms[num_members].trust), float(most.depth))
        unread = {arm: num for option in found.values() for arm, num in option.num_unread.items()}
        return Option(most.merging(num_members), frozenset(found), promised, gain, unread)

    def trial(self, rows: list[dict[int, Option]], free: list[bool]) -> int | None:
        """Hold the first row that is free to an arm that is due, and say which; None where none is."""
        for arm, learned in enumerate(self.arms):
            if not learned.due:
                continue
            for i, own in enumerate(rows):
                if free[i] and arm in own:
                    rows[i], free[i] = {arm: own[arm]}, False
                    return arm
        return None

    def best(self, rows: Sequence[Mapping[int, Option]], free: Sequence[bool]) -> Choice:
        """Which option every row takes. Rows that are not free take the one they have."""
        fixed = [
            next(iter(own.values()), None) if not is_free else None for own, is_free in zip(rows, free, strict=True)
        ]
        required = frozenset[int]().union(*(option.members for option in fixed if option is not None))
        members = frozenset[int]().union(*(option.members for own in rows for option in own.values()))
        best: Choice = list(fixed)
        most = -1.0
        for chosen in sets(sorted(members)):
            for merging in (False, True):
                among = chosen | required
                choice = [
                    option if not is_free else best_of(own, among, merging)
                    for own, is_free, option in zip(rows, free, fixed, strict=True)
                ]
                value = self.value(choice)
                if value > most:
                    best, most = choice, value
        return best

    def value(self, choice: Choice) -> float:
        """Tokens per second of the round that the options make."""
        taken = [option for option in choice if option is not None]
        gain = len(choice) + sum(option.gain for option in taken)
        num_nodes = len(choice) + sum(option.budget.nodes for option in taken)
        return gain / max(NO_TIME_S, self.pass_s(num_nodes, self.merges(taken)) + self.drafts_s(taken))

    def merges(self, taken: Sequence[Option]) -> bool:
        """Whether any of these is a merged tree."""
        return any(option.budget.arm == len(self.arms) - 1 for option in taken)

    def pass_s(self, num_nodes: int, merges: bool) -> float:
        """The target's pass; with a merged tree as without one until there was one."""
        line = self.merging if merges and self.merging.weight else self.plain
        return line.expect(num_nodes)

    def drafts_s(self, taken: Sequence[Option]) -> float:
        """The time that the members that are asked would take together."""
        total_s = 0.0
        for arm in frozenset[int]().union(*(option.members for option in taken)):
            own = [option for option in taken if arm in option.members]
            num_guesses = sum(option.budget.nodes for option in own)
            total_s += self.arms[arm].cost_s(num_guesses, sum(option.num_unread[arm] for option in own))
        return total_s

    def record(self, outcome: Outcome) -> None:
        """Learn from the round of the last choice."""
        taken = [
            (row, self.options[row.seq_id][row.arm])
            for row in outcome.rows
            if row.arm in self.options.get(row.seq_id, {})
        ]
        if taken:
            self.count(taken)
            self.time(taken, outcome)
        self.options, self.tried = {}, None

    def count(self, taken: Sequence[tuple[RowOutcome, Option]]) -> None:
        """Learn how many guesses were accepted, and who was in use."""
        possible = {arm for own in self.options.values() for arm in own}
        for arm, learned in enumerate(self.arms):
            own = [(row, option) for row, option in taken if row.arm == arm]
            if own:
                learned.count(own)
                learned.num_rounds, learned.rested = learned.num_rounds + 1, 0
                learned.patience = min(LONGEST, 2 * learned.patience) if arm == self.tried else RETRY
            elif arm in possible:
                learned.rested += 1

    def time(self, taken: Sequence[tuple[RowOutcome, Option]], outcome: Outcome) -> None:
        """Learn what passes and drafts took; passes that read prompts too say nothing of guesses."""
        for arm, taken_s in enumerate(outcome.arm_s):
            own = [option for _, option in taken if arm in option.members]
            if own:
                num_guesses = sum(option.budget.nodes for option in own)
                self.arms[arm].time(num_guesses, [option.num_unread[arm] for option in own], taken_s)
        if outcome.num_prompt_tokens == 0:
            line = self.merging if self.merges([option for _, option in taken]) else self.plain
            line.record(sum(1 + row.num_drafted for row in outcome.rows), outcome.pass_s)


def sets(members: Sequence[int]) -> Iterator[frozenset[int]]:
    """The sets of members that are looked at, small ones first."""
    sizes = range(1, len(members) + 1) if len(members) <= MANY else (1, len(members))
    return (frozenset(chosen) for size in sizes for chosen in itertools.combinations(members, size))


def best_of(own: Mapping[int, Option], among: Collection[int], merging: bool) -> Option | None:
    """The option with the most gain among those that these members can draft, the first of several; None if none."""
    possible = [o for o in own.values() if o.members <= frozenset(among) and (merging or len(o.members) == 1)]
    return max(possible, key=lambda option: option.gain, default=None)


def fallbacks(option: Option | None, own: Mapping[int, Option]) -> list[Budget]:
    """The option's budget; behind a merged one, which takes the most room, that of its best member."""
    if option is None:
        return [NO_DRAFT]
    single = best_of(own, option.members, merging=False) if len(option.members) > 1 else None
    return [option.budget] if single is None else [option.budget, single.budget]
