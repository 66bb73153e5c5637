"""Held plans: for how long a plan of `MeasuredDepth` counts, and what is learned in rounds without one."""

from collections.abc import Callable, Sequence

import pytest

from control.test_depth_rule import VaryingRates
from control.test_measured import budgets_of, outlook_of, with_costs
from control.worlds import AMPLE, AUTO_SPECULATION
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.control.controller import Load
from forerun.control.costs import CLEAR, Kind
from forerun.control.measured import TRIAL_SHARE, MeasuredDepth
from forerun.control.trials import HOLD, LONGEST, NOTHING, RETRY
from forerun.draft.base import Budget, Outlook

LOAD = Load([0], [AUTO_SPECULATION], [AMPLE], 0)
SPARE = Spare({0: AMPLE}, AMPLE, 16)


def test_a_plan_that_depends_on_estimates_counts_for_one_round() -> None:
    controller = with_costs(0.1, [0.01])
    for rate in (0.0, 0.9, 0.0, 0.9):
        load = Load(range(2), [AUTO_SPECULATION] * 2, [AMPLE] * 2, 0)
        assert not controller.skips(load)
        budgets = budgets_of(controller, load.speculations, outlook_of([[9, 9]], [[rate, rate]]))
        assert [budget.depth > 0 for budget in budgets] == [rate > 0] * 2


def test_a_plan_that_is_kept_learns_the_time_of_reading_from_its_first_round_alone() -> None:
    """Two rows with 400 unread tokens each, of 1 ms; in the rounds after it drafters have read all but a few."""
    controller, rows = with_costs(0.1, [0.001]), [RowOutcome(row, 4, 4, 4, 5) for row in range(2)]
    load = Load(range(2), [AUTO_SPECULATION] * 2, [AMPLE] * 2, 0)
    for unread in (400, *[5] * HOLD):
        before = controller.taken
        budgets = budgets_of(controller, load.speculations, outlook_of([[4, 4]], [None], unread))
        assert all(budgets)
        assert (controller.taken is before) == (unread == 5)
        steps_s = 0.001 * budgets[0].depth
        controller.record(Outcome(rows, 0, steps_s + (0.8 if unread == 400 else 0.0), 0.1))
    assert controller.drafters.all[0].reading_s == pytest.approx(0.001, rel=0.2)


@pytest.mark.parametrize(("room", "limit"), [(2, AMPLE), (AMPLE, 2)])
def test_a_plan_does_not_count_for_a_row_that_can_be_drafted_less_deep(room: int, limit: int) -> None:
    controller, before = with_costs(0.1, [0.001]), outlook_of([[9]], [None])
    (budget,) = budgets_of(controller, [AUTO_SPECULATION], before)
    assert budget.depth > 2
    assert controller.holds(LOAD)
    (budget,) = controller.budgets(Load([0], [AUTO_SPECULATION], [room], 0), outlook_of([[limit]], [None]), SPARE)
    assert budget.depth == 2


def test_while_drafting_is_paused_only_plans_without_drafts_are_kept_unasked() -> None:
    """Also if there is nothing to draft; a plan with drafts is the end of the pause."""
    controller = with_costs(0.1, [0.001])
    controller.advice.off = True
    budgets_of(controller, [AUTO_SPECULATION], outlook_of([[0]], [None]))
    assert controller.skips(LOAD)
    controller.taken.num_held = HOLD
    (budget,) = budgets_of(controller, [AUTO_SPECULATION], outlook_of([[9]], [None]))
    assert budget.depth > 0
    assert controller.advice.off
    assert not controller.skips(LOAD)


def test_passes_of_rounds_in_which_no_request_wants_drafts_are_timed() -> None:
    """After a round with a plan, too; the drafter is not asked."""
    controller = with_costs(0.1, [0.01])
    budgets_of(controller, [AUTO_SPECULATION] * 3, outlook_of([[9] * 3], [None]))
    rows = range(3)
    assert controller.skips(Load(rows, [Speculation(0)] * 3, [AMPLE] * 3, 0))
    controller.record(Outcome([RowOutcome(row, 0, 0, 0, 1) for row in rows], 0, 0.0, 0.07, verdict_s=0.01))
    assert controller.costs.of(Kind.of(3)).seen[3][-1] == pytest.approx(0.08)


