"""`CostTable` and `Curve`: the expected seconds of rounds of a size, from measurements of this and other sizes."""

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.control.costs import (
    CLEAR,
    KNOWN,
    LATEST,
    LONG,
    CostTable,
    Curve,
    Kind,
    Level,
    rising,
    size_class,
    usual,
)
from forerun.economy import OUTLIER

LONE_ROW = Kind.of(1)


def measured(times_s: dict[int, float], num: int = KNOWN, flat: bool = True) -> CostTable:
    """A table with `num` measurements of these seconds for each of these sizes."""
    table = CostTable(flat)
    for _ in range(num):
        for size, taken_s in times_s.items():
            table.record(LONE_ROW, size, taken_s)
    return table


def test_a_size_costs_at_most_as_much_as_a_larger_size_with_enough_measurements() -> None:
    """The smaller size was measured on a busy machine; if it cost more, draft tokens would seem to save time.

    Fewer than KNOWN measurements of the larger size do not lower it.
    """
    table = measured({8: 0.09}, num=LATEST)
    for _ in range(KNOWN - 1):
        table.record(LONE_ROW, 10, 0.067)
    assert table.expect(LONE_ROW, 8) > 0.08, "too few measurements of the larger size"
    table.record(LONE_ROW, 10, 0.067)
    assert table.expect(LONE_ROW, 8) <= table.expect(LONE_ROW, 10)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_costs_never_fall_with_size(seed: int, flat: bool) -> None:
    """For random sizes with noise of up to 4 times and changes of the level; also between and beyond measured sizes."""
    dice, table = random.Random(seed), CostTable(flat)
    for _ in range(150):
        size = dice.randint(1, 24)
        table.record(LONE_ROW, size, (0.05 + 0.002 * size) * dice.choice([0.9, 1.0, 1.1, 1.5, 4.0]))
        if dice.random() < 0.02:
            for _ in range(CLEAR):
                table.record(LONE_ROW, size, 0.5 * dice.uniform(0.9, 1.1))
        expected = [table.expect(LONE_ROW, each / 2) for each in range(1, 80)]
        assert all(small <= large * (1 + 1e-9) for small, large in itertools.pairwise(expected))


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ({2: 0.08, 4: 0.08, 7: 0.11, 8: 0.13}, {1: 0.08, 3: 0.08, 6: 0.10, 7.5: 0.12, 8: 0.13, 12: 0.18}),
        ({4: 0.08, 8: 0.10}, {1: 0.065, 2: 0.07, 16: 0.14}),
        ({4: 0.04, 8: 0.12}, {1: 0.01, 2: 0.02, 16: 0.28}),
    ],
)
def test_costs_are_linear_between_measured_sizes_and_beyond_them(
    times_s: dict[int, float], expected: dict[float, float]
) -> None:
    """Beyond the largest size the slope is that of the upper half of sizes; a small size costs its share at least."""
    table = measured(times_s)
    assert {size: table.expect(LONE_ROW, size) for size in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("flat", "expected"), [(True, 0.04), (False, 0.01)])
def test_with_one_measured_size_others_cost_the_same_or_in_proportion(flat: bool, expected: float) -> None:
    """A table of passes (`flat`) expects the same seconds for fewer tokens, one of drafts a proportional part."""
    assert measured({4: 0.04}, num=1, flat=flat).expect(LONE_ROW, 1) == pytest.approx(expected)


def test_a_fifth_of_rounds_that_take_ten_times_longer_does_not_change_the_cost() -> None:
    table, dice = CostTable(), random.Random(0)
    for _ in range(200):
        table.record(LONE_ROW, 4, 0.05 * dice.uniform(0.98, 1.02) * (10 if dice.random() < 0.2 else 1))
    assert table.expect(LONE_ROW, 4) == pytest.approx(0.05, rel=0.03)


@pytest.mark.parametrize("noise", [0.3, 0.8])
def test_noise_of_one_size_raises_the_cost_of_another_by_at_most_the_noise(noise: float) -> None:
    """3,000 rounds of size 1 have exponential noise, as on a busy machine; size 5 was measured before."""
    table, dice = measured({1: 0.05, 5: 0.1}), random.Random(1)
    for _ in range(3000):
        table.record(LONE_ROW, 1, 0.05 * (1 + noise * dice.expovariate(1.0)))
    assert 0.1 <= table.expect(LONE_ROW, 5) <= 0.1 * (1 + noise)


def affine_s(num_tokens: int) -> float:
    return 0.05 + 0.002 * num_tokens


