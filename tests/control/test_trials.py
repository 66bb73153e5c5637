"""When trials are due: the interval to the next one, from the cost and the outcome of the last."""

import pytest

from control.test_measured import budgets_of, outlook_of, with_costs
from control.worlds import AMPLE, AUTO_SPECULATION
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.control.controller import Load
from forerun.control.costs import CHANGED
from forerun.control.trials import HOLD, LONGEST, NOTHING, OTHER_DEPTH, RETRY, TRIES, RetryTimer, Trials


def num_idle(timer: RetryTimer) -> int:
    """Counts rounds without use until the timer is due."""
    while not timer.due:
        timer.count(used=False, patience=None)
    return timer.num_idle


def test_a_new_alternative_is_due_until_it_was_used_often_enough() -> None:
    timer = RetryTimer()
    for _ in range(TRIES):
        assert timer.due
        timer.count(used=True, patience=None)
    assert num_idle(timer) == RETRY


@pytest.mark.parametrize(
    ("before", "patience", "hopeful", "expected"),
    [
        (False, 10, False, 20),
        (False, 10, True, 1),
        (False, 0, False, 2 * TRIES),
        (False, 10 * LONGEST, False, LONGEST),
        (True, 10 * LONGEST, False, RETRY),  # one bad trial after good ones is not final
        (True, None, False, RETRY),
    ],
)
def test_the_interval_follows_from_the_cost_of_the_last_trial(
    before: bool, patience: int | None, hopeful: bool, expected: int
) -> None:
    timer = RetryTimer(num_rounds=TRIES, patience=LONGEST, hopeful=before)
    timer.count(used=True, patience=patience, hopeful=hopeful)
    assert num_idle(timer) == expected


def test_after_a_change_an_alternative_is_tried_once_and_then_no_more_seldom_than_any() -> None:
    timer = RetryTimer(num_rounds=50, patience=LONGEST)
    timer.wake()
    assert timer.due
    assert timer.patience == RETRY
    timer.count(used=True, patience=None)
    assert not timer.due


@pytest.mark.parametrize("cheap", [False, True])
@pytest.mark.parametrize("tried", [NOTHING, OTHER_DEPTH])
def test_a_trial_counts_for_the_alternative_on_trial_alone(tried: int, cheap: bool) -> None:
    """One whose pass took less than expected is repeated after a round, another one as late as it costs."""
    trials = Trials(RetryTimer(num_rounds=TRIES), RetryTimer(num_rounds=TRIES), tried=tried, patience=30)
    trials.count(drafted=tried == OTHER_DEPTH, cheap=cheap)
    by_tried = {NOTHING: trials.plain, OTHER_DEPTH: trials.other_depth}
    assert num_idle(by_tried.pop(tried)) == (1 if cheap else 60)
    assert [num_idle(other) for other in by_tried.values()] == [RETRY]


@pytest.mark.parametrize("share", [1.0, 0.9 / CHANGED])
def test_plain_decoding_is_tried_again_after_a_round_if_its_pass_took_much_less_than_expected(share: float) -> None:
    controller = with_costs(0.1, [0.001])
    controller.trials.plain.num_idle = LONGEST
    budgets_of(controller, [AUTO_SPECULATION], outlook_of([[9]], [None]))
    assert controller.trials.tried == NOTHING
    controller.costs.record(controller.search.kind(1), 1, 0.1)
    controller.record(Outcome([RowOutcome(0, 0, 0, 0, 1)], 0, 0.0, share * 0.1))
    assert controller.trials.plain.hopeful == (share < 1)


def test_counts_of_sequences_that_have_left_are_dropped() -> None:
    """Otherwise a server's memory would grow with each request."""
    controller = with_costs(0.1, [0.001])
    for seq_ids in ((0, 1), (1, 2), (2, 3)):
        controller.taken.num_held = HOLD
        load = Load(seq_ids, [AUTO_SPECULATION] * 2, [AMPLE] * 2, 0)
        controller.budgets(load, outlook_of([[9, 9]], [None]), Spare(dict.fromkeys(seq_ids, AMPLE), AMPLE, 16))
        controller.record(Outcome([RowOutcome(seq_id, 4, 4, 4, 5) for seq_id in seq_ids], 0, 0.01, 0.1))
        assert {*controller.drafters.all[0].by_row} == {*seq_ids}