def test_rounds_of_requested_depths_alone_do_not_tell_the_time_of_plain_decoding() -> None:
    """Nothing is timed, since a pass that verifies draft tokens may take longer."""
    controller = MeasuredDepth()
    budgets_of(controller, [Speculation(4)], outlook_of([[9]], [None]))
    controller.record(Outcome([RowOutcome(0, 4, 4, 4, 5)], 0, 0.0, 0.1))
    assert controller.plain_s(1) is None


def test_a_plan_next_to_prompts_does_not_count_for_rounds_without() -> None:
    """Next to prompts each draft token costs as much as a prompt's token."""
    controller, outlook = with_costs(0.1, [0.001]), outlook_of([[9]], [None])
    controller.costs.prompt_s = 1.0
    (budget,) = controller.budgets(Load([0], [AUTO_SPECULATION], [AMPLE], 5), outlook, SPARE)
    assert budget.depth == 0
    (budget,) = budgets_of(controller, [AUTO_SPECULATION], outlook)
    assert budget.depth > 0


@pytest.mark.parametrize("share", [1.0, 2.0])
def test_a_plan_is_made_again_after_a_pass_that_took_much_longer(share: float) -> None:
    controller = with_costs(0.1, [0.001])
    controller.costs.record(Kind.of(1), 16, 0.1)
    (budget,) = budgets_of(controller, [AUTO_SPECULATION], outlook_of([[9]], [None]))
    controller.record(Outcome([RowOutcome(0, budget.depth, budget.depth, 0, 1)], 0, 1e-3, share * 0.1))
    assert controller.holds(LOAD) == (share == 1.0)


def test_after_a_change_of_the_machine_all_alternatives_are_tried_soon() -> None:
    controller = with_costs(0.1, [0.001, 0.001])
    timers = [controller.trials.plain, *(record.retry for record in controller.drafters.all)]
    assert not any(timer.due for timer in timers)
    for _ in range(CLEAR + 1):
        controller.skips(Load([0], [Speculation(0)], [AMPLE], 0))
        controller.record(Outcome([RowOutcome(0, 0, 0, 0, 1)], 0, 0.0, 1.0))
    assert controller.costs.level.num_jumps == 1
    assert all(timer.due for timer in timers)


def test_the_time_until_the_next_trial_does_not_depend_on_the_batch() -> None:
    """It follows from the share of a round's tokens that a trial costs."""
    patience = set[int]()
    for rows in (1, 2, 4):
        controller = with_costs(0.1, [0.001])
        controller.trials.plain.num_idle = LONGEST
        budgets_of(controller, [AUTO_SPECULATION] * rows, outlook_of([[9] * rows], [None]))
        assert controller.trials.tried == NOTHING
        patience.add(controller.trials.patience)
    assert len(patience) == 1
    assert min(patience) > 0


def test_the_draft_of_a_merged_trees_member_does_not_count_for_the_tree() -> None:
    """There were no cache slots for the planned tree, so a member drafted, whose tokens were all rejected."""
    controller = with_costs(0.1, [0.0, 0.0])
    controller.drafters.all[2].accepted, controller.drafters.all[2].predicted = 30.0, 20.0
    outlook = outlook_of([[9], [9]], [[0.5], [0.68]])
    load = Load([0], [Speculation(4)], [9], 0)
    (budget,) = controller.budgets(load, outlook, Spare({0: 0}, 1, 4))
    assert budget.drafter == 1
    assert [each and each.option.budget.drafter for each in controller.taken.assigned.values()] == [2]
    controller.record(Outcome([RowOutcome(0, 4, 1, 0, 1, 1)], 0, 0.0, 0.1, 0.0, [0.0, 0.1]))
    assert not any(controller.drafters.all[2].acceptance.offered)


