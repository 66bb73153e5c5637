"""What is learned of a drafter, and what is expected of a draft by one of its options."""

import dataclasses
import itertools
import random

import pytest

from control.test_measured import used_drafters
from control.worlds import AUTO_SPECULATION, estimates
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.config import AUTO_DEPTH, Speculation
from forerun.control.choices import Drafts
from forerun.control.costs import SHARE, CostTable, Kind
from forerun.control.drafters import (
    BEHIND,
    LEAST_DRAFTING,
    NO_MINIMUM,
    OLD_WEIGHT,
    UNLIKELY,
    Assignment,
    CutOff,
    DraftOption,
    MeasuredDrafter,
    MeasuredDrafters,
)
from forerun.control.trials import LONGEST, RETRY, TRIES, RetryTimer
from forerun.draft.base import MERGED, Budget, Outlook
from forerun.economy import OUTLIER


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


def test_reading_times_are_averages_of_what_a_draft_took_longer() -> None:
    """With at most BEHIND unread tokens a draft is drafting alone. Outliers are limited, negative times count as 0."""
    learned = MeasuredDrafter()
    learned.time(4, [BEHIND, 0], 0.4)
    assert (learned.cost_s(4, 2), learned.reading_s) == (pytest.approx(0.4), 0.0)
    expected = 0.01
    for each_s in (0.01, 0.03, 1e6, -0.004):
        learned.time(4, [BEHIND + 1, 3], 0.4 + each_s * (BEHIND + 4))
        expected = (expected + min(max(0.0, each_s), OUTLIER * expected)) / 2
        assert learned.reading_s == pytest.approx(expected)
    assert learned.cost_s(4, 2, 10) == pytest.approx(0.4 + 10 * expected)


def test_results_in_merged_trees_count_for_members_without_estimates_that_had_draft_tokens() -> None:
    """Trials of these become rare; nothing is learned of the others."""
    drafters, judged = used_drafters(["a", "b", "c", MERGED]), [7, 8]
    for record in drafters.all:
        record.unseen, record.retry.hopeful = 5, True
    runs = {"a": [(0, 0), (1, 0)], "b": [(3, 2), (3, 2)], "c": [(0, 0), (0, 0)]}
    members = {name: Outlook([0] * 2, [9] * 2, merged_runs=each) for name, each in runs.items()}
    members["b"] = Outlook([0] * 2, [9] * 2, estimates([0.5] * 2), merged_runs=runs["b"])
    drafters.meet(Outlook([0] * 2, [9] * 2, drafters=members), judged)
    learned, *others = drafters.all
    assert list(learned.by_row) == [8]
    assert sum(learned.acceptance.offered) / learned.acceptance.unit == pytest.approx(1)
    assert (learned.unseen, learned.retry.patience, learned.retry.hopeful) == (0, LONGEST, False)
    assert others == [MeasuredDrafter(unseen=5, retry=RetryTimer(TRIES, hopeful=True))] * 3


@pytest.mark.parametrize("num_estimated", [0, 3, AUTO_DEPTH])
@pytest.mark.parametrize("limit", [0, 2, 9, 30])
@pytest.mark.parametrize("speculation", [AUTO_SPECULATION, Speculation(20), Speculation(20, width=2)])
def test_options_are_as_deep_as_request_room_drafter_and_estimates_allow(
    speculation: Speculation, limit: int, num_estimated: int
) -> None:
    """Fewer than AUTO_DEPTH estimates mean that the draft has no more tokens.

    Estimates too low to save time, given the trust in them, are left out if the depth is automatic; a drafter that
    cannot draft is not asked.
    """
    for room in (1, 25):
        asked = list[float]()

        def estimate(_i: int, least: float, asked: list[float] = asked) -> list[float]:
            asked.append(least)
            return [0.5] * num_estimated

        drafters = MeasuredDrafters([MeasuredDrafter(predicted=6.0)], [""])  # a trust of 1/4
        options = drafters.options(0, 7, speculation, room, Outlook([4], [limit], estimate), least=0.1)
        most = [speculation.depth, room, limit] + [num_estimated] * (num_estimated < AUTO_DEPTH)
        assert [option.budget.depth for option in options.values()] == [min(most)] * (min(most) > 0)
        assert asked == [pytest.approx(0.4 if speculation.auto else 0.0)] * (limit > 0)
        assert all(option.free == speculation.auto and option.num_unread == {0: 4} for option in options.values())


