"""MeasuredDepth: the controller that drafts each sequence to the depth with the highest expected speed, 0 included.

The expectation comes from the acceptance and the times of earlier rounds. A row can be drafted by one drafter, or by
all members of a mix merged into one tree (`drafters.py`). `choices.py` finds the best depths without drafting, for each
drafter alone and for all together: draft tokens are added, the likeliest first, as long as the expected speed grows.
The fastest of these plans is taken. It is made before any token is drawn, and it is deterministic. Alternatives that
are not in use are tried again, the more seldom the more a trial costs. If a request fixes its depth, only the drafter
is chosen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import AUTO_DEPTH
from forerun.control.choices import Choice, ChoiceSearch, Options, Planned, TakenPlan, fallbacks, tokens_of
from forerun.control.controller import FixedDepth, Load, fitting
from forerun.control.costs import CHANGED, LONG, CostTable
from forerun.control.drafters import Assignment, DraftOption, MeasuredDrafters
from forerun.control.forecast import forecast
from forerun.control.trials import FIRST_DEPTH, HOLD, NOTHING, OTHER_DEPTH, TRIAL_DEPTH, Advice, Trials
from forerun.draft.base import NO_DRAFT, Budget, Draft, Outlook
from forerun.economy import damped
from forerun.tree import DraftTree

log = logging.getLogger(__name__)
HOPEFUL_TOKENS = 3.0  # draft tokens that earlier counts weigh as after a trial that went better than expected
TRIAL_SHARE = 0.01  # share of the time that trials may cost


@dataclass
class MeasuredDepth:
    """The controller. `costs` are those of the target's pass with its verification."""

    costs: CostTable = field(default_factory=CostTable)
    drafters: MeasuredDrafters = field(default_factory=MeasuredDrafters)
    advice: Advice = field(default_factory=Advice)
    times_count: bool = True  # whether it learns from the times of rounds
    planning_s: float = 0.0  # moving average of `draft_s` of rounds in which nothing is drafted
    trials: Trials = field(default_factory=Trials)
    load: Load = field(default_factory=lambda: Load((), (), (), 0))  # of the last round
    taken: TakenPlan = field(default_factory=TakenPlan)
    can_draft: bool = False  # whether something could be drafted in the last round
    pending: bool = False  # whether the outcome of the last round has not been recorded yet
    has_merged_results: bool = False  # whether the next outlook holds those of merged trees of the last round
    survival: Sequence[float] = ()  # of the nodes of the last draft, if it was of a lone row

    @property
    def search(self) -> ChoiceSearch:
        """Evaluates choices for the last round's load."""
        return ChoiceSearch(self.costs, self.drafters, self.load)

    def skips(self, load: Load) -> bool:
        """Whether no request wants drafts, or drafting is paused and the last plan still holds."""
        if not any(each.depth for each in load.speculations):
            return self.leave_alone(load)
        resting = self.advice.off and not any(self.taken.assigned.values()) and self.holds(load)
        if resting:
            self.hold(load)
        return resting

    def hold(self, load: Load) -> None:
        """Keep the last plan for one more round."""
        self.load, self.pending, self.taken.num_held, self.taken.is_new = load, True, self.taken.num_held + 1, False

    def leave_alone(self, load: Load) -> bool:
        """Make no plan for a round, from which only the cost of its pass is learned. Returns True."""
        self.load, self.pending, self.taken = load, False, TakenPlan()
        return True

    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        """The budgets of the best plan, or of a trial, cut to the free cache slots: the oldest sequences come first."""
        if not outlook.drafters and not any(each.auto for each in load.speculations):  # nothing to choose
            self.leave_alone(load)
            return FixedDepth().budgets(load, outlook, spare)
        self.drafters.meet(outlook, load.seq_ids if self.has_merged_results else ())
        self.has_merged_results = False
        if self.holds(load) and (self.taken.rule is not None or self.lasts(load, outlook)):
            self.hold(load)
            return fitting(load.seq_ids, self.ruled(load, outlook) if self.taken.rule else self.taken.fallbacks, spare)
        self.load = load
        due = any(record.retry.due for record in self.drafters.all)
        least = 0.0 if due or len(load.seq_ids) == 1 else self.search.least_survival()
        rows = self.options(load, outlook, least)
        planned = self.plan(rows)
        free = any(option.free for row in rows for option in row.values()) or (least > 0 and self.can_draft)
        if self.trials.tried is None and free:
            self.advise(drafting=any(planned.choice))
        lasting = self.trials.tried is None and all(rows)  # a row without an option may have one in the next round
        num_held = 0 if lasting or self.advice.off else HOLD
        budgets = self.take(rows, planned.choice, spare, planned.tokens_per_s, num_held)
        if follows_rule(load, outlook):
            self.taken.rule, self.taken.num_held = self.search.rule(self.drafters.all[0], AUTO_DEPTH), 0
        return budgets

    def ruled(self, load: Load, outlook: Outlook) -> Sequence[Sequence[Budget]]:
        """The budget of a lone row by `taken.rule`, from the drafter's estimate for this round."""
        rule, learned, (seq_id,) = self.taken.rule, self.drafters.all[0], load.seq_ids
        assert rule is not None, "a rule is held"
        limit = Budget.of(load.speculations[0], min(load.rooms[0], outlook.limit[0])).depth
        estimate: Sequence[float] = ()
        if limit and outlook.estimate is not None:
            estimate = outlook.estimate(0, min(1.0, rule.min_survival / learned.trust))[:limit]
        depth = rule.depth([min(1.0, learned.trust * chance) for chance in estimate])
        self.taken.assigned, self.can_draft = {seq_id: None}, True
        self.advise(drafting=depth > 0)
        if depth == 0:
            return [[NO_DRAFT]]
        option = learned.option(seq_id, Budget(depth), estimate, {0: 0}, True, ())
        self.taken.assigned = {seq_id: Assignment(option, depth)}
        self.taken.tokens_per_s = (1 + option.gain) / rule.round_s[depth]
        return [[option.budget]]

    def advise(self, drafting: bool) -> None:
        """Log when drafting is paused, as it would not save time, the first time as a warning, and when it resumes."""
        if self.advice.planned(drafting):
            best = forecast(self.costs, self.drafters, len(self.load.seq_ids), self.load.num_context)
            if not self.advice.off:
                log.info("Drafting resumes.")
            elif best is not None and best.depth:
                self.advice.off = False  # it saves time, but not for these rows, which may be near their ends
            else:
                reason = f"{best} at best" if best is not None else "no draft token is likely enough"
                level = logging.INFO if self.advice.warned else logging.WARNING
                self.advice.warned = self.advice.warned or log.isEnabledFor(level)
                text = "Drafting is paused, as it would save too little time or none: %s. It is retried now and then."
                log.log(level, text, reason)

    def options(self, load: Load, outlook: Outlook, least: float = 0.0) -> Sequence[Options]:
        """The options of all rows whose draft tokens survive with a probability of at least `least`, by estimates."""
        asked = enumerate(zip(load.seq_ids, load.speculations, load.rooms, strict=True))
        rows = [self.drafters.options(i, seq_id, each, room, outlook, least) for i, (seq_id, each, room) in asked]
        # Drafters without an option may have one where less survives.
        self.can_draft = any(rows) or (least > 0 and any(outlook.limit))
        self.drafters.cover(rows)
        return rows

    def take(
        self, rows: Sequence[Options], choice: Choice, spare: Spare, tokens_per_s: float = 0.0, num_held: int = HOLD
    ) -> Sequence[Budget]:
        """Make this choice the plan of the round; returns its budgets, cut to the free cache slots."""
        budgets = [fallbacks(each, options) for each, options in zip(choice, rows, strict=True)]
        assigned = dict(zip(self.load.seq_ids, choice, strict=True))
        estimated = any(option.estimated for options in rows for option in options.values())
        self.taken, self.pending = TakenPlan(assigned, budgets, tokens_per_s, num_held, estimated), True
        return fitting(self.load.seq_ids, budgets, spare)

    def follow(self, load: Load, outlook: Outlook, spare: Spare, drafter: int, depth: int) -> Sequence[Budget]:
        """The budgets to draft every row by this drafter to this depth, if it can (for `engine/calibration.py`)."""
        self.load, self.trials.tried = load, None
        self.drafters.meet(outlook)
        rows = self.options(load, outlook)
        chosen = [options.get(drafter) if depth else None for options in rows]
        choice = [Assignment(option, min(depth, option.budget.depth)) if option else None for option in chosen]
        return self.take(rows, choice, spare)

    def begin(self) -> None:
        """Start after a calibration: its measurements replace the first trials, its sequences are forgotten."""
        self.taken, self.pending = TakenPlan(), False
        self.trials.begin()
        self.drafters.begin()

    def wake(self) -> None:
        """Try all alternatives soon, since something has changed."""
        self.taken.num_held = HOLD
        for timer in (self.trials.plain, *(record.retry for record in self.drafters.all)):
            timer.wake()

    def reason(self) -> str:
        """What was chosen for a lone row in the last round and why; empty if there was nothing to choose."""
        if len(self.taken.assigned) != 1 or not self.taken.tokens_per_s:
            return ""
        (assigned,) = self.taken.assigned.values()
        plain_s, chosen = self.plain_s(1), "plain"
        plain = f"a plain round takes {1000 * plain_s:.2f} ms" if plain_s else "the time of a plain one is unknown"
        if assigned and assigned.depth:
            name = self.drafters.names[assigned.option.budget.drafter]
            chosen = f"depth {assigned.depth}" + (f" by {name}" if name else "")
            if assigned.option.made:
                chosen += f" while survival is at least {100 * assigned.option.budget.min_survival:.0f} %"
        if self.trials.tried is not None:
            return f"{chosen}, as a trial: {plain}"
        tokens = tokens_of([assigned])
        expected_ms = 1000 * tokens / self.taken.tokens_per_s
        return f"{chosen}: expected are {tokens:.2f} tokens in {expected_ms:.2f} ms, {plain}"

    def holds(self, load: Load) -> bool:
        """Whether the last plan was for the same rows and is recent, so that it would hardly change."""
        if self.taken.num_held >= HOLD or self.trials.tried is not None or self.load.reads != load.reads:
            return False
        # The plan and the load differ if an interrupt came between them.
        same = list(self.taken.assigned) == list(load.seq_ids) == list(self.load.seq_ids)
        return same and all(one is other for one, other in zip(load.speculations, self.load.speculations, strict=True))

    def lasts(self, load: Load, outlook: Outlook) -> bool:
        """Whether drafters can still draft as deep as that plan says, and it did not depend on estimates of a round."""
        limits = zip(load.rooms, outlook.limit, self.taken.assigned.values(), strict=True)
        fits = all(each is None or each.depth <= min(room, limit) for room, limit, each in limits)
        return fits and not self.taken.estimated

    def admit(self, draft: Draft, load: Load) -> DraftTree:
        """The whole draft. The estimates in it are kept, to be compared with the outcome."""
        priced = any(each and each.option.budget.min_survival for each in self.taken.assigned.values())
        self.survival = draft.survival[0].tolist() if priced and draft.survival is not None else ()
        return draft.tree

    def plan(self, rows: Sequence[Options]) -> Planned:
        """The best plan for the rows, or the plan of a trial if one is due."""
        scatter, search = self.costs.level.scatter, self.search
        best = max(search.plans(rows), key=lambda planned: planned.value(scatter))
        self.trials.tried = self.trial(rows, best)
        if self.trials.tried is not None:
            choice = self.on_trial(best.choice, rows, self.trials.tried)
            lost = best.tokens_per_s * search.whole_s(choice) - tokens_of(choice)
            cost = lost / tokens_of(best.choice)
            self.trials.patience = math.ceil(cost * (1 + len(self.drafters.all)) / TRIAL_SHARE)
            return Planned(choice, best.tokens_per_s)
        assigned = best.choice[0]
        if len(best.choice) == 1 and assigned is not None and assigned.option.budget.min_survival:
            # The minimum survival of a chain drafted alone follows from the speed, and from the time of a draft token.
            token_s = search.drafts_of(best.choice).token_s()
            self.drafters.all[assigned.option.budget.drafter].cut_off.aim(best.tokens_per_s, token_s)
        return best

    def trial(self, rows: Sequence[Options], best: Planned) -> int | None:
        """What is due for a trial: NOTHING, if some row may stay plain; a drafter; OTHER_DEPTH; or None.

        A round with prefill does not show the cost of a pass, and draft tokens cost more in it, so trials wait for
        others.
        """
        if self.load.reads and self.trials.num_reading < LONG:
            return None
        costs = not self.load.reads
        if costs and self.trials.plain.due and any(option.free for options in rows for option in options.values()):
            return NOTHING
        offered = {drafter for options in rows for drafter in options}
        due = next((drafter for drafter in sorted(offered) if self.drafters.all[drafter].retry.due), None)
        return OTHER_DEPTH if costs and due is None and self.trials.other_depth.due and best.under_way else due

    def on_trial(self, best: Choice, rows: Sequence[Options], drafter: int) -> Choice:
        """The best choice, with some rows changed to the alternative on trial.

        A drafter is tried by the row with the fewest unread tokens, and the first time by this row alone: a drafter
        without measurements counts as free, so the best choice would be the deepest drafts for all rows.
        """
        if drafter == NOTHING:
            return [None if all(each.free for each in options.values()) else best[i] for i, options in enumerate(rows)]
        if drafter == OTHER_DEPTH:
            deeper = self.trials.deeper = not self.trials.deeper
            return [each and each.option.at_most(2 * each.depth if deeper else each.depth // 2 or 1) for each in best]
        options = {row: each[drafter] for row, each in enumerate(rows) if drafter in each}
        first = min(options, key=lambda row: sum(options[row].num_unread.values()))
        timer = self.drafters.all[drafter].retry
        if timer.num_rounds == 0:
            best = [
                None if each and each.option.free and each.option.budget.drafter == drafter else each for each in best
            ]
        depth = FIRST_DEPTH if timer.new else TRIAL_DEPTH
        return [options[row].at_most(depth) if row == first else each for row, each in enumerate(best)]

    def record(self, outcome: Outcome) -> None:
        """Learn from the round of the last plan."""
        self.trials.num_reading = self.trials.num_reading + 1 if outcome.num_prompt_tokens else 0
        if self.pending and list(self.taken.assigned) == [row.seq_id for row in outcome.rows]:
            drafted = self.drafted(outcome)
            cheap = self.times_count and not outcome.captured and self.time(drafted, outcome)
            self.accepted(drafted, cheap)
        elif not self.taken.assigned and outcome.rows and self.costs.kinds and not outcome.captured:
            self.time_pass((), outcome)
        if len(self.drafters.all) == 1:
            self.advice.suspect(outcome)

    def plain_s(self, num_rows: int) -> float | None:
        """Expected seconds of the last round without drafts, for `num_rows` rows; None without measurements."""
        return self.costs.expect(self.search.kind(num_rows), num_rows) if self.costs.kinds else None

    def drafted(self, outcome: Outcome) -> Sequence[tuple[RowOutcome, Assignment]]:
        """The rows that were drafted as the plan says; drafts for which no cache slots were free were not made."""
        rows = ((row, self.taken.assigned[row.seq_id]) for row in outcome.rows)
        return [
            (row, each) for row, each in rows if each is not None and row.drafter in (-1, each.option.budget.drafter)
        ]

    def accepted(self, drafted: Sequence[tuple[RowOutcome, Assignment]], cheap: bool = False) -> None:
        """Learn what was accepted in the round of the last plan, and which alternatives were used.

        `cheap`: the pass took less than expected.
        """
        self.pending, self.has_merged_results = False, True
        if self.can_draft:
            for drafter in range(len(self.drafters.all)):
                self.count(drafter, [each for each in drafted if each[1].option.budget.drafter == drafter])
            self.trials.count(bool(drafted), cheap)
        self.drafters.forget_others(self.taken.assigned.keys())

    def count(self, drafter: int, drafted: Sequence[tuple[RowOutcome, Assignment]]) -> None:
        """Learn how many draft tokens of a drafter were accepted, in the rows that it drafted."""
        learned, tried, hopeful = self.drafters.all[drafter], drafter == self.trials.tried, False
        learned.unseen += 1
        if drafted:
            expected = sum(sum(each.option.survival[: each.num_counted(row)]) for row, each in drafted)
            hopeful = tried and sum(row.accepted for row, _ in drafted) > expected + 1
            learned.count(drafted)
            for row, each in drafted:
                if each.option.budget.min_survival:
                    learned.cut_off.learn(self.survival[1:], row.offered, row.accepted)
        learned.retry.count(bool(drafted), self.trials.patience if tried else None, hopeful)
        if hopeful and not learned.retry.new:
            learned.retry.wake()
            num_rows = len(self.load.seq_ids) if learned.reading_s else 1  # a trial tells little about texts not read
            learned.acceptance.limit(HOPEFUL_TOKENS * num_rows)

    def time(self, drafted: Sequence[tuple[RowOutcome, Assignment]], outcome: Outcome) -> bool:
        """Learn the times of the draft and of the pass. Returns whether the pass took much less than expected."""
        if not drafted:
            self.planning_s += (damped(outcome.draft_s, self.planning_s) - self.planning_s) / 8
        used = [(each.option, each.steps(row)) for row, each in drafted]
        self.drafters.time(used, outcome, self.planning_s, self.taken.is_new)
        return self.time_pass([each.option for _, each in drafted], outcome)

    def time_pass(self, options: Sequence[DraftOption], outcome: Outcome) -> bool:
        """Learn the time of a pass, or of its prompts if it had some. Returns as `time` does."""
        num_rows, num_tokens, taken_s = len(outcome.rows), outcome.num_tokens, outcome.pass_s + outcome.verdict_s
        if outcome.num_prompt_tokens:
            if num_rows and self.costs.kinds:
                num_tokens += outcome.num_prompt_tokens
                self.costs.record_reading(self.search.kind(num_rows), num_rows, num_tokens, taken_s)
            return False
        before = self.costs.level.num_jumps
        surprise = self.costs.record(self.search.kind(num_rows, options), num_tokens, taken_s)
        if surprise > CHANGED:
            self.taken.num_held = HOLD
        if self.costs.level.num_jumps != before:
            self.wake()
        return surprise < 1 / CHANGED


def follows_rule(load: Load, outlook: Outlook) -> bool:
    """Whether a `DepthRule` can decide: for a lone row and a lone drafter that estimates its drafts."""
    alone = len(load.seq_ids) == 1 and not outlook.drafters and load.speculations[0].auto
    return alone and outlook.estimate is not None and load.speculations[0].width == 1
