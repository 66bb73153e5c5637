"""The search for a round's best choice: the options it compares, against all depths that it may find."""

import dataclasses
import random
from collections.abc import Sequence

import pytest

from control.test_drafters import option
from control.test_measured import used_drafters
from control.worlds import AMPLE, AUTO_SPECULATION
from forerun.config import AUTO_DEPTH
from forerun.control.choices import ChoiceSearch, DepthRule, Drafts, Planned, best_of, fallbacks, favor, tokens_of
from forerun.control.controller import Load
from forerun.control.costs import CostTable, Kind
from forerun.control.drafters import BEHIND, Assignment, DraftOption
from forerun.draft.base import NO_DRAFT, Budget


def search_of(num_rows: int, token_s: float, step_s: float) -> ChoiceSearch:
    """A search with known costs: a pass takes 1 s and `token_s` per draft token, each draft step `step_s`."""
    costs, drafters = CostTable(), used_drafters([""])
    for size in (num_rows, 2 * num_rows, num_rows * (1 + AUTO_DEPTH)):
        costs.record(Kind.of(num_rows), size, 1 + token_s * (size - num_rows))
    for depth in (1, AUTO_DEPTH):
        drafters.all[0].time(depth, [0] * num_rows, depth * step_s)
    load = Load(range(num_rows), [AUTO_SPECULATION] * num_rows, [AMPLE] * num_rows, 0)
    return ChoiceSearch(costs, drafters, load)


def rows_of(rates: Sequence[float], depth: int = AUTO_DEPTH) -> list[DraftOption]:
    """Chains with these acceptance rates at every depth."""
    survival = [[rate**number for number in range(1, 1 + depth)] for rate in rates]
    return [DraftOption(Budget(depth), frozenset([0]), each, each, {0: 0}, True) for each in survival]


@pytest.mark.parametrize("num_rows", [1, 3, 24])
@pytest.mark.parametrize(("token_s", "step_s"), [(0.0, 0.0), (0.02, 0.01), (0.1, 0.0), (0.0, 0.5), (0.3, 0.3)])
def test_no_share_of_the_likeliest_draft_tokens_is_faster_than_the_plan(
    num_rows: int, token_s: float, step_s: float
) -> None:
    """Shares of a sixteenth; the first AUTO_DEPTH tokens one by one. The speed of a plan is that of its choice."""
    dice = random.Random(num_rows)
    search, chosen = search_of(num_rows, token_s, step_s), rows_of([dice.uniform(0.3, 1.0) for _ in range(num_rows)])
    planned = search.deepest(chosen)
    assert planned.tokens_per_s == pytest.approx(search.drafts_of(planned.choice).tokens_per_s())
    assert tokens_of(planned.choice) == pytest.approx(search.drafts_of(planned.choice).gain)
    tokens = sorted(
        (-chance, depth, row) for row in range(num_rows) for depth, chance in enumerate(chosen[row].survival)
    )
    for num in {*range(AUTO_DEPTH + 1), *range(0, len(tokens) + 1, num_rows)}:
        depths = [sum(row == each for *_, each in tokens[:num]) for row in range(num_rows)]
        choice = [Assignment(each, depth) if depth else None for each, depth in zip(chosen, depths, strict=True)]
        assert planned.tokens_per_s >= search.drafts_of(choice).tokens_per_s() * (1 - 1e-9)


def test_whole_depths_are_drafted_if_no_likely_token_is_worth_its_step() -> None:
    """A step takes 0.3 s for any number of rows. One row's draft tokens are so likely that they all come first."""
    search, chosen = search_of(8, 0.0, 0.3), rows_of([0.995] + [0.5] * 7)
    planned = search.deepest(chosen)
    assert [each.depth if each else 0 for each in planned.choice] == [1] * 8
    assert planned.tokens_per_s == pytest.approx((8 + 0.995 + 7 * 0.5) / 1.3)
    assert planned.tokens_per_s > search.deepened(chosen, lambda token: token[:3]).tokens_per_s == 8


def test_rows_with_a_fixed_depth_are_drafted_whatever_it_costs_and_others_beside_them_if_that_pays() -> None:
    search, (first, second) = search_of(2, 0.0, 3.0), rows_of([0.1, 0.9], 4)
    fixed = dataclasses.replace(first, free=False)
    planned = search.deepest([fixed, second])
    assert [each and each.depth for each in planned.choice] == [4, 4], "the steps of the second row cost nothing more"
    assert [each and each.depth for each in search.deepest([fixed, None]).choice] == [4, None]
    assert planned.tokens_per_s == pytest.approx((2 + first.gain + second.gain) / 13)


