"""The measured depth in recorded rounds: noise as machines make it, and texts as different as they are."""

import statistics

import pytest

from control.recorded import CASES, score

SEEDS = range(3)
TEXTS = 8  # seeds for a row alone, whose texts decide much: among them are some a fifth better or worse than most


@pytest.mark.short("model quiet, 4 rows", "ngram noisy, 1 rows")
@pytest.mark.parametrize("case", CASES)
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(case: str) -> None:
    assert min(score(case, seed, wrong=True) for seed in SEEDS) >= 0.97


@pytest.mark.short("model quiet, 4 rows", "ngram noisy, 1 rows")
@pytest.mark.parametrize("case", CASES)
def test_it_is_about_as_good_as_the_best_fixed_depth(case: str) -> None:
    """The best fixed depth is found afterwards, on the same texts. In a busy moment more is lost, as RESULTS say."""
    seeds = range(TEXTS) if case.endswith(" 1 rows") else SEEDS
    assert statistics.mean(score(case, seed) for seed in seeds) >= (0.92 if "quiet" in case else 0.87)
