"""The chi-square test: against closed forms, identities and its own distribution."""

import math

import pytest
import torch

from forerun.prove.chi_square import LEVEL, chi_square, critical_value, holm, smallest_bias, upper_tail


@pytest.mark.parametrize("statistic", [0.0, 0.3, 2.0, 17.0, 300.0])
def test_tails_have_their_closed_forms(statistic: float) -> None:
    """For even degrees of freedom the tail is a Poisson sum; for one it is that of a normal."""
    half = statistic / 2
    assert upper_tail(statistic, 1) == pytest.approx(math.erfc(math.sqrt(half)), rel=1e-10)
    for freedom in (2, 4, 10, 200):
        terms = [
            math.exp(-half + i * math.log(half) - math.lgamma(i + 1)) if half else float(i == 0)
            for i in range(freedom // 2)
        ]
        assert upper_tail(statistic, freedom) == pytest.approx(math.fsum(terms), rel=1e-9, abs=1e-300)


def test_the_statistic() -> None:
    found = chi_square([8, 12, 40], [10.0, 10.0, 40.0])
    assert found.statistic == pytest.approx(0.8)
    assert found.freedom == 2
    assert found.p_value == pytest.approx(math.exp(-0.4))


@pytest.mark.parametrize("freedom", [1, 15, 199])
def test_the_critical_value_is_where_the_tail_is(freedom: int) -> None:
    for level in (0.5, 1e-3, 1e-7):
        assert upper_tail(critical_value(level, freedom), freedom) == pytest.approx(level, rel=1e-6)


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert min(holm([2e-4, 0.5, 0.7])) == pytest.approx(6e-4)


def test_a_bias_of_the_size_that_is_claimed_is_found() -> None:
    """Multinomial counts under a law that is off by just that much: about 95 of 100 are rejected."""
    cells, num_samples, num_tests = 30, 2000, 3
    bias = smallest_bias(cells - 1, num_samples, num_tests)
    p = torch.full((cells,), 1 / cells, dtype=torch.float64)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(cells // 2)
    generator = torch.Generator().manual_seed(1)
    rejected = 0
    for _ in range(400):
        drawn = torch.multinomial(p * (1 + bias * sign), num_samples, replacement=True, generator=generator)
        counts = torch.bincount(drawn, minlength=cells).tolist()
        rejected += chi_square(counts, (num_samples * p).tolist()).p_value < LEVEL / num_tests
    assert 0.91 < rejected / 400 < 0.985
