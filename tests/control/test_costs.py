"""What rounds of a size are taken to cost, behind what was seen of others."""

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.control.costs import CLEAR, KNOWN, LATEST, LONG, CostTable, Curve, Kind, rising

ALONE = Kind.of(1)


def seen(times: dict[int, float], num: int = KNOWN, flat: bool = True) -> CostTable:
    """A table that has seen these seconds by size, each so often."""
    table = CostTable(flat)
    for _ in range(num):
        for size, taken_s in times.items():
            table.record(ALONE, size, taken_s)
    return table


def test_a_smaller_pass_is_not_taken_to_cost_more_than_a_larger_one_that_is_known() -> None:
    """It was seen in a busy moment: guesses beside it would seem to be better than free."""
    table = seen({8: 0.09}, num=LATEST)
    for _ in range(KNOWN - 1):
        table.record(ALONE, 10, 0.067)
    assert table.expect(ALONE, 8) > 0.08, "few passes may have been a matter of luck"
    table.record(ALONE, 10, 0.067)
    assert table.expect(ALONE, 8) <= table.expect(ALONE, 10)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_larger_sizes_never_cost_less(seed: int, flat: bool) -> None:
    """Whatever was seen, how noisy it was, and whether the level has changed; also between and beyond what was seen."""
    dice, table = random.Random(seed), CostTable(flat)
    for _ in range(150):
        size = dice.randint(1, 24)
        table.record(ALONE, size, (0.05 + 0.002 * size) * dice.choice([0.9, 1.0, 1.1, 1.5, 4.0]))
        if dice.random() < 0.02:
            for _ in range(CLEAR):
                table.record(ALONE, size, 0.5 * dice.uniform(0.9, 1.1))
        expected = [table.expect(ALONE, each / 2) for each in range(1, 80)]
        assert all(small <= large * (1 + 1e-9) for small, large in itertools.pairwise(expected))


def test_what_is_in_order_is_taken_as_it_was_seen() -> None:
    """Known sizes, those between them, and those beyond, where costs grow as they grew in the second half."""
    table = seen({1: 0.06, 2: 0.07, 4: 0.09, 8: 0.13})
    expected = {1: 0.06, 2: 0.07, 3: 0.08, 4: 0.09, 6: 0.11, 8: 0.13, 12: 0.17}
    assert {size: table.expect(ALONE, size) for size in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("flat", "expected"), [(True, 0.04), (False, 0.01)])
def test_one_size_alone_stands_for_others(flat: bool, expected: float) -> None:
    """Passes over fewer tokens cost the same, and drafts in proportion."""
    assert seen({4: 0.04}, num=1, flat=flat).expect(ALONE, 1) == pytest.approx(expected)


def test_single_rounds_that_take_any_time_do_not_count() -> None:
    table, dice = CostTable(), random.Random(0)
    for _ in range(200):
        table.record(ALONE, 4, 0.05 * dice.uniform(0.98, 1.02) * (10 if dice.random() < 0.2 else 1))
    assert table.expect(ALONE, 4) == pytest.approx(0.05, rel=0.03)


@pytest.mark.parametrize("noise", [0.3, 0.8])
def test_noise_raises_no_size_that_is_not_used(noise: float) -> None:
    """Times are skewed, as on a busy machine: most are short, and some are much longer."""
    table, dice = seen({1: 0.05, 5: 0.1}), random.Random(1)
    for _ in range(3000):
        table.record(ALONE, 1, 0.05 * (1 + noise * dice.expovariate(1.0)))
    assert 0.1 <= table.expect(ALONE, 5) <= 0.1 * (1 + noise)


def shape(num_tokens: int) -> float:
    return 0.05 + 0.002 * num_tokens


@pytest.mark.parametrize("factor", [0.3, 3.0, 30.0])
def test_where_everything_takes_longer_sizes_that_are_not_used_follow(factor: float) -> None:
    """So often in a row it is no chance; once less it might be."""
    table = seen({size: shape(size) for size in (1, 5, 9)}, num=LATEST)
    for _ in range(CLEAR - 1):
        table.record(ALONE, 5, factor * shape(5))
    assert table.expect(ALONE, 9) == pytest.approx(shape(9), rel=0.3)
    for _ in range(3):
        table.record(ALONE, 5, factor * shape(5))
    assert {each: table.expect(ALONE, each) for each in (1, 5, 9)} == pytest.approx(
        {each: factor * shape(each) for each in (1, 5, 9)}, rel=0.2
    )


def limited(num_tokens: int) -> float:
    return 0.01 * num_tokens


@pytest.mark.parametrize("then", [shape, limited])
def test_behind_a_change_what_is_seen_anew_counts_alone(then: Callable[[int], float]) -> None:
    """Costs have another form since: with two sizes seen, others follow from these."""
    table = seen(dict.fromkeys((1, 5, 9), 0.001), num=LATEST)
    for size in (9, 1):
        for _ in range(CLEAR + 1):
            table.record(ALONE, size, then(size))
    assert {each: table.expect(ALONE, each) for each in (1, 5, 9, 12)} == pytest.approx(
        {each: then(each) for each in (1, 5, 9, 12)}, rel=0.1
    )


def test_what_is_old_and_far_from_what_is_seen_now_does_not_count() -> None:
    for now, expected in ((LATEST + 1, 0.1), (LATEST + LONG + 1, 0.05)):
        curve = Curve()
        for earlier in range(LATEST):
            curve.record(5, 0.1, earlier)
        curve.record(5, 0.05, now)
        assert curve.expect(5) == pytest.approx(expected)


def test_a_kind_that_was_not_seen_begins_as_the_most_similar_one() -> None:
    table = CostTable()
    for rows, taken_s in ((1, 0.1), (32, 0.4)):
        for _ in range(KNOWN):
            table.record(Kind.of(rows), rows, taken_s)
    assert table.expect(Kind.of(2), 2) == pytest.approx(0.1)
    table.record(Kind.of(24), 24, 0.3)
    assert table.expect(Kind.of(24), 24) < 0.4
    assert table.expect(Kind.of(32), 32) == pytest.approx(0.4), "the kind it began as is left as it was"


@contextmanager
def interrupt_at(number: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at this line of those that are run in costs.py, counted from 0."""
    left = number

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename.endswith("control/costs.py"):
            left -= event == "line"
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("taken_s", [0.07, 0.7])
def test_an_interrupt_anywhere_leaves_costs_that_can_be_used(taken_s: float) -> None:
    """Also in the round in which the level changes."""
    for number in itertools.count():
        table = seen({size: shape(size) for size in (1, 5, 9)}, num=LATEST)
        for _ in range(CLEAR - 1):
            table.record(ALONE, 5, taken_s)
        try:
            with interrupt_at(number):
                table.record(ALONE, 5, taken_s)
                table.expect(ALONE, 7)
        except KeyboardInterrupt:
            expected = [table.expect(ALONE, size) for size in (1, 5, 7, 9, 20)]
            assert expected == sorted(expected)
            table.record(ALONE, 2, taken_s)
            table.record(ALONE, 5, taken_s)
            assert 0 < table.expect(ALONE, 5) < 10
        else:
            break
    assert number > 20, "there were lines to be interrupted at"


@given(st.lists(st.floats(0.0, 1.0)), st.data())
def test_values_that_are_monotone_already_stay(values: list[float], data: st.DataObject) -> None:
    """The law on which `Curve.fit` relies where it leaves them alone."""
    values.sort()
    assert rising(values, data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))) == values