def test_a_rule_has_the_seconds_of_rounds_of_each_depth() -> None:
    """No draft token pays whose survival is below the least seconds that one adds over those of a plain round."""
    search = search_of(1, 0.05, 0.02)
    rule = search.rule(search.drafters.all[0], 4)
    (chain,) = rows_of([0.5], 4)
    rounds = [search.drafts_of([Assignment(chain, depth) if depth else None]).round_s() for depth in range(5)]
    assert rule.round_s == pytest.approx(rounds)
    assert rule.favor == favor(1, 0.0)
    assert DepthRule([2.0, 2.5, 2.9, 3.4], 0.0).min_survival == pytest.approx(0.4 / 2)


def test_a_round_is_of_the_kind_with_merged_trees_if_any_row_has_one() -> None:
    search, alone = search_of(2, 0.0, 0.0), option(Budget(2))
    long = dataclasses.replace(search, load=dataclasses.replace(search.load, num_context=2**16))
    merged = dataclasses.replace(alone, members=frozenset([0, 1]))
    assert long.kind(2, [alone, alone]) == long.kind(2) == Kind.of(2, 2**16)
    assert long.kind(2, [alone, merged]) == Kind.of(2, 2**16, merged=True)


def test_the_best_option_needs_only_members_that_draft_unless_the_depth_is_fixed() -> None:
    free = {
        0: DraftOption(Budget(2), frozenset([0]), [0.4], [], {}, True),
        1: DraftOption(Budget(2), frozenset([1]), [0.5], [], {}, True),
        2: DraftOption(Budget(2), frozenset([0, 1]), [0.6], [], {}, True),
    }
    fixed = {drafter: dataclasses.replace(each, free=False) for drafter, each in free.items()}
    for among, expected, forced in ((set[int](), None, 2), ({0}, 0, 0), ({1}, 1, 1), ({0, 1}, 2, 2), ({5}, None, 2)):
        assert best_of(free, among) is (None if expected is None else free[expected])
        assert best_of(fixed, among) is fixed[forced]


def test_only_a_merged_tree_falls_back_to_another_budget_that_of_its_best_member() -> None:
    options = {
        0: DraftOption(Budget(2), frozenset([0]), [0.9, 0.8], [], {}, True),
        1: DraftOption(Budget(9, drafter=1), frozenset([1]), [0.5], [], {}, True),
        2: DraftOption(Budget(9, 2, 18, 2), frozenset([0, 1]), [0.9], [], {}, True),
    }
    assert fallbacks(None, options) == [NO_DRAFT]
    assert fallbacks(Assignment(options[1], 4), options) == [Budget(4, drafter=1)]
    assert fallbacks(Assignment(options[2], 4), options) == [Budget(4, 2, 8, 2), Budget(2)]
    assert fallbacks(Assignment(options[2], 1), options) == [Budget(1, 2, 2, 2), Budget(1)]


def test_a_plan_is_under_way_if_something_is_drafted_and_no_drafter_is_behind() -> None:
    """Plain decoding is valued above its speed by the noise of round times, which a lone row's is not."""
    for unread, under_way in ((BEHIND, True), (BEHIND + 1, False)):
        behind = dataclasses.replace(option(Budget(2)), num_unread={0: 0, 1: unread})
        drafted, plain = Planned([None, Assignment(behind, 1)], 8.0), Planned([None, None], 8.0)
        assert drafted.under_way == under_way
        assert not plain.under_way
        assert (drafted.value(0.3), plain.value(0.3)) == (8.0, pytest.approx(8.0 * 1.3))
    assert Planned([None], 8.0).value(0.3) == 8.0 * (1 + favor(1, 0.0))
    assert favor(2, 0.0) == favor(1, 0.0) > 0


def test_tokens_of_a_pass_are_the_nodes_of_trees_and_the_expected_ones_of_chains_that_end_early() -> None:
    """A member takes as many steps as its row with the most."""
    tree, cut = option(Budget(4, 3, 10)), option(Budget(4), (0.9, 1.7, 2.4, 3.0))
    drafts = Drafts(used_drafters([""]), CostTable().of_rows(Kind.of(2)), [100, 100], [0, 0], 2, 2.0)
    for row, each, depth, num_tokens, steps in (
        (0, cut, 2, 2 + 1.7, 1.9),
        (0, cut, 3, 2 + 2.4, 2.7),
        (1, tree, 2, 2 + 2.4 + 5, 2.7),
        (1, tree, 4, 2 + 2.4 + 10, 4),
    ):
        drafts.deepen(row, each, depth, 0.1)
        assert (drafts.num_tokens, drafts.steps[0]) == (pytest.approx(num_tokens), pytest.approx(steps))
    assert drafts.num_rows == {0: 2}
