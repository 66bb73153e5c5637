"""Drafters: what is known of each drafter, and the options that a row has in the round to come.

A drafter here is a member of a mix, the mix's merged tree, or a lone drafter; each is an option of a row. What is known
comes from earlier rounds: how many guesses were accepted, by depth and by sequence, how many came true of those that a
member expected, and what drafting cost. Drafters without measurements count as good and free, and those that were not
used for long are tried again. `measured.py` chooses among the options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from forerun.accept.outcome import Outcome, RowOutcome
from forerun.config import AUTO_DEPTH, Speculation
from forerun.control.costs import SHARE, CostTable, Kind
from forerun.control.trials import LONGEST, RETRY, TRIES, RetryTimer
from forerun.draft.base import MERGED, Budget, Outlook
from forerun.economy import FADING, NO_TIME_S, Acceptance, damped, likeness

WEIGHT = 4.0  # guesses that the belief in what a drafter promises counts as
ALL_WEIGHT = 24.0  # guesses at each depth that what is known of all rows counts as for one, before rows can be compared
BEHIND = 16  # unread tokens of a sequence, above which a member's time is that of its text: as many rounds share it
OLD_WEIGHT = 8.0  # guesses at each depth that counts of a calibration weigh as, and those before a long rest
UNLIKELY = 0.5  # chances below which estimates are compared with what came of them
MODEST = 2.0  # accepted guesses for an estimated one that is unlikely, from which counting starts
NO_MINIMUM = 1e-9  # cuts nothing, and has the drafter tell what it thinks of its guesses
LEAST_DRAFTING = 0.25  # of the time of planning and drafting, that drafters took
SLOWLY = 0.99  # what counts of earlier rounds in that comparison


@dataclass(frozen=True, slots=True)
class DraftOption:
    """One way to draft a row: by `members`, in the name of the budget's drafter, at most as far as `budget` says.

    `survival` is the chance that a guess is accepted, by depth, going by all that is known; `promised` the same going
    by what the member says, if it `estimated` this round's guesses. `num_unread` is what a member would have to read
    first. Where the depth is not `free`, the row is drafted as far as the budget says. `made` is how many guesses are
    expected to be made to go so far, by depth, where a minimum survival ends chains; what survives is counted of all
    that are planned.
    """

    budget: Budget
    members: frozenset[int]
    survival: Sequence[float]
    promised: Sequence[float]
    num_unread: Mapping[int, int]
    free: bool
    made: Sequence[float] = ()
    estimated: bool = False

    @property
    def gain(self) -> float:
        """Guesses that would be accepted."""
        return sum(self.survival)

    def num_nodes(self, depth: int) -> int:
        """How many guesses it makes to go so far."""
        return -(-self.budget.nodes * depth // self.budget.depth)

    def num_made(self, depth: int) -> float | int:
        """How many of these guesses are expected to be made, before the minimum survival ends the chain."""
        return self.num_nodes(depth) if not self.made else self.made[depth - 1] if depth else 0.0

    def num_drawn(self, depth: int) -> float | int:
        """How many guesses are expected to be drawn: the last one of a chain that ends early is drawn and not made."""
        return 1 + self.made[depth - 2] if self.made and depth > 1 else depth

    def at_most(self, depth: int) -> Assignment:
        """This option at this depth, where the row may be drafted so far and is free to; without a minimum survival."""
        whole = replace(self, budget=replace(self.budget, min_survival=NO_MINIMUM), made=()) if self.made else self
        return Assignment(whole, min(depth, self.budget.depth) if self.free else self.budget.depth)


class Assignment(NamedTuple):
    """How a row is drafted: by which option, and how far."""

    option: DraftOption
    depth: int

    @property
    def gain(self) -> float:
        """Guesses that are expected to be accepted."""
        return sum(self.option.survival[: self.depth])

    @property
    def budget(self) -> Budget:
        """What the drafter is told."""
        full, depth = self.option.budget, self.depth
        if depth == full.depth:
            return full
        return Budget(depth, full.width, self.option.num_nodes(depth), full.drafter, full.min_survival, full.shape)

    def steps(self, row: RowOutcome) -> int:
        """How many guesses were drawn, one that was not made for its low survival among them."""
        return min(self.depth, row.num_drafted + 1) if self.option.made else self.depth

    def num_counted(self, row: RowOutcome) -> int:
        """How many guesses count in what is expected: all that were planned where a minimum ends chains."""
        return self.depth if self.option.made else row.num_drafted

    def num_judged(self, row: RowOutcome) -> int:
        """How many guesses count as offered, if none more was accepted."""
        return self.depth if self.option.made else row.offered


@dataclass(slots=True)
class CutOff:
    """The survival below which a guess ends its chain, since it would cost more time than it would save.

    A guess pays where its chance to be accepted, times the tokens per second of rounds as they are, is more than the
    seconds that a guess takes. A drafter's own estimate stands for the chance, set right by how often guesses that it
    held unlikely were accepted, so drafters that are too modest lose nothing. Only a row that is drafted alone is cut:
    a guess more of one row among several costs little, and cuts were measured to lose there. Where guesses are judged
    by equality any cut is exact; where they are judged by their law, `draft/model/grower.py` sees to it that a cut
    never looks at the guess that it ends. `made` counts by depth how many of the guesses that were planned were made.
    """

    min_survival: float = NO_MINIMUM
    made: Acceptance = field(default_factory=Acceptance)
    estimated: float = 0.0
    accepted: float = 0.0

    @property
    def modesty(self) -> float:
        """How many times as often as it estimates guesses are accepted that it holds unlikely."""
        return (self.accepted + MODEST) / (self.estimated + 1)

    def aim(self, tokens_per_s: float, guess_s: float) -> None:
        """Set the minimum survival by what rounds are worth, and by what a guess takes."""
        self.min_survival = min(1.0, max(NO_MINIMUM, tokens_per_s * guess_s / self.modesty))

    def num_made(self, depth: int) -> list[float]:
        """How many guesses are expected to be made to go so far, by depth."""
        return list(accumulate(accumulate(self.made.rates(belief=1.0)[:depth], mul)))

    def learn(self, survival: Sequence[float], num_offered: int, num_accepted: int) -> None:
        """Compare the estimates of a chain's guesses with how many were accepted of those that were judged."""
        before = 1.0
        self.estimated, self.accepted = SLOWLY * self.estimated, SLOWLY * self.accepted
        for depth, chance in enumerate(survival[:num_offered]):
            share = chance / before if before > 0 else 0.0
            if share < UNLIKELY:
                self.estimated += share
                self.accepted += depth < num_accepted
            before = chance