def test_after_a_trial_that_goes_better_than_expected_new_rounds_weigh_more_than_old_ones() -> None:
    controller = with_costs(0.1, [0.001])
    learned = controller.drafters.all[0]
    for _ in range(100):
        learned.count_runs([9], [(1, 0)])
    learned.retry.num_idle = LONGEST
    for _ in range(3):
        (budget,) = budgets_of(controller, [AUTO_SPECULATION], outlook_of([[9]], [None]))
        assert controller.trials.tried == 0
        depth = budget.depth
        controller.record(Outcome([RowOutcome(0, depth, depth, depth, depth + 1)], 0, 1e-3, 0.1))
    assert learned.acceptance.rates()[0] > 0.3


def ruled(share: float) -> MeasuredDepth:
    """A controller that has a rule for a lone row whose drafter estimates this share of the true survival."""
    controller = MeasuredDepth()
    VaryingRates((0.9,), 0.02, share).speed(controller, 600, 0)
    while not (controller.taken.rule is not None and controller.holds(LOAD)):
        budget = next(iter(budget_by(controller, lambda least: [])))
        controller.record(Outcome([RowOutcome(0, budget.depth, 0, 0, 1)], 0, 1e-4, 0.1))
    return controller


def budget_by(controller: MeasuredDepth, estimate: Callable[[float], Sequence[float]]) -> Sequence[Budget]:
    """The budget of a lone row whose drafter gives this estimate for a least survival."""
    return controller.budgets(LOAD, Outlook([0], [AMPLE], lambda _row, least: estimate(least)), SPARE)


def test_a_rule_asks_for_all_estimates_that_may_count() -> None:
    """The drafter is too modest: its draft tokens are accepted twice as often as it estimates."""
    controller, asked = ruled(0.5), list[float]()
    trust, rule = controller.drafters.all[0].trust, controller.taken.rule
    assert trust > 1.5
    assert rule is not None
    budget_by(controller, lambda least: asked.append(least) or ())
    assert 0 < asked[0] * trust <= rule.min_survival * (1 + 1e-9)


def test_rounds_without_drafts_by_a_rule_count_for_the_report_that_drafting_is_paused() -> None:
    controller = ruled(1.0)
    controller.taken.num_held = controller.advice.num_otherwise = 0
    for _ in range(HOLD - 1):
        budget_by(controller, lambda _: [])
    assert controller.advice.num_otherwise == HOLD - 1


def test_the_reason_for_a_depth_by_a_rule_tells_its_expected_time() -> None:
    controller = ruled(1.0)
    (budget,) = budget_by(controller, lambda _: [0.9**depth for depth in range(1, 5)])
    assert budget.depth == 4
    rule = controller.taken.rule
    assert rule is not None
    assert f"tokens in {1000 * rule.round_s[4]:.2f} ms" in controller.reason()


@pytest.mark.parametrize(("room", "pays"), [(4, False), (4 * RETRY, True), (AMPLE, True)])
def test_reading_is_charged_to_the_rounds_that_are_left(room: int, pays: bool) -> None:
    """Drafting all four tokens makes rounds of 0.1 s five times as fast, and reading 400 tokens takes 1.6 s."""
    controller = with_costs(0.1, [1e-4])
    controller.drafters.all[0].reading_s = 0.004
    load = Load([0], [AUTO_SPECULATION], [room], 0)
    (budget,) = controller.budgets(load, outlook_of([[4]], [[1.0]], unread=400), SPARE)
    assert budget.depth == (4 if pays else 0)


@pytest.mark.parametrize("room", [2, HOLD, AMPLE])
def test_a_trial_costs_all_the_reading_of_its_round(room: int) -> None:
    """The next trial of a drafter that reads 400 tokens, as long as 16 passes, is as far away in all rooms."""
    controller = with_costs(0.1, [0.0])
    controller.drafters.all[0].reading_s, controller.drafters.all[0].retry.num_idle = 0.004, LONGEST
    load = Load([0], [AUTO_SPECULATION], [room], 0)
    controller.budgets(load, outlook_of([[AMPLE]], [[0.0]], unread=400), SPARE)
    assert controller.trials.tried == 0
    assert controller.trials.patience == pytest.approx(16 * 2 / TRIAL_SHARE, rel=0.01)