@pytest.mark.parametrize("factor", [0.3, 3.0, 30.0])
def test_odd_rounds_of_one_size_change_the_costs_of_all_sizes_once_they_are_no_chance(factor: float) -> None:
    """Rounds of size 5 take `factor` times as long; CLEAR - 1 of them in a row hardly change the cost of size 9."""
    table = measured({size: affine_s(size) for size in (1, 5, 9)}, num=LATEST)
    for _ in range(CLEAR - 1):
        table.record(LONE_ROW, 5, factor * affine_s(5))
    assert table.expect(LONE_ROW, 9) == pytest.approx(affine_s(9), rel=0.3)
    for _ in range(3):
        table.record(LONE_ROW, 5, factor * affine_s(5))
    assert {each: table.expect(LONE_ROW, each) for each in (1, 5, 9)} == pytest.approx(
        {each: factor * affine_s(each) for each in (1, 5, 9)}, rel=0.2
    )


def proportional_s(num_tokens: int) -> float:
    return 0.01 * num_tokens


@pytest.mark.parametrize("then", [affine_s, proportional_s])
def test_after_a_change_of_the_level_only_new_measurements_count(then: Callable[[int], float]) -> None:
    """All sizes cost the same before. After it two sizes are measured, and the others are interpolated from these."""
    table = measured(dict.fromkeys((1, 5, 9), 0.001), num=LATEST)
    for size in (9, 1):
        for _ in range(CLEAR + 1):
            table.record(LONE_ROW, size, then(size))
    assert {each: table.expect(LONE_ROW, each) for each in (1, 5, 9, 12)} == pytest.approx(
        {each: then(each) for each in (1, 5, 9, 12)}, rel=0.1
    )


@pytest.mark.parametrize(
    ("new_s", "now", "expected"),
    [(0.05, LATEST + 1, 0.1), (0.05, LATEST + LONG + 1, 0.05), (0.12, LATEST + LONG + 1, 0.11)],
)
def test_old_measurements_count_as_one_or_not_at_all_if_they_differ(new_s: float, now: int, expected: float) -> None:
    """32 measurements of 0.1 s outweigh a new one, unless they are older than LONG rounds."""
    curve = Curve()
    for earlier in range(LATEST):
        curve.record(5, 0.1, earlier)
    curve.record(5, new_s, now)
    assert curve.expect(5) == pytest.approx(expected)


def test_the_latest_measurements_of_a_size_decide_its_cost() -> None:
    table = measured({5: 0.1}, num=10 * LATEST)
    for _ in range(LATEST):
        table.record(LONE_ROW, 5, 0.13)
    assert table.expect(LONE_ROW, 5) == pytest.approx(0.13)