def test_which_options_leave_the_depth_free() -> None:
    """Automatic depths are, and those of chains in a mix, where the depth is a limit, unless a drafter is named."""
    drafters = used_drafters(["a", "b", MERGED])
    members = {"a": Outlook([0], [9]), "b": Outlook([0], [0])}
    for speculation, free in (
        (AUTO_SPECULATION, {0: True}),
        (Speculation(4), {0: True}),
        (Speculation(4, width=2), {0: False}),
        (Speculation(4, drafter="a"), {0: False}),
        (Speculation(4, drafter="b"), {}),
        (Speculation(4, drafter=MERGED), {2: False}),
    ):
        options = drafters.options(0, 0, speculation, 99, Outlook([0], [9], drafters=members))
        assert {drafter: option.free for drafter, option in options.items()} == free


@pytest.mark.parametrize("min_survival", [NO_MINIMUM, 0.3])
@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("speculation", [AUTO_SPECULATION, Speculation(4), Speculation(4, width=2)])
@pytest.mark.parametrize("estimating", [False, True])
def test_only_chains_of_automatic_depth_that_their_drafter_ends_have_a_minimum_survival(
    speculation: Speculation, estimating: bool, ends_early: bool, min_survival: float
) -> None:
    """Of a drafter without other estimates. The lengths of its chains are then expected from those of earlier ones."""
    learned = MeasuredDrafter(cut_off=CutOff(min_survival))
    learned.cut_off.made.count([(2, 2), (2, 1)] * 10)
    outlook = Outlook([0], [9], estimates([0.8]) if estimating else None, ends_early=ends_early)
    option = MeasuredDrafters([learned], [""]).options(0, 0, speculation, 99, outlook)[0]
    cuts = speculation.auto and ends_early and not estimating
    assert option.budget.min_survival == (min_survival if cuts else 0.0)
    assert list(option.made) == (learned.cut_off.num_made(9) if cuts and min_survival > NO_MINIMUM else [])


def test_a_merged_tree_is_as_deep_as_its_deepest_member_and_survives_as_long_as_the_best() -> None:
    """Beyond the best member's depth nothing is expected; a trust above 1 raises the survival, one below 1 does not."""
    drafters = used_drafters(["a", "b", MERGED])
    best, furthest = [0.9, 0.8, 0.0, 0.0], Budget(4, drafter=1, min_survival=0.3)
    members = [
        DraftOption(Budget(2), frozenset([0]), best[:2], best[:2], {0: 3}, True),
        DraftOption(furthest, frozenset([1]), [0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], {1: 5}, True),
    ]
    learned = drafters.all[2]
    for _ in range(200):
        learned.acceptance.count([(4, 4 if learned.acceptance.unit % 2 < 1 else 3)])
    merged = drafters.merged(7, members)
    assert (merged.budget, merged.members, merged.num_unread) == (Budget(4, 2, 4, 2), {0, 1}, {0: 3, 1: 5})
    assert (merged.predicted, merged.free, merged.estimated) == (best, True, False)
    assert merged.survival == list(map(max, learned.survival(7, 4), best)) != best
    estimated = [members[0], dataclasses.replace(members[1], estimated=True)]
    for each, is_new in ((estimated, False), (members, True)):
        learned.retry = RetryTimer(num_rounds=0 if is_new else TRIES)
        for accepted, expected in ((0.0, best), (8.0, [min(1.0, 10 / 8 * chance) for chance in best])):
            learned.predicted, learned.accepted = 6.0, accepted
            merged = drafters.merged(7, each)
            assert merged.survival == pytest.approx(expected)
            assert merged.estimated == (not is_new)


