"""Lengths in simulated rounds of known prices."""

import random
import statistics
from collections.abc import Sequence

import pytest

from forerun.draft.many.cascade import FIRST, MeasuredLengths, RoundTiming
from forerun.economy import MOST, best_depth, cost_per_token


def simulated(
    lengths: MeasuredLengths, rounds: int, chance: float, prices: tuple[float, float, float], batch: int = 1
) -> Sequence[Sequence[int]]:
    """Rounds in which each guess is accepted at a rate and everything has its price; the lengths of all rounds."""
    dice, (guess_s, pass_s, token_s), found = random.Random(3), prices, []
    for _ in range(rounds):
        found.append(lengths.best(range(batch), [MOST] * batch))
        (length, *others) = found[-1]
        assert len(others) == batch - 1
        cut = [dice.randint(0, length) for _ in range(batch)]  # as where chains end
        runs = []
        for num in cut:
            run = next((i for i in range(num) if dice.random() >= chance), num)
            runs.append((num, run))
        noise = dice.uniform(0.9, 1.1)
        num_tokens = sum(cut) + batch
        lengths.count(range(batch), runs)
        lengths.time(
            RoundTiming(max(cut), max(cut) * guess_s * noise, num_tokens, (pass_s + token_s * num_tokens) * noise)
        )
    return [*found, lengths.best(range(batch), [MOST] * batch)]


@pytest.mark.short("prices0-0.3-1", "prices0-0.9-4", "prices1-0.6-4", "prices2-0.8-1", "prices3-0.9-1")
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("prices", [(0.01, 0.1, 0.0), (0.03, 0.1, 0.002), (0.001, 0.1, 0.02), (0.2, 0.1, 0.0)])
def test_measured_lengths_cost_hardly_more_than_the_best(
    batch: int, chance: float, prices: tuple[float, float, float]
) -> None:
    found = simulated(MeasuredLengths(), 600, chance, prices, batch)
    guess_s, pass_s, token_s = prices
    chances = [chance] * MOST

    def round_s(k: int) -> float:
        return pass_s + token_s * batch * (k + 1) + guess_s * k

    best = best_depth(chances, round_s)
    costs = [cost_per_token(length, chances, round_s) for own in found[-200:] for length in own]
    assert statistics.mean(costs) <= 1.1 * cost_per_token(best, chances, round_s), (found[-200:], best)


def test_what_was_given_up_is_tried_again() -> None:
    lengths = MeasuredLengths()
    prices = (0.05, 0.1, 0.0)
    assert simulated(lengths, 200, 0.02, prices)[-1][0] <= 1
    assert simulated(lengths, 600, 0.95, prices)[-1][0] >= 4


def test_before_anything_was_measured() -> None:
    lengths = MeasuredLengths()
    assert lengths.best(range(3), [MOST, MOST, 2]) == [FIRST, FIRST, 2]
    lengths.time(RoundTiming(0, 0.0, 3, 0.1))
    assert lengths.best(range(3), [MOST, MOST, 2]) == [FIRST, FIRST, 2]
    assert len(lengths.together.rates()) == MOST


def test_no_more_is_asked_for_than_is_of_use() -> None:
    lengths = MeasuredLengths()
    assert simulated(lengths, 100, 0.9, (0.01, 0.1, 0.0))[-1][0] > 4
    assert [lengths.best([0], [most])[0] for most in range(4)] == [0, 1, 2, 3]


def test_each_sequence_is_asked_for_what_its_own_guesses_are_worth() -> None:
    """Side by side, one whose guesses are right and one whose guesses are not; a third is new, and like both."""
    lengths, dice = MeasuredLengths(), random.Random(1)
    for _ in range(60):
        asked = lengths.best([0, 1], [MOST, MOST])
        runs = []
        for num, chance in zip(asked, (0.95, 0.05), strict=True):
            runs.append((num, next((i for i in range(num) if dice.random() >= chance), num)))
        lengths.count([0, 1], runs)
        lengths.time(RoundTiming(max(asked), 0.03 * max(asked), sum(asked) + 2, 0.1))
    good, bad, new = lengths.best([0, 1, 2], [MOST] * 3)
    assert bad <= 1
    assert bad <= new <= good
    assert good >= 6
    lengths.forget([1])
    assert lengths.best([1], [MOST])[0] == new


def test_the_judge_goes_on_alone_where_that_costs_less() -> None:
    """A chain in one call may cost less a token than a round without guesses; then rounds have to beat that."""
    lengths = MeasuredLengths()
    for _ in range(50):
        lengths.count([0], [(1, 0 if _ % 2 else 1)])
        lengths.time(RoundTiming(1, 0.04, 2, 0.1))
    assert lengths.best([0], [MOST])[0] >= 1  # 0.14 for 1.5 tokens
    for _ in range(3):
        lengths.went_alone([0], 10, 0.8)
    assert lengths.best([0], [MOST])[0] == 0
