"""A lone row whose drafter estimates each draft: between plans its depth follows from those estimates alone."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.worlds import AMPLE, AUTO_WISH
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import AUTO_DEPTH
from forerun.control.choices import DepthRule
from forerun.control.controller import Load
from forerun.control.drafters import MeasuredDrafter
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Outlook

SPARE = Spare({0: AMPLE}, AMPLE, 16)
STEPS = st.lists(st.floats(0.0, 0.5), min_size=1, max_size=AUTO_DEPTH)
CHANCES = st.lists(st.floats(0.0, 1.0), max_size=AUTO_DEPTH)


def speed(round_s: Sequence[float], survival: Sequence[float], depth: int) -> float:
    return (1 + sum(survival[:depth])) / round_s[depth]


@given(STEPS, CHANCES, st.floats(0.0, 0.2))
def test_the_depth_is_the_one_with_most_tokens_per_second(
    steps: list[float], chances: list[float], favor: float
) -> None:
    """By brute force over all depths; and nothing is lost by guesses that survive less than the minimum."""
    round_s = list(itertools.accumulate(steps, initial=1.0))
    survival = list(itertools.accumulate(chances, lambda one, other: one * other))[: len(steps)]
    rule = DepthRule(round_s, favor)
    speeds = [speed(round_s, survival, depth) for depth in range(1 + len(survival))]
    depth = rule.depth(survival)
    assert speeds[depth] * (1 + favor * (depth == 0)) == pytest.approx(max([speeds[0] * (1 + favor), *speeds[1:]]))
    kept = [chance for chance in survival if chance >= rule.min_survival]
    assert speed(round_s, survival, rule.depth(kept)) * (1 + favor) >= max(speeds) * (1 - 1e-9)


class Estimating:
    """Guesses of a round are right by one chance, which differs from round to round.

    The drafter knows it and tells the share `told` of it, or that it is `always` the same.
    """

    def __init__(self, chances: Sequence[float], row_s: float, told: float = 1.0, always: float | None = None) -> None:
        self.chances, self.row_s, self.told, self.always = chances, row_s, told, always
        self.num_estimates = 0

    def round_s(self, depth: int) -> float:
        return 0.1 + self.row_s * depth

    def survival(self, chance: float) -> list[float]:
        return [chance**depth for depth in range(1, AUTO_DEPTH + 1)]

    def best(self) -> float:
        """Tokens per second where every round has its best depth."""
        depths = [max(range(17), key=lambda d: speed(self.all_s, self.survival(c), d)) for c in self.chances]
        tokens = sum(1 + sum(self.survival(c)[:d]) for c, d in zip(self.chances, depths, strict=True))
        return tokens / sum(map(self.round_s, depths))

    @property
    def all_s(self) -> list[float]:
        return [self.round_s(depth) for depth in range(1 + AUTO_DEPTH)]

    def played(self, controller: MeasuredDepth, count: int, seed: int) -> float:
        """Tokens per second in the second half of so many rounds; times are off by up to 5 %."""
        dice, tokens, taken_s = random.Random(seed), 0, 0.0
        load = Load([0], [AUTO_WISH], [AMPLE], 0)
        for number in range(count):
            chance = dice.choice(self.chances)
            told = [self.told * each for each in self.survival(self.always or chance)]

            def estimate(_row: int, _least: float, told: Sequence[float] = told) -> Sequence[float]:
                self.num_estimates += 1
                return told

            (budget,) = controller.budgets(load, Outlook([0], [AMPLE], estimate, ends_early=True), SPARE)
            depth = sum(each >= budget.min_survival for each in told[: budget.depth])
            accepted = next((i for i in range(depth) if dice.random() >= chance), depth)
            round_s = self.round_s(depth)
            row = RowOutcome(0, depth, min(depth, accepted + 1), accepted, accepted + 1)
            controller.record(Outcome([row], 0, 1e-4, dice.uniform(0.95, 1.05) * round_s))
            if number >= count // 2:
                tokens, taken_s = tokens + accepted + 1, taken_s + round_s
        return tokens / taken_s


@pytest.mark.short("chances0-1.0", "chances3-0.6")
@pytest.mark.parametrize("told", [1.0, 0.6])
@pytest.mark.parametrize("chances", [(0.05, 0.5, 0.9), (0.1, 0.1, 0.1, 0.95), (0.7,), (0.3, 0.6)])
def test_each_round_is_drafted_as_far_as_its_own_guesses_pay(chances: Sequence[float], told: float) -> None:
    world = Estimating(chances, 0.02, told)
    shares = [world.played(MeasuredDepth(), 1600, seed) / world.best() for seed in range(3)]
    assert sum(shares) / len(shares) > 0.95
    assert world.num_estimates <= 3 * 1600, "no round asks for more than one estimate"


def test_guesses_that_never_come_true_cost_next_to_nothing() -> None:
    """Also those that are estimated to be likely."""
    world = Estimating((0.0,), 0.02, always=0.8)
    assert world.played(MeasuredDepth(), 3000, 1) > 0.97 / 0.1


def test_a_rule_needs_no_measurements() -> None:
    """Where nothing was measured all guesses are as good as free, and what the drafter tells decides."""
    weighing = MeasuredDepth(load=Load([0], [AUTO_WISH], [AMPLE], 0)).weighing
    rule = weighing.rule(MeasuredDrafter(), AUTO_DEPTH)
    assert (rule.depth([]), rule.depth([0.5, 0.4])) == (0, 2)
    assert 0 < rule.min_survival < 0.4


def test_rounds_in_which_nobody_is_asked_do_not_say_how_often_there_is_something_to_draft() -> None:
    controller = MeasuredDepth()
    world = Estimating((0.9,), 0.02)
    world.played(controller, 200, 0)
    controller.advice.off, controller.taken.assigned = True, {0: None}
    controller.taken.num_held = 0
    assert controller.taken.rule is not None
    before = controller.drafters.all[0].covered
    assert before == pytest.approx(1.0)
    load = Load([0], [AUTO_WISH], [AMPLE], 0)
    while controller.skips(load):
        controller.record(Outcome([RowOutcome(0, 0, 0, 0, 1)], 0, 1e-4, 0.1))
    assert controller.drafters.all[0].covered == before
