"""Wrong shapes are noticed at the first calls of every test, and among many calls before long.

Functions without shapes are not looked at while they run: mypy has checked their calls.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from forerun.sampling.noise import uniform
from kit.unchecked import unchecked
from shape_checks import EVERY, FIRST, checked_now_and_then, next_test

FLAT, SQUARE = torch.zeros(2, 3), torch.zeros(2, 2)


@checked_now_and_then
def square(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    return matrix


@checked_now_and_then
@dataclass(frozen=True, slots=True)
class Pair:
    left: Float[Tensor, " n"]
    right: Float[Tensor, " n"]


@checked_now_and_then
def total(numbers: Sequence[int], matrix: Float[Tensor, "rows columns"]) -> int:
    return sum(numbers)


@checked_now_and_then
def longer(text: str, count: int, unit: Literal["letters", "words"] = "letters") -> str:
    return text * count


@checked_now_and_then
@dataclass
class Plain:
    number: int


@checked_now_and_then
def summed(row: "Row") -> float:
    return float(row.sum())


Row = Float[Tensor, " n"]


@checked_now_and_then
def first(row: Float[Tensor, " n"], count: int) -> Float[Tensor, " {count}"]:
    return row[:count]


@checked_now_and_then
def doubled(row: Float[Tensor, " n"], times: int, wrong: int = 0) -> Float[Tensor, " n"]:
    """Twice as many numbers in every inner call."""
    inner = doubled(torch.cat([row, row]), times - 1, wrong) if times else row
    return inner[: len(row) + (wrong if times == 1 else 0)]


def test_the_package_is_checked() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        uniform(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    with unchecked(), pytest.raises(RuntimeError):
        uniform(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))


def test_dataclasses_are_checked_where_they_are_made() -> None:
    Pair(FLAT[0], FLAT[1])
    with pytest.raises(BeartypeCallHintViolation):
        Pair(FLAT[0], SQUARE[0])


def test_a_letter_is_one_number_in_a_call_and_another_in_the_next() -> None:
    assert len(doubled(FLAT[0], 2)) == 3
    next_test()
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        doubled(FLAT[0], 2, wrong=1)


def test_a_number_may_be_an_argument() -> None:
    assert first(FLAT[0], 2).shape == (2,)
    with pytest.raises(TypeCheckError):
        first(FLAT[0], 4)


def test_other_types_in_a_checked_signature_are_checked_and_the_random_state_stays() -> None:
    """Of a collection one item is checked, which is chosen at random."""
    before = random.getstate()
    assert total([1, 2, 3], FLAT) == 6
    assert random.getstate() == before
    with pytest.raises(BeartypeCallHintViolation):
        total(["a"], FLAT)


def test_functions_without_shapes_are_left_as_they_are() -> None:
    """A name that is defined later may stand for a shape, which shows in the first call."""
    assert not hasattr(longer, "__wrapped__")
    assert not hasattr(vars(Plain)["__init__"], "__wrapped__")
    assert hasattr(square, "__wrapped__")
    with pytest.raises(BeartypeCallHintViolation):
        summed(SQUARE)
    assert summed(FLAT[0]) == 0


def test_the_first_calls_are_all_checked_and_later_ones_now_and_then() -> None:
    for _ in range(2):
        next_test()
        assert [noticed(FLAT) for _ in range(FIRST)] == [True] * FIRST
        assert sum(noticed(FLAT) for _ in range(10 * EVERY)) == 10


def noticed(matrix: Tensor) -> bool:
    """Whether the next call of `square` with this is checked."""
    try:
        square(matrix)
    except BeartypeCallHintViolation:
        return True
    return False
