"""Drafters: the measurements of each drafter, and the options that a row has in the next round.

A drafter is here a member of a mix, the mix's merged tree, or a lone drafter; each is one option of a row. It is
measured how many draft tokens were accepted, by depth and by sequence, how many of those that the drafter estimated,
and what drafting costs. A drafter without measurements counts as good and free, so it is tried. `choices.py` chooses
among the options.
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
from forerun.economy import FADING, NO_TIME_S, WEIGHT, Acceptance, damped, likeness

ALL_WEIGHT = 24.0  # draft tokens at each depth that the rates of all rows count as for one, until rows can be compared
BEHIND = 16  # unread tokens above which the time goes to reading, not drafting
OLD_WEIGHT = 8.0  # draft tokens at each depth that counts of a calibration, or from before a long pause, weigh as
UNLIKELY = 0.5  # acceptance estimates below which `CutOff` compares them with the outcome
MODEST = 2.0  # initial ratio of accepted to estimated tokens among these
NO_MINIMUM = 1e-9  # a minimum survival that ends no chain, but makes the drafter return its estimates
LEAST_DRAFTING = 0.25  # least share of `draft_s` that counts as drafting, the rest as planning
SLOWLY = 0.99  # weight of earlier rounds in `CutOff`


@dataclass(frozen=True, slots=True)
class DraftOption:
    """One way to draft a row: by `members`, with at most the depth of `budget`.

    `survival` is the expected survival by depth; `predicted` the same by the drafter's own estimate, if it `estimated`
    this round's draft tokens. `num_unread` are the tokens that each member would have to read first. If the depth is
    not `free`, it is that of the budget. `made`, if a minimum survival ends chains, is the expected number of draft
    tokens by planned depth; `survival` then refers to the planned depth.
    """

    budget: Budget
    members: frozenset[int]
    survival: Sequence[float]
    predicted: Sequence[float]
    num_unread: Mapping[int, int]
    free: bool
    made: Sequence[float] = ()
    estimated: bool = False

    @property
    def gain(self) -> float:
        """Expected number of accepted draft tokens at full depth."""
        return sum(self.survival)

    def num_nodes(self, depth: int) -> int:
        """Number of nodes of a tree of this depth."""
        return -(-self.budget.nodes * depth // self.budget.depth)

    def num_made(self, depth: int) -> float | int:
        """Expected number of nodes that are verified: the minimum survival may end the chain before."""
        return self.num_nodes(depth) if not self.made else self.made[depth - 1] if depth else 0.0

    def num_drawn(self, depth: int) -> float | int:
        """Expected number of tokens that the drafter draws; the last one of a chain that ends early is not verified."""
        return 1 + self.made[depth - 2] if self.made and depth > 1 else depth

    def at_most(self, depth: int) -> Assignment:
        """This option at this depth, if the row is free and may be drafted that deep; without a minimum survival."""
        whole = replace(self, budget=replace(self.budget, min_survival=NO_MINIMUM), made=()) if self.made else self
        return Assignment(whole, min(depth, self.budget.depth) if self.free else self.budget.depth)


class Assignment(NamedTuple):
    """How a row is drafted: its option and depth."""

    option: DraftOption
    depth: int

    @property
    def gain(self) -> float:
        """Expected number of accepted draft tokens."""
        return sum(self.option.survival[: self.depth])

    @property
    def budget(self) -> Budget:
        """The budget that the drafter gets."""
        full, depth = self.option.budget, self.depth
        return full if depth == full.depth else replace(full, depth=depth, nodes=self.option.num_nodes(depth))

    def steps(self, row: RowOutcome) -> int:
        """How many tokens the drafter drew, including one that was dropped for its low survival."""
        return min(self.depth, row.num_drafted + 1) if self.option.made else self.depth

    def num_counted(self, row: RowOutcome) -> int:
        """How many tokens the expectation covers: the planned depth if a minimum survival ends chains."""
        return self.depth if self.option.made else row.num_drafted

    def num_judged(self, row: RowOutcome) -> int:
        """How many tokens count as offered: the planned depth if a minimum survival ends chains."""
        return self.depth if self.option.made else row.offered


@dataclass(slots=True)
class CutOff:
    """The survival below which a draft token ends its chain, since it would cost more time than it would save.

    A draft token saves time if its survival times the present speed (tokens per second) exceeds its own seconds. The
    survival is the drafter's estimate, corrected by how often tokens with a low estimate were accepted. Only a lone row
    is cut: in a batch a draft token more costs little, and cuts were measured to lose there. With verification by
    equality any cut is exact; with rejection sampling `draft/model/grower.py` ensures that a cut does not depend on the
    token that it drops. `made` counts, by depth, how many of the planned draft tokens were verified.
    """

    min_survival: float = NO_MINIMUM
    made: Acceptance = field(default_factory=Acceptance)
    estimated: float = 0.0
    accepted: float = 0.0

    @property
    def modesty(self) -> float:
        """Accepted over estimated tokens, among those that the drafter holds unlikely."""
        return (self.accepted + MODEST) / (self.estimated + 1)

    def aim(self, tokens_per_s: float, token_s: float) -> None:
        """Set the minimum survival from the present speed and the seconds of a draft token."""
        self.min_survival = min(1.0, max(NO_MINIMUM, tokens_per_s * token_s / self.modesty))

    def num_made(self, depth: int) -> list[float]:
        """Expected number of verified draft tokens, by planned depth."""
        return list(accumulate(accumulate(self.made.rates(belief=1.0)[:depth], mul)))

    def learn(self, survival: Sequence[float], num_offered: int, num_accepted: int) -> None:
        """Compare the estimates for a chain with the outcome, for the tokens that were judged."""
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
    """The measurements of a drafter. Counts fade with each round in which it is used, and only then."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    sampled: Acceptance = field(default_factory=Acceptance)  # all counts of a calibration
    by_row: dict[int, Acceptance] = field(default_factory=dict)  # by sequence
    likeness: float = ALL_WEIGHT  # draft tokens that the rates of all rows count as for one of them
    predicted: float = 0.0  # accepted tokens that its estimates predicted
    accepted: float = 0.0  # tokens that were accepted of these
    retry: RetryTimer = field(default_factory=RetryTimer)
    unseen: int = 0  # rounds since draft tokens of it were last judged, alone or in merged trees
    costs: CostTable = field(default_factory=lambda: CostTable(flat=False))  # of drafts, by depth
    reading_s: float = 0.0  # seconds per unread token
    covered: float = 1.0  # share of rows for which it has draft tokens
    cut_off: CutOff = field(default_factory=CutOff)

    @property
    def trust(self) -> float:
        """Accepted tokens over those that its estimates predicted; at first 1, which counts as WEIGHT tokens."""
        return (self.accepted + WEIGHT) / (self.predicted + WEIGHT)

    @property
    def evidence(self) -> Acceptance:
        """The recent counts, or those of a calibration while these are more."""
        return max(self.sampled, self.acceptance, key=lambda counts: sum(counts.offered) / counts.unit)

    def survival(self, seq_id: int, depth: int) -> Sequence[float]:
        """The expected survival by depth, from earlier acceptance, above all in the same sequence."""
        rates = self.acceptance.rates()
        in_text = self.by_row.get(seq_id)
        return list(accumulate((in_text.of_one(rates, self.likeness) if in_text else rates)[:depth], mul))

    def option(
        self, seq_id: int, budget: Budget, estimate: Sequence[float] | None, num_unread: Mapping[int, int],
        free: bool, made: Sequence[float],
    ) -> DraftOption:  # fmt: skip
        """The option to draft a sequence by this drafter; `estimate` is its own survival by depth, if it has one."""
        members, depth = frozenset([budget.drafter]), budget.depth
        if estimate is None:
            survival = self.survival(seq_id, depth)
            return DraftOption(budget, members, survival, survival, num_unread, free, made)
        survival = [min(1.0, self.trust * chance) for chance in estimate[:depth]]
        return DraftOption(budget, members, survival, estimate[:depth], num_unread, free, made, estimated=True)

    def count(self, rows: Sequence[tuple[RowOutcome, Assignment]]) -> None:
        """Learn from the rows that it drafted in a round."""
        runs = [(assigned.num_judged(row), row.accepted) for row, assigned in rows]
        self.count_runs([row.seq_id for row, _ in rows], runs)
        predicted = sum(sum(assigned.option.predicted[: assigned.num_counted(row)]) for row, assigned in rows)
        self.predicted = FADING * self.predicted + predicted
        self.accepted = FADING * self.accepted + sum(row.accepted for row, _ in rows)
        if cut := [(assigned.depth, row.num_drafted) for row, assigned in rows if assigned.option.made]:
            self.cut_off.made.count(cut)

    def count_runs(self, seq_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Learn, for each of these sequences, how many draft tokens were judged and how many accepted."""
        if self.unseen > RETRY:
            for counted in (self.acceptance, *self.by_row.values()):
                counted.limit(OLD_WEIGHT)
        self.unseen = 0
        self.acceptance.count(runs)
        for seq_id, run in zip(seq_ids, runs, strict=True):
            self.by_row.setdefault(seq_id, Acceptance()).count([run])
        self.likeness = likeness(list(self.by_row.values()), ALL_WEIGHT)

    def time(self, depth: int, num_unread: Sequence[int], taken_s: float) -> None:
        """Learn the seconds of a draft, or of reading if many tokens were unread; `num_unread` by drafted row."""
        if max(num_unread) <= BEHIND:
            self.costs.record(Kind.of(len(num_unread)), depth, max(NO_TIME_S, taken_s))
        else:
            each_s = max(0.0, taken_s - self.cost_s(depth, len(num_unread))) / sum(num_unread)
            self.reading_s = (self.reading_s + damped(each_s, self.reading_s)) / 2 if self.reading_s else each_s

    def cost_s(self, depth: float | int, num_rows: int, num_unread: float | int = 0) -> float:
        """Expected seconds of drafting `num_rows` rows and of reading `num_unread` tokens in all."""
        return self.costs.expect(Kind.of(num_rows), depth) + self.reading_s * num_unread


@dataclass(slots=True)
class MeasuredDrafters:
    """The measurements of a lone drafter, or of the members of a mix followed by its merged tree."""

    all: list[MeasuredDrafter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def is_mix(self) -> bool:
        """Whether there are several drafters."""
        return len(self.all) > 1

    def meet(self, outlook: Outlook, judged: Sequence[int] = ()) -> None:
        """Create the measurements at the first outlook; learn the results of members in merged trees.

        These are results of the last round, for its sequences, `judged`. They are not used for members with estimates,
        since their predictions in a merged tree are not known here. Trials of the others become rare, as they would
        only show the cost of passes over a member's draft alone.
        """
        if not self.all:
            self.names = [*outlook.drafters, MERGED] if outlook.drafters else [""]
            self.all = [MeasuredDrafter() for _ in self.names]
        for learned, member in zip(self.all, outlook.drafters.values(), strict=False):
            rows = zip(judged, member.merged_runs, strict=False)
            runs = {seq_id: run for seq_id, run in rows if run[0]}
            if runs and member.estimate is None:
                learned.count_runs(list(runs), list(runs.values()))
                learned.retry.patience, learned.retry.hopeful = LONGEST, False

    def options(
        self, i: int, seq_id: int, speculation: Speculation, room: int, outlook: Outlook, least: float = 0.0
    ) -> dict[int, DraftOption]:
        """The options of the i-th row of an outlook, by drafter; the merged one if several members have an option.

        A request that names a drafter has only that option. Otherwise the depth that a request fixes is only a limit if
        the drafter is a mix. If the depth is automatic, a drafter whose estimates are below `least` has no option.
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
        """The option of all members merged, as deep as the deepest; it survives at least as long as the best one."""
        furthest = max(options, key=lambda option: (option.budget.depth, option.budget.nodes))
        best = max(options, key=lambda option: option.gain)
        predicted = [*best.survival, *([0.0] * (furthest.budget.depth - len(best.survival)))]
        learned, estimated = self.all[-1], any(option.estimated for option in options)
        if estimated or learned.retry.new:
            trust = max(1.0, learned.trust)
            survival = [min(1.0, trust * chance) for chance in predicted]
        else:
            survival = list(map(max, learned.survival(seq_id, len(predicted)), predicted))
        return DraftOption(
            budget=replace(furthest.budget, min_survival=0.0).merged(len(self.all) - 1),
            members=frozenset[int]().union(*(option.members for option in options)),
            survival=survival,
            predicted=predicted,
            num_unread={member: num for option in options for member, num in option.num_unread.items()},
            free=furthest.free,
            estimated=estimated,
        )

    def cover(self, rows: Sequence[Mapping[int, DraftOption]]) -> None:
        """Learn for what share of rows each drafter has an option."""
        for number, record in enumerate(self.all):
            share = sum(number in options for options in rows) / len(rows)
            record.covered += SHARE * (share - record.covered)

    def time(
        self, rows: Sequence[tuple[DraftOption, int]], outcome: Outcome, planning_s: float, is_new: bool = True
    ) -> None:
        """Learn the seconds of drafting rows by these options, with the number of steps of each.

        Unless the plan `is_new`, unread tokens were read in an earlier round. `planning_s` of `draft_s` count as
        planning. If no time were left for drafting, that would look like a change of the machine: hence LEAST_DRAFTING.
        """
        active = {member for option, _ in rows for member in option.members}
        drafting_s = max(NO_TIME_S, outcome.draft_s - planning_s, LEAST_DRAFTING * outcome.draft_s)
        joining_s = max(0.0, drafting_s - sum(outcome.drafter_s)) / max(1, len(active))  # of a mix, beside its members
        for drafter, each_s in enumerate(outcome.drafter_s or [drafting_s]):
            taken_s = each_s + joining_s if outcome.drafter_s else each_s
            used = [(option.num_unread.get(drafter, 0), steps) for option, steps in rows if drafter in option.members]
            if used:
                num_unread = [unread * is_new for unread, _ in used]
                self.all[drafter].time(max(steps for _, steps in used), num_unread, taken_s)

    def begin(self) -> None:
        """Start after a calibration, whose counts get little weight."""
        for record in self.all:
            record.acceptance.limit(OLD_WEIGHT)
            share = OLD_WEIGHT / max(record.predicted, record.accepted, OLD_WEIGHT)
            record.predicted, record.accepted = share * record.predicted, share * record.accepted
            record.by_row, record.retry = {}, RetryTimer(num_rounds=TRIES)

    def forget_others(self, seq_ids: Set[int]) -> None:
        """Drop the counts of all other sequences."""
        for record in self.all:
            for seq_id in record.by_row.keys() - seq_ids:
                del record.by_row[seq_id]
