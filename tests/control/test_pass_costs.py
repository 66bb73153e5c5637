"""What passes of a size are taken to cost, behind what was seen of others."""

import random

import pytest

from forerun.control.pass_costs import NOISE, Kind, PassCost, PassCosts, size_class
from forerun.economy import CLEAR


def test_a_smaller_pass_is_not_taken_to_cost_more_than_a_larger_one_seen_since() -> None:
    """It was seen in a busy moment: guesses beside it would seem to be better than free."""
    costs, kind = PassCosts(), Kind.of(8, 0)
    for _ in range(12):
        costs.record(kind, 8, 0.09)
    for _ in range(CLEAR - 1):
        costs.record(kind, 10, 0.067)
    assert costs.of(kind).expect(8) > 0.08, "one pass may have been a matter of luck"
    costs.record(kind, 10, 0.067)
    assert costs.of(kind).expect(8) <= NOISE * costs.of(kind).expect(10)
    for _ in range(3):
        costs.record(kind, 8, 0.06)
    assert costs.of(kind).expect(8) == pytest.approx(0.06, rel=0.1), "what is seen then counts at once"


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_sizes_holds_behind_what_was_seen_last(seed: int) -> None:
    """Whatever was seen before, and however noisy it was."""
    dice, costs = random.Random(seed), PassCost()
    for _ in range(200):
        size = dice.randint(1, 24)
        costs.record(size, (0.05 + 0.002 * size) * dice.choice([0.9, 1.0, 1.1, 1.5]))
        seen = costs.sizes[size_class(size)]
        if seen.num_seen >= CLEAR:
            known = [(other, own) for other, own in costs.sizes.items() if own.num_jumps == seen.num_jumps]
            most_s = NOISE * seen.usual_s * (1 + 1e-9)
            assert all(own.usual_s <= most_s for other, own in known if other < size_class(size))


def test_in_that_order_nothing_changes() -> None:
    """Sizes whose larger ones cost more keep what was seen of them."""
    costs = PassCost()
    for _ in range(20):
        for size in (1, 2, 4, 8):
            costs.record(size, 0.05 + 0.01 * size)
    found = [costs.expect(size) for size in (1, 2, 4, 8)]
    assert found == pytest.approx([0.06, 0.07, 0.09, 0.13], rel=0.02)
