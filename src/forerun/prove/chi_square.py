"""Pearson's chi-square test, its power, and Holm's correction for several tests. `cells.py` chooses the cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LEVEL = 1e-3  # significance level of a run, over all tests together
POWER_Z = 1.645  # power of 95 %


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """Pearson's statistic, its degrees of freedom, and the p-value."""

    statistic: float
    freedom: int
    p_value: float


def chi_square(seen: Sequence[int], expected: Sequence[float]) -> ChiSquare:
    """Test counts against positive expected counts with the same total."""
    assert len(seen) == len(expected) > 1, f"{len(seen)} counts for {len(expected)} cells: a test needs two or more"
    statistic = sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
    freedom = len(seen) - 1
    return ChiSquare(statistic, freedom, upper_tail(statistic, freedom))


def upper_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with these degrees of freedom exceeds `statistic`)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values with Holm's correction for the number of tests."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return adjusted


def smallest_bias(freedom: int, num_samples: int, num_tests: int, power_z: float = POWER_Z) -> float:
    """The relative error of probabilities (root mean square) that 95 of 100 runs would detect.

    A law p' instead of p shifts the statistic by N sum (p' - p)^2 / p; the shift must exceed the critical value by
    `power_z` standard deviations, in the normal approximation.
    """
    critical = critical_value(LEVEL / num_tests, freedom)
    # freedom + shift - z sqrt(2 (freedom + 2 shift)) = critical, a quadratic in the root
    root = power_z + math.sqrt(power_z**2 + critical - freedom / 2)
    shift = (2 * root**2 - freedom) / 2
    return math.sqrt(max(0.0, shift) / num_samples)


def critical_value(level: float, freedom: int) -> float:
    """The value that the statistic exceeds with probability `level`, by bisection."""
    low, high = 0.0, freedom + 100.0 * math.sqrt(freedom) - 10 * math.log(level)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, freedom) > level else (low, middle)
    return high
