"""MeasuredDepth: the controller that drafts as deep as pays, by what earlier rounds gave and took, or not at all.

A way to draft a row is one drafter, or all members of a mix merged into one tree (`arms.py`). For every set of members,
the empty one included, each row gets its way with most gain; then guesses are added, the likeliest first, as long as
that gives more tokens per second. The set whose round gives most is taken. The choice is made before anything is drawn,
and it is deterministic. What was given up is tried again, at ever longer intervals as long as that shows nothing new. A
request with a fixed depth is drafted so far, and only the drafter is chosen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.control.advice import Advice
from forerun.control.arms import FIRST_DEPTH, TRIAL_DEPTH, TRIES, Arms, RetryTimer, TakenWays, Way
from forerun.control.choices import Choice, Drafts, Planned, Ways, best_of, fallbacks, favoring_plain, sets, tokens_of
from forerun.control.controller import FixedDepth, Load, fitting
from forerun.control.forecast import forecast
from forerun.control.pass_costs import Kind, PassCosts, PassesAlone, PassesBesidePrompts
from forerun.draft.base import Budget, Draft, Outlook
from forerun.economy import damped
from forerun.tree import DraftTree

log = logging.getLogger(__name__)
HYSTERESIS = 1.015  # how many times as good a round must be for the ways of the last one to be left
FINE = 16  # guesses that are weighed one by one; many more are weighed by a sixteenth at a time
WORSE = 0.75  # of what rounds were worth: something has changed
HOPEFUL_GUESSES = 3.0  # that what is known of an arm weighs as behind a trial that was better than was thought
TRIAL_SHARE = 0.01  # of the time, that trials may cost
LONGER = 1.25  # times the best choice's round, that one may take in which several rows try something
OTHER_DEPTH = -2  # on trial: what is drafted, half or twice as deep; -1 is drafting nothing
AWAKE = 64  # rounds behind a change before which another one is not seen as new
HOLD = 8  # rounds for which a plan is held at most
ALWAYS_READING = 64  # rounds in a row that read prompts, behind which trials wait no longer for one that reads none


@dataclass
class MeasuredDepth:
    """The controller. `costs` is what the target's part of a round takes."""

    costs: PassCosts = field(default_factory=PassCosts)
    num_context: int = 0  # tokens of the texts of the last round
    reads: bool = False  # whether prompts are read in the round of the last plan
    num_reading: int = 0  # rounds in a row that read prompts
    arms: Arms = field(default_factory=Arms)
    plain: RetryTimer = field(default_factory=RetryTimer)
    taken: dict[int, tuple[Way, int] | None] = field(default_factory=dict)  # by sequence, in the last round planned
    possible: frozenset[int] = frozenset()  # arms of that round
    tried: int | None = None  # the arm that is on trial in it; -1 for drafting nothing, OTHER_DEPTH
    other_depth: RetryTimer = field(default_factory=lambda: RetryTimer(num_rounds=TRIES))
    deeper: bool = False  # whether the last depth that was tried was twice what is drafted, not half of it
    awake: int = AWAKE  # rounds since something changed
    patience: int = 0  # rounds that the next trial of it has to wait
    pending: bool = False  # whether that round's outcome is still to come
    came_true: bool = False  # whether the next outlook tells what came of that round's merged trees
    fallbacks: Sequence[Sequence[Budget]] = ()  # of that plan, by row: its budget, then smaller ones
    wishes: Sequence[Speculation] = ()
    held: int = HOLD  # rounds for which that plan was held
    worth: float = 0.0  # tokens per second that the last plan promised
    usual: float = 0.0  # tokens per second of a row that plans promised of late
    survival: Mapping[int, Sequence[float]] = field(default_factory=dict)  # of the round's nodes, by sequence
    advice: Advice = field(default_factory=Advice)
    times_count: bool = True  # whether it learns from how long rounds take
    planning_s: float = 0.0  # what drafting takes where nothing is drafted

    def skips(self, load: Load) -> bool:
        """Where nobody wishes for anything; and between plans, as long as drafting is given up."""
        if not any(wish.depth for wish in load.wishes):
            self.taken, self.pending, self.num_context, self.worth = {}, False, load.num_context, 0.0
            return True
        resting = self.advice.off and not any(self.taken.values()) and self.holds(load)
        if resting:
            self.held, self.pending, self.num_context = self.held + 1, True, load.num_context
        return resting

    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        """The best ways, as far as they fit into what the cache has to spare, the oldest sequences first."""
        if not outlook.drafters and not any(wish.auto for wish in load.wishes):  # there is nothing to choose
            self.taken, self.pending, self.num_context, self.worth = {}, False, load.num_context, 0.0
            return FixedDepth().budgets(load, outlook, spare)
        self.num_context = load.num_context
        self.arms.meet(outlook, load.seq_ids if self.came_true else ())
        self.came_true = False
        if self.holds(load) and self.lasts(load, outlook):
            self.held, self.pending = self.held + 1, True
            return fitting(load.seq_ids, self.fallbacks, spare)
        rows = self.ways(load, outlook)
        self.reads = load.num_prompt_tokens > 0
        planned = self.plan(load.seq_ids, rows)
        if not self.reads:
            self.watch(planned.tokens_per_s / len(rows))
        self.advise(rows, planned.choice)
        lasting = self.tried is None and all(rows)  # rows without a way may get one
        self.worth = planned.tokens_per_s
        self.wishes, self.held = load.wishes, 0 if lasting or self.advice.off else HOLD
        return self.take(load, rows, planned.choice, spare)

    def advise(self, rows: Sequence[Ways], choice: Choice) -> None:
        """Tell the log when drafting is given up because it costs more than it gives, and when it is taken up again."""
        free = self.tried is None and any(way.free for ways in rows for way in ways.values())
        if free and self.advice.planned(drafting=any(choice)):
            best = forecast(self.costs, self.arms, len(rows), self.num_context)
            if not self.advice.off:
                log.info("Drafting is on again.")
            elif best is not None and best.depth:
                self.advice.off = False  # it would pay, but for these rows, which may be at their ends
            else:
                message = "Drafting is off for now, since it does not pay: %s at best. It is tried now and then."
                log.warning(message, best)

    def ways(self, load: Load, outlook: Outlook) -> Sequence[Ways]:
        """The ways of all rows."""
        asked = zip(load.seq_ids, load.wishes, load.rooms, strict=True)
        rows = [self.arms.ways(i, seq_id, wish, room, outlook) for i, (seq_id, wish, room) in enumerate(asked)]
        self.possible = frozenset(arm for ways in rows for arm in ways)
        self.arms.cover(rows)
        return rows

    def take(self, load: Load, rows: Sequence[Ways], choice: Choice, spare: Spare) -> Sequence[Budget]:
        """Take this choice, as far as it fits."""
        self.taken, self.pending = dict(zip(load.seq_ids, choice, strict=True)), True
        self.fallbacks = [fallbacks(taken, ways) for taken, ways in zip(choice, rows, strict=True)]
        return fitting(load.seq_ids, self.fallbacks, spare)

    def follow(self, load: Load, outlook: Outlook, spare: Spare, arm: int, depth: int) -> Sequence[Budget]:
        """Draft every row by this arm and so far, where it can, and learn from that: see `engine/calibration.py`."""
        self.num_context, self.tried = load.num_context, None
        self.arms.meet(outlook)
        rows = self.ways(load, outlook)
        by_arm = [ways.get(arm) if depth else None for ways in rows]
        choice = [(way, min(depth, way.budget.depth)) if way else None for way in by_arm]
        return self.take(load, rows, choice, spare)

    def begin(self) -> None:
        """Forget the sequences of a calibration, and begin with what it showed: nothing needs a first trial."""
        self.taken, self.pending, self.held, self.usual, self.plain = {}, False, HOLD, 0.0, RetryTimer(num_rounds=TRIES)
        self.other_depth = RetryTimer(num_rounds=TRIES)
        self.arms.begin()

    def watch(self, tokens_per_s: float) -> None:
        """Try everything soon where rounds are worth much less than they were."""
        self.awake += 1
        if tokens_per_s < WORSE * self.usual:
            self.usual = tokens_per_s
            self.wake()
        self.usual += (tokens_per_s - self.usual) / 8

    def wake(self) -> None:
        """Something has changed: try everything soon, unless that was done a short while ago."""
        if self.awake >= AWAKE:
            self.awake, self.held = 0, HOLD
            self.plain.wake()
            self.arms.wake()

    def reason(self) -> str:
        """What was chosen for the last round and why, for one row; empty where there was nothing to choose."""
        if len(self.taken) != 1 or not self.worth:
            return ""
        ((way, depth),) = [each or (None, 0) for each in self.taken.values()]
        plain_s = self.plain_s(1)
        plain = f"a plain round takes {1000 * plain_s:.2f} ms" if plain_s else "what plain rounds take is not known yet"
        name = self.arms.names[way.budget.drafter] if way else ""
        chosen = f"depth {depth}" + (f" by {name}" if name else "") if depth else "plain"
        if way and way.made:
            chosen += f" as long as {100 * way.budget.price:.0f} % survive"
        if self.tried is not None:
            return f"{chosen}, to see how it does: {plain}"
        tokens = tokens_of(list(self.taken.values()))
        return f"{chosen}: {tokens:.2f} tokens in {1000 * tokens / self.worth:.2f} ms are expected, {plain}"

    def holds(self, load: Load) -> bool:
        """Whether the last plan was of the same rows and is not old, so that what was counted since changes little."""
        if self.held >= HOLD or self.tried is not None or self.reads != (load.num_prompt_tokens > 0):
            return False
        same = list(self.taken) == list(load.seq_ids)
        return same and all(wish is before for wish, before in zip(load.wishes, self.wishes, strict=True))

    def lasts(self, load: Load, outlook: Outlook) -> bool:
        """Whether that plan is still as good for what drafters say and how far they can go."""
        estimated = any(
            each is not None for member in outlook.drafters.values() or [outlook] for each in member.expected
        )
        limits = zip(load.rooms, outlook.limit, self.taken.values(), strict=True)
        return not estimated and all(taken is None or taken[1] <= min(room, limit) for room, limit, taken in limits)

    def admit(self, draft: Draft, load: Load) -> DraftTree:
        """All of it. What it tells of its guesses is compared with what will come of them."""
        priced = any(each and each[0].budget.price for each in self.taken.values())
        survival = draft.survival.tolist() if priced and draft.survival is not None else []
        self.survival = dict(zip(load.seq_ids, survival, strict=False))
        return draft.tree

    def plan(self, seq_ids: Sequence[int], rows: Sequence[Ways]) -> Planned:
        """The choice for these rows. Prompts in the same pass count only in that guesses beside them take more."""
        value = partial(favoring_plain, scatter=self.costs.level.scatter)
        best = max(self.plans(rows), key=value)
        self.tried = self.trial(rows, best)
        if self.tried is not None:
            choice = self.on_trial(best.choice, rows, self.tried)
            lost = best.tokens_per_s * self.drafts_of(choice).whole_s() - tokens_of(choice)
            cost = lost / tokens_of(best.choice)
            self.patience = math.ceil(cost * (1 + len(self.possible)) / TRIAL_SHARE)
            return Planned(choice, best.tokens_per_s)
        last = self.last(seq_ids, rows)
        best = last if last and value(best) < HYSTERESIS * value(last) else best
        self.set_price(best)
        return best

    def set_price(self, planned: Planned) -> None:
        """Of a chain that is drafted alone: by what the plan's rounds are worth, and by what its guesses take."""
        taken = planned.choice[0] if len(planned.choice) == 1 else None
        if taken is not None and taken[0].budget.price:
            guess_s = self.drafts_of(planned.choice).guess_s(taken[0].num_drawn(taken[1]))
            self.arms.arms[taken[0].budget.drafter].cut_off.aim(planned.tokens_per_s, guess_s)

    def plans(self, rows: Sequence[Ways]) -> Iterator[Planned]:
        """The best plan for every set of members, small sets first."""
        members = sorted({member for row in rows for way in row.values() for member in way.members})
        for among in sets(members):
            for merging in (False, True) if len(among) > 1 else (False,):
                ways = [best_of(row, among, merging) for row in rows]
                yield self.deepest(ways)

    def deepest(self, ways: Sequence[Way | None]) -> Planned:
        """How far each row should be drafted if it is drafted in this way."""
        drafts = Drafts.none(self.arms, self.passes(len(ways), [way for way in ways if way]), len(ways))
        guesses = []
        for row, way in enumerate(ways):
            if way is not None and way.free:
                guesses += [(-chance, depth, row) for depth, chance in enumerate(way.survival, 1)]
            elif way is not None:
                drafts.deepen(row, way, way.budget.depth, way.gain)
        best, depths, step = drafts.tokens_per_s(), list(drafts.depths), max(1, len(guesses) // FINE)
        for number, (chance, depth, row) in enumerate(sorted(guesses), 1):
            way = ways[row]
            assert way is not None, "it has guesses"
            drafts.deepen(row, way, depth, -chance)
            if number <= FINE or number % step == 0 or number == len(guesses):
                value = drafts.tokens_per_s()
                if value > best:
                    best, depths = value, list(drafts.depths)
        return Planned([(way, depth) if way and depth else None for way, depth in zip(ways, depths, strict=True)], best)

    def tokens_per_s(self, choice: Choice) -> float:
        """What a round of this choice would give."""
        return self.drafts_of(choice).tokens_per_s()

    def passes(self, num_rows: int, taken: Sequence[Way]) -> PassesAlone | PassesBesidePrompts:
        """What passes of the round to come take in which these ways are taken, without what prompts take there."""
        kind = self.kind(num_rows, taken)
        return self.costs.beside_prompts(kind, num_rows) if self.reads else self.costs.alone(kind)

    def drafts_of(self, choice: Choice) -> Drafts:
        """The drafts of a choice."""
        taken = [each for each in choice if each is not None]
        drafts = Drafts.none(self.arms, self.passes(len(choice), [way for way, _ in taken]), len(choice))
        for row, (way, depth) in enumerate(taken):
            drafts.deepen(row, way, depth, sum(way.survival[:depth]))
        return drafts

    def kind(self, num_rows: int, taken: Sequence[Way]) -> Kind:
        """The kind of the round in which these ways are taken."""
        return Kind.of(num_rows, self.num_context, merged=any(len(way.members) > 1 for way in taken))

    def last(self, seq_ids: Sequence[int], rows: Sequence[Ways]) -> Planned | None:
        """What the last round's ways would be worth now; None where the rows are others, or cannot have them."""
        if list(self.taken) != list(seq_ids):
            return None
        choice: list[tuple[Way, int] | None] = []
        for ways, before in zip(rows, self.taken.values(), strict=True):
            way = ways.get(before[0].budget.drafter) if before else None
            if before is None and all(each.free for each in ways.values()):
                choice.append(None)
            elif before and way and (before[1] == way.budget.depth or (way.free and before[1] < way.budget.depth)):
                choice.append((way, before[1]))
            else:
                return None
        return Planned(choice, self.tokens_per_s(choice))

    def trial(self, rows: Sequence[Ways], best: Planned) -> int | None:
        """An arm that is due for a trial; -1 for drafting nothing, where some row is free to; or OTHER_DEPTH.

        A round that reads prompts does not say what passes cost, and guesses are dear there: trials wait for others.
        """
        if self.reads and self.num_reading < ALWAYS_READING:
            return None
        costs = not self.reads
        if costs and self.plain.due and any(way.free for ways in rows for way in ways.values()):
            return -1
        due = next((arm for arm in sorted(self.possible) if self.arms.arms[arm].retry.due), None)
        return OTHER_DEPTH if costs and due is None and self.other_depth.due and best.under_way else due

    def on_trial(self, best: Choice, rows: Sequence[Ways], arm: int) -> Choice:
        """The best choice, but for the rows that try the arm: the one with least to read, and at first as many more as
        make the round little longer. Another depth is tried by as many rows as that, or half of it by all."""
        if arm == -1:
            return [None if all(way.free for way in options.values()) else best[i] for i, options in enumerate(rows)]
        if arm == OTHER_DEPTH:
            self.deeper = not self.deeper
            taken = [(row, *each) for row, each in enumerate(best) if each]
            depths = {row: 2 * depth if self.deeper else max(1, depth // 2) for row, _, depth in taken}
            return self.in_time(best, {row: way.whole().at_most(depths[row]) for row, way, _ in taken})
        new = self.arms.arms[arm].retry.new
        ways = {row: options[arm].whole() for row, options in enumerate(rows) if arm in options}
        first = sorted(ways, key=lambda row: sum(ways[row].num_unread.values()))[: None if new else 1]
        return self.in_time(best, {row: ways[row].at_most(FIRST_DEPTH if new else TRIAL_DEPTH) for row in first})

    def in_time(self, best: Choice, others: Mapping[int, tuple[Way, int]]) -> Choice:
        """The best choice with the first of these, by row, and as many more as make its round little longer."""
        choice, longest_s = list(best), LONGER * self.drafts_of(best).whole_s()
        for number, (row, other) in enumerate(others.items()):
            before, choice[row] = choice[row], other
            if number and self.drafts_of(choice).whole_s() > longest_s:
                choice[row] = before
                break
        return choice

    def record(self, outcome: Outcome) -> None:
        """Learn from the round of the last choice."""
        self.num_reading = self.num_reading + 1 if outcome.num_prompt_tokens else 0
        if self.pending and list(self.taken) == [row.seq_id for row in outcome.rows]:
            cheap = self.times_count and not outcome.captured and self.time(self.drafts(outcome), outcome)
            self.accepted(outcome, cheap)
        elif not self.taken and outcome.rows and self.costs.kinds and not outcome.captured:
            self.time_pass((), outcome)
        if len(self.arms.arms) == 1:
            self.advice.suspect(outcome)

    def plain_s(self, num_rows: int) -> float | None:
        """Seconds that the last round would have taken without drafts."""
        return self.costs.of(self.kind(num_rows, ())).expect(num_rows) if self.costs.kinds else None

    def drafts(self, outcome: Outcome) -> TakenWays:
        """The ways in which rows were drafted, and how far."""
        drafted = [(row, self.drafted(row)) for row in outcome.rows]
        return [(way[0], way[0].steps(row, way[1])) for row, way in drafted if way is not None]

    def accepted(self, outcome: Outcome, cheap: bool = False) -> TakenWays:
        """Learn what was accepted in the round of the last choice; how rows were drafted."""
        self.pending, self.came_true = False, True
        drafted = [(row, self.drafted(row)) for row in outcome.rows]
        self.count([(row, *way) for row, way in drafted if way is not None], cheap)
        self.arms.forget_others(list(self.taken))
        return [way for _, way in drafted if way is not None]

    def drafted(self, row: RowOutcome) -> tuple[Way, int] | None:
        """The way in which a row was drafted; None where it was not, as its draft found no room."""
        chosen = self.taken[row.seq_id]
        return chosen if chosen is not None and row.drafter in (-1, chosen[0].budget.drafter) else None

    def count(self, taken: Sequence[tuple[RowOutcome, Way, int]], cheap: bool) -> None:
        """Learn how many guesses were accepted, and who was in use; `cheap`: the pass took less than was thought."""
        for arm in self.possible:
            learned, drafted = self.arms.arms[arm], [each for each in taken if each[1].budget.drafter == arm]
            learned.unseen += 1
            expected = sum(sum(way.survival[: depth if way.made else row.num_drafted]) for row, way, depth in drafted)
            accepted = sum(row.accepted for row, _, _ in drafted)
            if drafted:
                learned.count(drafted)
                for row, way, _ in drafted:
                    if way.budget.price and row.seq_id in self.survival:
                        learned.cut_off.learn(self.survival[row.seq_id][1:], row.offered, row.accepted)
                if learned.surprise.record(accepted, expected):
                    self.wake()
            hopeful = arm == self.tried and accepted > expected + 1
            learned.retry.count(len(drafted), self.patience if arm == self.tried else None, hopeful)
            if hopeful and not learned.retry.new:
                learned.retry.wake()
                learned.acceptance.limit(HOPEFUL_GUESSES)
        if self.possible:
            tried = self.tried == OTHER_DEPTH
            self.other_depth.count(1 if tried else 0, self.patience if tried else None, cheap and tried)
            tried = self.tried == -1
            self.plain.count(0 if taken else 1, self.patience if tried else None, cheap and tried)

    def time(self, taken: TakenWays, outcome: Outcome) -> bool:
        """Learn what rounds and drafts took; whether the target's part took much less than was expected."""
        if not taken:
            self.planning_s += (damped(outcome.draft_s, self.planning_s) - self.planning_s) / 8
        self.arms.time(taken, outcome, self.planning_s)
        return self.time_pass(taken, outcome)

    def time_pass(self, taken: TakenWays, outcome: Outcome) -> bool:
        """Learn what the target's part took; of a round that read prompts, what a token of theirs takes beside rows."""
        num_rows, num_tokens, taken_s = len(outcome.rows), outcome.num_tokens, outcome.pass_s + outcome.verdict_s
        if outcome.num_prompt_tokens:
            if num_rows and self.costs.kinds:
                num_tokens += outcome.num_prompt_tokens
                self.costs.record_reading(self.kind(num_rows, ()), num_rows, num_tokens, taken_s)
            return False
        before = self.costs.level.num_jumps
        cheap = self.costs.record(self.kind(num_rows, [way for way, _ in taken]), num_tokens, taken_s)
        if self.costs.level.num_jumps != before:
            self.wake()
        return cheap