def test_the_level_changes_by_the_median_of_odd_rounds_and_only_once() -> None:
    """A round after the change is compared with the new level; the scatter is that of usual rounds."""
    for ratios in ((9.0, 2.0, 3.0, 8.0, 4.0), (0.1, 0.5, 0.2, 0.4, 0.3)):
        level = Level()
        assert [level.record(each) for each in (*ratios, ratios[0])] == [False] * (CLEAR - 1) + [True, False]
        assert level.factor == sorted(ratios)[CLEAR // 2]
        assert level.scatter == 0.0


def test_a_change_of_the_level_keeps_what_was_measured_before_it() -> None:
    """The last of CLEAR rounds at three times the cost took a third longer than the others."""
    table = measured({5: 0.05}, num=12)
    for taken_s in (*[0.15] * (CLEAR - 1), 0.2):
        table.record(LONE_ROW, 5, taken_s)
    assert table.expect(LONE_ROW, 5) == pytest.approx(0.15)


def test_a_kind_without_measurements_starts_with_the_costs_of_the_most_similar_kind() -> None:
    """2 rows start as 1 row, 24 rows as 32 rows, whose costs do not change when those of 24 rows are measured."""
    table = CostTable()
    for rows, taken_s in ((1, 0.1), (32, 0.4)):
        for _ in range(KNOWN):
            table.record(Kind.of(rows), rows, taken_s)
    assert table.expect(Kind.of(2), 2) == pytest.approx(0.1)
    table.record(Kind.of(24), 24, 0.3)
    assert table.expect(Kind.of(24), 24) < 0.4
    assert table.expect(Kind.of(32), 32) == pytest.approx(0.4), "measurements of 24 rows changed the costs of 32"


def test_merged_trees_batch_and_context_decide_which_kind_is_most_similar() -> None:
    """Below 2,048 tokens in total the context makes no difference."""
    table = CostTable()
    for kind, taken_s in ((LONE_ROW, 0.1), (Kind.of(1, 2**15), 0.2), (Kind.of(8, 0, merged=True), 0.3)):
        for _ in range(2 * KNOWN):
            table.record(kind, 1, taken_s)
    similar = {Kind.of(1, 2047): 0.1, Kind.of(1, 2**14): 0.2, Kind.of(1, 0, merged=True): 0.3, Kind.of(8): 0.1}
    assert {kind: table.expect(kind, 1) for kind in similar} == pytest.approx(similar)


def test_after_a_change_of_the_level_only_new_measurements_of_other_kinds_count() -> None:
    """Rounds of one row take three times as long; the first round of 32 rows since then takes twice as long."""
    table = measured({1: 0.1}, num=LATEST)
    for kind, taken_s in ((Kind.of(32), 0.1), (LONE_ROW, 0.3)):
        for _ in range(LATEST):
            table.record(kind, 1, taken_s)
    assert table.level.factor == pytest.approx(3.0)
    table.record(Kind.of(32), 1, 0.2)
    assert table.expect(Kind.of(32), 1) == pytest.approx(0.2)


def test_a_size_that_does_not_follow_a_change_of_the_level_is_measured_again() -> None:
    table = measured({5: 0.05, 9: 0.05}, num=12)
    for size, taken_s in (*[(5, 0.15)] * (CLEAR - 1), (9, 0.4)):
        table.record(LONE_ROW, size, taken_s)
    assert table.level.factor == pytest.approx(3.0)
    assert table.expect(LONE_ROW, 9) == pytest.approx(0.4)


def test_rounds_of_unmeasured_sizes_do_not_change_the_level() -> None:
    """Their expected time is interpolated, so it may be wrong although nothing has changed."""
    table = measured({1: 0.1})
    for size in range(2, 3 + CLEAR):
        table.record(LONE_ROW, size, 0.5 * size)
    assert table.level.num_jumps == 0


def test_the_time_of_a_prefilled_token_is_a_moving_average_at_the_first_level() -> None:
    """Later rounds weigh an eighth, and count as at most OUTLIER times as long as expected."""
    table = measured({1: 0.1})
    table.level.factor = 2.0
    for token_s, expected_s in ((0.001, 0.001), (0.003, 0.00125), (0.5, 0.00125 * (7 + OUTLIER) / 8)):
        table.record_reading(LONE_ROW, 1, 101, 2 * (0.1 + 100 * token_s))
        assert table.prompt_s == pytest.approx(expected_s)


def test_every_doubling_of_sizes_has_eight_classes_and_small_sizes_their_own() -> None:
    """A class is its smallest size."""
    classes = [size_class(size) for size in range(1025)]
    assert classes[:16] == list(range(16))
    assert classes == sorted(classes)
    assert all(size_class(each) == each for each in classes)
    assert {len({*classes[2**bits : 2 ** (bits + 1)]}) for bits in range(4, 10)} == {8}


def test_the_usual_time_is_the_mean_of_the_middle_half() -> None:
    assert usual([50, 0, 2, 9, 4, 3, 0, 50]) == (2 + 3 + 4 + 9) / 4
    assert usual([1, 3]) == 2
    assert usual([7, 1, 90]) == 7


@contextmanager
def interrupt_at(number: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before the line of `control/costs.py` that is executed as the `number`-th, from 0."""
    num_left = number

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal num_left
        if frame.f_code.co_filename.endswith("control/costs.py"):
            num_left -= event == "line"
            if num_left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("taken_s", [0.07, 0.7])
def test_an_interrupt_at_any_line_leaves_a_usable_table(taken_s: float) -> None:
    """Ctrl-C while a round is recorded, in one case a round that changes the level: costs still rise with size."""
    for number in itertools.count():
        table = measured({size: affine_s(size) for size in (1, 5, 9)}, num=LATEST)
        for _ in range(CLEAR - 1):
            table.record(LONE_ROW, 5, taken_s)
        try:
            with interrupt_at(number):
                table.record(LONE_ROW, 5, taken_s)
                table.expect(LONE_ROW, 7)
        except KeyboardInterrupt:
            expected = [table.expect(LONE_ROW, size) for size in (1, 5, 7, 9, 20)]
            assert expected == sorted(expected)
            table.record(LONE_ROW, 2, taken_s)
            table.record(LONE_ROW, 5, taken_s)
            assert 0 < table.expect(LONE_ROW, 5) < 10
        else:
            break
    assert number > 20, "hardly any line was interrupted"


@given(st.lists(st.floats(0.0, 1.0)), st.data())
def test_rising_returns_sorted_values_unchanged(values: list[float], data: st.DataObject) -> None:
    """`Curve.fit` relies on this: it does not call `rising` for sorted values."""
    values.sort()
    assert rising(values, data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))) == values
