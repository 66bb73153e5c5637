"""The economy of drafting against closed forms and brute force."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.economy import LinearCost, best_depth, cost_per_token, expected_tokens

CHANCES = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6)


@given(CHANCES)
def test_expected_tokens_are_those_of_every_way_a_round_can_end(chances: list[float]) -> None:
    """By enumeration: each draft token is accepted or not; the run ends at the first rejected one, plus one token."""
    for length in range(len(chances) + 1):
        total = 0.0
        for outcomes in itertools.product((True, False), repeat=length):
            run = next((i for i, accepted in enumerate(outcomes) if not accepted), length)
            total += (run + 1) * math.prod(
                a if accepted else 1 - a for a, accepted in zip(chances, outcomes, strict=False)
            )
        assert expected_tokens(chances, length) == pytest.approx(total)


def speed_up(alpha: float, draft_s: float) -> tuple[float, int]:
    """How much faster than plain decoding, whose step takes 1, and the length that makes it so."""
    chances = [alpha] * 40
    length = best_depth(chances, lambda k: 1 + k * draft_s)
    return 1 / cost_per_token(length, chances, lambda k: 1 + k * draft_s), length


@pytest.mark.parametrize(
    ("alpha", "draft_s", "length", "faster"),
    [(0.5, 0.1, 2, 1.46), (0.8, 0.02, 11, 3.82), (0.8, 0.05, 8, 3.09), (0.9, 0.02, 19, 6.37), (0.9, 0.2, 7, 2.37)],
)
def test_best_depths_of_the_published_formula(alpha: float, draft_s: float, length: int, faster: float) -> None:
    """(1 - a^(k+1)) / ((1 - a)(ck + 1)) at its best k, as tabulated; Leviathan et al. 2211.17192, theorem 3.8."""
    found, best = speed_up(alpha, draft_s)
    assert (round(found, 2), best) == (faster, length)


def test_a_cascade_of_three_is_faster_than_any_two_of_them() -> None:
    """Prices 0.02, 0.12 and 1; the small model is accepted 0.80 by the middle one, 0.70 by the target, which accepts
    0.85 of the middle one's."""
    direct, middle = speed_up(0.70, 0.02), speed_up(0.85, 0.12)
    assert (round(direct[0], 2), direct[1]) == (2.76, 8)
    assert (round(middle[0], 2), middle[1]) == (2.64, 7)

    def inner_s(k: int) -> float:
        return 0.12 + 0.02 * k

    inner = best_depth([0.8] * 40, inner_s)
    outer = speed_up(0.85, cost_per_token(inner, [0.8] * 40, inner_s))
    assert inner == 4
    assert (round(outer[0], 2), outer[1]) == (3.49, 9)


@given(CHANCES, CHANCES, st.floats(0.001, 0.3), st.floats(0.01, 0.9), st.floats(0.0, 0.1))
def test_optimising_each_level_alone_gives_the_best_of_all_pairs_of_lengths(
    lower: list[float], upper: list[float], draft_s: float, pass_s: float, token_s: float
) -> None:
    """Each level's length is chosen for that level alone; brute force over both lengths finds nothing better."""

    def inner_s(k: int) -> float:
        return pass_s + token_s * k + draft_s * k

    def whole(inner: int, outer: int) -> float:
        each_s = cost_per_token(inner, lower, inner_s)
        return cost_per_token(outer, upper, lambda k: 1 + k * each_s)

    pairs = itertools.product(range(len(lower) + 1), range(len(upper) + 1))
    inner = best_depth(lower, inner_s)
    each_s = cost_per_token(inner, lower, inner_s)
    outer = best_depth(upper, lambda k: 1 + k * each_s)
    assert whole(inner, outer) == pytest.approx(min(whole(*pair) for pair in pairs))


def test_the_fit_of_exact_points_recovers_the_line() -> None:
    line, dice = LinearCost(), random.Random(0)
    assert line.expect(3) == 0
    line.record(4, 0.5)
    assert [line.expect(size) for size in (1, 4, 20)] == [0.5] * 3  # what is known at one size only
    for _ in range(500):
        size = dice.randint(1, 40)
        line.record(size, 0.010 + 0.002 * size)
    for size in (1, 10, 100):
        assert line.expect(size) == pytest.approx(0.010 + 0.002 * size, rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 10)), min_size=1, max_size=20), st.integers(1, 600))
def test_no_expected_cost_is_negative(seen: list[tuple[int, float]], size: int) -> None:
    line = LinearCost()
    for known, taken_s in seen:
        line.record(known, taken_s)
    assert line.expect(size) >= -1e-9
    assert line.expect(size + 1) >= line.expect(size) - 1e-9


def test_one_outlying_time_does_not_change_the_cost() -> None:
    line = LinearCost()
    for _ in range(50):
        line.record(4, 0.01)
    line.record(4, 600.0)
    assert line.expect(4) < 0.02