def test_the_share_of_rows_that_a_drafter_covers_follows_each_round() -> None:
    drafters, one = used_drafters(["a", "b", MERGED]), option(Budget(2))
    drafters.cover([{0: one}, {0: one, 1: one, 2: one}, {}, {}])
    expected = [1 - SHARE * 0.5, 1 - SHARE * 0.75, 1 - SHARE * 0.75]
    assert [record.covered for record in drafters.all] == pytest.approx(expected)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_mix_shares_the_time_beside_its_members_among_those_that_drafted(is_new: bool) -> None:
    """Each is as deep as its deepest row. In later rounds of a plan no tokens are unread."""
    drafters, unread = used_drafters(["a", "b", "c", MERGED]), {0: 0, 1: BEHIND + 1}
    alone = DraftOption(Budget(3), frozenset([0]), [], [], unread, True)
    rows = [(alone, 3), (dataclasses.replace(alone, members=frozenset([0, 1])), 5), (alone, 1)]
    drafters.time(rows, Outcome([], 0, 0.1 + 0.2 + 0.06 + 0.02, 0.1, 0.0, [0.1, 0.2, 0.0]), 0.02, is_new)
    first, second, *others = drafters.all
    assert first.cost_s(5, 3) == pytest.approx(0.1 + 0.03)
    assert second.cost_s(5, 1) == pytest.approx(0.0 if is_new else 0.2 + 0.03)
    assert second.reading_s == pytest.approx((0.2 + 0.03) / (BEHIND + 1) if is_new else 0.0)
    assert not any(each.costs.kinds for each in others)
    faster = used_drafters(["a", "b", MERGED])
    faster.time([(alone, 4)], Outcome([], 0, 0.05, 0.1, 0.0, [0.1, 0.2]), 0.0)
    assert faster.all[0].cost_s(4, 1) == pytest.approx(0.1)
    lone = used_drafters([""])
    lone.time([(alone, 4)], Outcome([], 0, 0.4, 0.1), 0.39)
    assert lone.all[0].cost_s(4, 1) == pytest.approx(LEAST_DRAFTING * 0.4)


@pytest.mark.parametrize(("predicted", "accepted"), [(100.0, 10.0), (10.0, 100.0), (4.0, 2.0)])
def test_after_a_calibration_its_counts_weigh_little(predicted: float, accepted: float) -> None:
    learned = MeasuredDrafter(predicted=predicted, accepted=accepted)
    for _ in range(100):
        learned.count_runs([7], [(2, 1)])
    MeasuredDrafters([learned], [""]).begin()
    assert max(learned.acceptance.offered) / learned.acceptance.unit == pytest.approx(OLD_WEIGHT)
    assert max(learned.predicted, learned.accepted) == min(OLD_WEIGHT, max(predicted, accepted))
    assert learned.accepted / learned.predicted == pytest.approx(accepted / predicted)
    assert (learned.by_row, learned.retry) == ({}, used_drafters([""]).all[0].retry)


def test_the_time_of_a_draft_token_is_that_of_its_step_and_of_the_slope_of_passes() -> None:
    """Sizes next to that of the pass do not count, since their costs differ mostly by noise."""
    table, drafters = CostTable(), used_drafters([""])
    for size, taken_s in ((1, 0.1), (5, 0.1), (8, 0.13), (9, 0.14), (10, 0.16), (13, 0.18)):
        table.record(Kind.of(1), size, taken_s)
    drafters.all[0].time(8, [0], 8 * 0.003)
    drafts = Drafts(drafters, table.of_rows(Kind.of(1)), [100], [0], 1, 1.0)
    drafts.deepen(0, option(Budget(8)), 1, 1.0)
    assert drafts.token_s() == pytest.approx((table.expect(Kind.of(1), 3) - 0.1) / 2 + 0.003)
    drafts.deepen(0, option(Budget(8)), 8, 4.0)
    assert drafts.token_s() == pytest.approx((0.18 - 0.1) / 8 + 0.003)