@dataclass(slots=True)
class MeasuredDrafter:
    """The measurements of a drafter. Counts fade with its own rounds, and stay as they are while it is not used."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    sampled: Acceptance = field(default_factory=Acceptance)  # by a calibration, in full
    by_row: dict[int, Acceptance] = field(default_factory=dict)
    likeness: float = ALL_WEIGHT
    promised: float = 0.0
    accepted: float = 0.0
    retry: RetryTimer = field(default_factory=RetryTimer)
    unseen: int = 0  # rounds since guesses of it were last judged, its own or those in merged trees
    costs: CostTable = field(default_factory=lambda: CostTable(flat=False))  # of drafts, by depth
    reading_s: float = 0.0  # for a token of unread text
    covered: float = 1.0  # of the rounds, in how many it has anything to draft
    cut_off: CutOff = field(default_factory=CutOff)

    @property
    def trust(self) -> float:
        """How many guesses are accepted for each that it promised."""
        return (self.accepted + WEIGHT) / (self.promised + WEIGHT)

    @property
    def evidence(self) -> Acceptance:
        """The counts of late, or as long as they are fewer, those of a calibration."""
        return max(self.sampled, self.acceptance, key=lambda counts: sum(counts.offered) / counts.unit)

    def chances(self, seq_id: int, depth: int) -> Sequence[float]:
        """The chance of each depth, by what was accepted before, above all in the same text."""
        rates = self.acceptance.rates()
        in_text = self.by_row.get(seq_id)
        return list(accumulate((in_text.of_one(rates, self.likeness) if in_text else rates)[:depth], mul))

    def option(
        self, seq_id: int, budget: Budget, estimate: Sequence[float] | None, num_unread: Mapping[int, int],
        free: bool, made: Sequence[float],
    ) -> DraftOption:  # fmt: skip
        """The option to draft a sequence by this drafter alone; `estimate` is what it says of this round's guesses."""
        members, depth = frozenset([budget.drafter]), budget.depth
        if estimate is None:
            survival = self.chances(seq_id, depth)
            return DraftOption(budget, members, survival, survival, num_unread, free, made)
        survival = [min(1.0, self.trust * chance) for chance in estimate[:depth]]
        return DraftOption(budget, members, survival, estimate[:depth], num_unread, free, made, estimated=True)

    def count(self, rows: Sequence[tuple[RowOutcome, Assignment]]) -> None:
        """Learn from the rows that it drafted in a round, and how far they should have been drafted."""
        runs = [(assigned.num_judged(row), row.accepted) for row, assigned in rows]
        self.count_runs([row.seq_id for row, _ in rows], runs)
        promised = sum(sum(assigned.option.promised[: assigned.num_counted(row)]) for row, assigned in rows)
        self.promised = FADING * self.promised + promised
        self.accepted = FADING * self.accepted + sum(row.accepted for row, _ in rows)
        if cut := [(assigned.depth, row.num_drafted) for row, assigned in rows if assigned.option.made]:
            self.cut_off.made.count(cut)

    def count_runs(self, seq_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Learn from how many guesses of each of these sequences were judged, and how many of them were right."""
        if self.unseen > RETRY:
            for counted in (self.acceptance, *self.by_row.values()):
                counted.limit(OLD_WEIGHT)
        self.unseen = 0
        self.acceptance.count(runs)
        for seq_id, run in zip(seq_ids, runs, strict=True):
            self.by_row.setdefault(seq_id, Acceptance()).count([run])
        self.likeness = likeness(list(self.by_row.values()), ALL_WEIGHT)

    def time(self, depth: int, num_unread: Sequence[int], taken_s: float) -> None:
        """Learn from how long it took, as one of those who drafted."""
        if max(num_unread) <= BEHIND:
            self.costs.record(Kind.of(len(num_unread)), depth, max(NO_TIME_S, taken_s))
        else:
            each_s = max(0.0, taken_s - self.cost_s(depth, len(num_unread))) / sum(num_unread)
            self.reading_s = (self.reading_s + damped(each_s, self.reading_s)) / 2 if self.reading_s else each_s

    def cost_s(self, depth: float | int, num_rows: int, num_unread: int = 0) -> float:
        """Seconds of drafting so many rows so far, with its part of reading what is unread."""
        reading_s = self.reading_s * num_unread / BEHIND if num_unread else 0.0
        return self.costs.expect(Kind(num_rows.bit_length(), 0, False), depth) + reading_s


@dataclass(slots=True)
class MeasuredDrafters:
    """The members of a mix, or a lone drafter, and the drafter that merges. Rows are known by their sequences' ids."""

    all: list[MeasuredDrafter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def is_mix(self) -> bool:
        """Whether there are several."""
        return len(self.all) > 1

    def meet(self, outlook: Outlook, judged: Sequence[int] = ()) -> None:
        """Begin to know the drafters of an outlook, if they are new; learn what came of guesses in merged trees.

        These are members' own guesses in the last round, whose sequences were `judged`. What a member tells itself is
        judged by what it promised, which is not known here. Trials become rare: all that they show beside is what
        passes over a member's guesses alone take.
        """
        if not self.all:
            self.names = [*outlook.drafters, MERGED] if outlook.drafters else [""]
            self.all = [MeasuredDrafter() for _ in self.names]
        for learned, member in zip(self.all, outlook.drafters.values(), strict=False):
            rows = zip(judged, member.came_true, strict=False)
            runs = {seq_id: run for seq_id, run in rows if run[0]}
            if runs and member.estimate is None:
                learned.count_runs(list(runs), list(runs.values()))
                learned.retry.patience, learned.retry.hopeful = LONGEST, False

    def options(
        self, i: int, seq_id: int, speculation: Speculation, room: int, outlook: Outlook, least: float = 0.0
    ) -> dict[int, DraftOption]:
        """All options of the i-th row of an outlook, by drafter; the merged one where more than one member has any.

        A request that names a drafter has no other. Else chains of a mix are as long as pays, at most as asked for.
        Where the depth is automatic, a drafter that estimates less than the survival `least` has no option.
        """
        by_drafter: dict[int, DraftOption] = {}
        for drafter, member in enumerate(outlook.drafters.values() if outlook.drafters else [outlook]):
            learned, limit, survival = self.all[drafter], member.limit[i], None
            if limit and member.estimate is not None:
                survival = member.estimate(i, least / learned.trust if speculation.auto else 0.0)
                limit = min(limit, len(survival)) if len(survival) < AUTO_DEPTH else limit
            budget = Budget.of(speculation, min(room, limit))
            if budget.depth == 0:
                continue
            made: Sequence[float] = ()
            if speculation.auto and survival is None and member.ends_early and budget.width == 1 == len(member.limit):
                budget = replace(budget, min_survival=learned.cut_off.min_survival)
                made = learned.cut_off.num_made(budget.depth) if budget.min_survival > NO_MINIMUM else ()
            budget = replace(budget, drafter=drafter) if drafter else budget
            free = speculation.auto or (bool(outlook.drafters) and budget.width == 1 and speculation.drafter is None)
            by_drafter[drafter] = learned.option(seq_id, budget, survival, {drafter: member.unread[i]}, free, made)
        if len(by_drafter) > 1 or (speculation.drafter == MERGED and by_drafter):
            by_drafter[len(self.all) - 1] = self.merged(seq_id, list(by_drafter.values()))
        if speculation.drafter not in self.names:
            return by_drafter
        return {drafter: option for drafter, option in by_drafter.items() if self.names[drafter] == speculation.drafter}

    def merged(self, seq_id: int, options: Sequence[DraftOption]) -> DraftOption:
        """All members together, as far as the one that goes furthest: no worse than the best of them."""
        furthest = max(options, key=lambda option: (option.budget.depth, option.budget.nodes))
        best = max(options, key=lambda option: option.gain)
        promised = [*best.survival, *([0.0] * (furthest.budget.depth - len(best.survival)))]
        learned, estimated = self.all[-1], any(option.estimated for option in options)
        if estimated or learned.retry.new:
            trust = max(1.0, learned.trust)
            survival = [min(1.0, trust * chance) for chance in promised]
        else:
            survival = list(map(max, learned.chances(seq_id, len(promised)), promised))
        return DraftOption(
            budget=replace(furthest.budget, min_survival=0.0).merging(len(self.all) - 1),
            members=frozenset[int]().union(*(option.members for option in options)),
            survival=survival,
            promised=promised,
            num_unread={member: num for option in options for member, num in option.num_unread.items()},
            free=furthest.free,
            estimated=estimated,
        )

    def cover(self, rows: Sequence[Mapping[int, DraftOption]]) -> None:
        """Learn which drafters had something to draft, and for how many rows."""
        for number, record in enumerate(self.all):
            share = sum(number in options for options in rows) / len(rows)
            record.covered += SHARE * (share - record.covered)

    def time(self, rows: Sequence[tuple[DraftOption, int]], outcome: Outcome, planning_s: float) -> None:
        """Learn what drafting rows by these options took, in so many steps each.

        Finding out that nothing should be drafted takes `planning_s`. Rounds that draft may take less; if nothing were
        left for drafters, that would look like a change of the machine, so they have a share at least.
        """
        active = {member for option, _ in rows for member in option.members}
        drafting_s = max(NO_TIME_S, outcome.draft_s - planning_s, LEAST_DRAFTING * outcome.draft_s)
        joining_s = max(0.0, drafting_s - sum(outcome.drafter_s)) / max(1, len(active))  # of a mix, beside its members
        for drafter, each_s in enumerate(outcome.drafter_s or [drafting_s]):
            taken_s = each_s + joining_s if outcome.drafter_s else each_s
            used = [(option.num_unread.get(drafter, 0), steps) for option, steps in rows if drafter in option.members]
            if used:
                self.all[drafter].time(max(steps for _, steps in used), [unread for unread, _ in used], taken_s)

    def begin(self) -> None:
        """Begin with what a calibration showed, held lightly."""
        for record in self.all:
            record.acceptance.limit(OLD_WEIGHT)
            share = min(1.0, OLD_WEIGHT / max(record.promised, record.accepted, OLD_WEIGHT))
            record.promised, record.accepted = share * record.promised, share * record.accepted
            record.by_row, record.retry = {}, RetryTimer(num_rounds=TRIES)

    def forget_others(self, seq_ids: Set[int]) -> None:
        """Drop what is known of sequences that are none of these."""
        for record in self.all:
            for seq_id in record.by_row.keys() - seq_ids:
                del record.by_row[seq_id]
