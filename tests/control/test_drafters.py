"""What is learned of a drafter, and what is expected of a draft by one of its options."""

import itertools
import random

import pytest

from control.test_measured import used_drafters
from forerun.accept.outcome import RowOutcome
from forerun.control.choices import Drafts
from forerun.control.costs import CostTable, Kind
from forerun.control.drafters import OLD_WEIGHT, UNLIKELY, Assignment, CutOff, DraftOption, MeasuredDrafter
from forerun.control.trials import RETRY
from forerun.draft.base import Budget


def option(budget: Budget, made: tuple[float, ...] = ()) -> DraftOption:
    return DraftOption(budget, frozenset([0]), [0.5] * budget.depth, [0.5] * budget.depth, {0: 0}, True, made)


def test_a_shallower_tree_has_its_share_of_the_nodes() -> None:
    tree = option(Budget(4, 3, 10))
    assert [tree.num_nodes(depth) for depth in range(1, 5)] == [3, 5, 8, 10]
    assert Assignment(tree, 2).budget == Budget(2, 3, 5)


def test_chains_that_end_early_count_as_far_as_they_were_planned() -> None:
    """Two tokens of a chain of four were drafted and accepted; the third was drawn, and dropped as unlikely."""
    cut, whole = Assignment(option(Budget(4), (0.9, 1.7, 2.4, 3.0)), 4), Assignment(option(Budget(4)), 4)
    row = RowOutcome(0, 2, 2, 2, 3)
    assert (cut.steps(row), cut.num_counted(row), cut.num_judged(row)) == (3, 4, 4)
    assert (whole.steps(row), whole.num_counted(row), whole.num_judged(row)) == (4, 2, 2)
    assert [cut.option.num_drawn(depth) for depth in range(1, 5)] == pytest.approx([1, 1.9, 2.7, 3.4])
    assert cut.steps(RowOutcome(0, 4, 4, 4, 5)) == 4
    assert cut.option.at_most(2).option.num_made(2) == 2, "a trial's chain ends early"


def test_counts_from_before_a_long_pause_weigh_little() -> None:
    """Also those of each sequence."""
    for pause, all_count in ((RETRY, True), (RETRY + 1, False)):
        learned = MeasuredDrafter()
        for _ in range(100):
            learned.count_runs([7], [(1, 0)])
        learned.unseen = pause
        learned.count_runs([7], [(1, 1)])
        assert learned.unseen == 0
        for counts in (learned.acceptance, learned.by_row[7]):
            assert (counts.offered[0] / counts.unit > OLD_WEIGHT + 2) == all_count


def test_trust_follows_the_last_rounds() -> None:
    """Estimates that were exact for a long time are twice the number of accepted tokens from then on."""
    learned = MeasuredDrafter()
    exact = option(Budget(4))
    for accepted in [2] * 500 + [1] * 150:
        learned.count([(RowOutcome(0, 4, 4, accepted, accepted + 1), Assignment(exact, 4))])
    assert learned.trust == pytest.approx(0.5, rel=0.05)


def test_only_judged_tokens_that_seemed_unlikely_after_the_one_before_them_correct_a_cut() -> None:
    """The counts of estimates are sums of the estimated chances of these tokens; each is 1 % less a round later."""
    dice, cut_off, estimated, accepted = random.Random(3), CutOff(), 0.0, 0.0
    for _ in range(300):
        chances = [dice.choice([0.2, 0.4, 0.9]) for _ in range(4)]
        survival = list(itertools.accumulate(chances, lambda one, other: one * other))
        num_offered = dice.randint(0, 4)
        num_accepted = dice.randint(max(0, num_offered - 1), num_offered)
        cut_off.learn(survival, num_offered, num_accepted)
        unlikely = [(chance, i < num_accepted) for i, chance in enumerate(chances[:num_offered]) if chance < UNLIKELY]
        estimated = 0.99 * estimated + sum(chance for chance, _ in unlikely)
        accepted = 0.99 * accepted + sum(right for _, right in unlikely)
    assert (cut_off.estimated, cut_off.accepted) == pytest.approx((estimated, accepted))


def test_the_time_of_a_draft_token_is_that_of_its_step_and_of_the_slope_of_passes() -> None:
    """Sizes next to that of the pass do not count, since their costs differ mostly by noise."""
    table, drafters = CostTable(), used_drafters([""])
    for size, taken_s in ((1, 0.1), (5, 0.1), (8, 0.13), (9, 0.14), (10, 0.16), (13, 0.18)):
        table.record(Kind.of(1), size, taken_s)
    drafters.all[0].time(8, [0], 8 * 0.003)
    drafts = Drafts(drafters, table.of_rows(Kind.of(1)), [100], [0], 1, 1.0)
    drafts.deepen(0, option(Budget(8)), 8, 4.0)
    assert drafts.token_s() == pytest.approx((0.18 - 0.1) / 8 + 0.003)
