"""`DepthRule`: a lone row whose drafter estimates each draft gets its depth from these estimates alone."""

import itertools
import operator
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.worlds import AMPLE, AUTO_SPECULATION
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import AUTO_DEPTH
from forerun.control.choices import DepthRule
from forerun.control.controller import Load
from forerun.control.drafters import MeasuredDrafter
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Outlook

SPARE = Spare({0: AMPLE}, AMPLE, 16)
STEPS_S = st.lists(st.floats(0.0, 0.5), min_size=1, max_size=AUTO_DEPTH)  # that each depth adds to a round of 1 s
RATES = st.lists(st.floats(0.0, 1.0), max_size=AUTO_DEPTH)


def speed(round_s: Sequence[float], survival: Sequence[float], depth: int) -> float:
    return (1 + sum(survival[:depth])) / round_s[depth]


@given(STEPS_S, RATES, st.floats(0.0, 0.2))
def test_the_depth_has_the_highest_expected_speed(steps_s: list[float], rates: list[float], favor: float) -> None:
    """Compared with all depths; leaving out draft tokens below the minimum survival does not lower the speed."""
    round_s = list(itertools.accumulate(steps_s, initial=1.0))
    survival = list(itertools.accumulate(rates, operator.mul))[: len(steps_s)]
    rule = DepthRule(round_s, favor)
    speeds = [speed(round_s, survival, depth) for depth in range(1 + len(survival))]
    depth = rule.depth(survival)
    assert speeds[depth] * (1 + favor * (depth == 0)) == pytest.approx(max([speeds[0] * (1 + favor), *speeds[1:]]))
    likely = [each for each in survival if each >= rule.min_survival]
    assert speed(round_s, survival, rule.depth(likely)) * (1 + favor) >= max(speeds) * (1 - 1e-9)


class VaryingRates:
    """Rounds of a lone row that each have one of `rates` as the acceptance rate at every depth, at random.

    The drafter estimates the survival in each round as `estimated_share` of the true one, or of one with the rate
    `estimated_rate`. Each draft token makes a round of 0.1 s longer by `draft_token_s`.
    """

    def __init__(
        self,
        rates: Sequence[float],
        draft_token_s: float,
        estimated_share: float = 1.0,
        estimated_rate: float | None = None,
    ) -> None:
        self.rates, self.draft_token_s = rates, draft_token_s
        self.estimated_share, self.estimated_rate = estimated_share, estimated_rate
        self.num_estimates = 0

    def round_s(self, depth: int) -> float:
        return 0.1 + self.draft_token_s * depth

    def survival(self, rate: float) -> list[float]:
        return [rate**depth for depth in range(1, AUTO_DEPTH + 1)]

    def best_speed(self) -> float:
        """Expected tokens per second if every round has the best depth for its acceptance rate."""
        all_s = [self.round_s(depth) for depth in range(1 + AUTO_DEPTH)]
        depths = [max(range(17), key=lambda d: speed(all_s, self.survival(rate), d)) for rate in self.rates]
        tokens = sum(1 + sum(self.survival(rate)[:depth]) for rate, depth in zip(self.rates, depths, strict=True))
        return tokens / sum(map(self.round_s, depths))

    def speed(self, controller: MeasuredDepth, count: int, seed: int) -> float:
        """Tokens per second under a controller in the second half of `count` rounds; times have noise of 5 %."""
        dice, tokens, taken_s = random.Random(seed), 0, 0.0
        load = Load([0], [AUTO_SPECULATION], [AMPLE], 0)
        for number in range(count):
            rate = dice.choice(self.rates)
            estimates = [self.estimated_share * each for each in self.survival(self.estimated_rate or rate)]

            def estimate(_row: int, _least: float, estimates: Sequence[float] = estimates) -> Sequence[float]:
                self.num_estimates += 1
                return estimates

            (budget,) = controller.budgets(load, Outlook([0], [AMPLE], estimate), SPARE)
            depth = sum(each >= budget.min_survival for each in estimates[: budget.depth])
            num_accepted = next((i for i in range(depth) if dice.random() >= rate), depth)
            round_s = self.round_s(depth)
            row = RowOutcome(0, depth, min(depth, num_accepted + 1), num_accepted, num_accepted + 1)
            controller.record(Outcome([row], 0, 1e-4, dice.uniform(0.95, 1.05) * round_s))
            if number >= count // 2:
                tokens, taken_s = tokens + num_accepted + 1, taken_s + round_s
        return tokens / taken_s


@pytest.mark.short("rates0-1.0", "rates3-0.6")
@pytest.mark.parametrize("estimated_share", [1.0, 0.6])
@pytest.mark.parametrize("rates", [(0.05, 0.5, 0.9), (0.1, 0.1, 0.1, 0.95), (0.7,), (0.3, 0.6)])
def test_rounds_of_varying_acceptance_reach_95_percent_of_the_best_speed(
    rates: Sequence[float], estimated_share: float
) -> None:
    """The best speed has the best depth in each round; the estimates are exact or too low. One is made per round."""
    world = VaryingRates(rates, 0.02, estimated_share)
    shares = [world.speed(MeasuredDepth(), 1600, seed) / world.best_speed() for seed in range(3)]
    assert sum(shares) / len(shares) > 0.95
    assert world.num_estimates <= 3 * 1600, "a round asks for more than one estimate"


def test_a_drafter_that_overestimates_rejected_tokens_slows_rounds_by_at_most_3_percent() -> None:
    """No draft token is accepted, but the drafter estimates an acceptance rate of 0.8; plain rounds take 0.1 s."""
    world = VaryingRates((0.0,), 0.02, estimated_rate=0.8)
    assert world.speed(MeasuredDepth(), 3000, 1) > 0.97 / 0.1


def test_a_rule_without_measurements_drafts_all_estimated_tokens() -> None:
    """Draft tokens count as free then, so the length of the drafter's estimate decides the depth."""
    search = MeasuredDepth(load=Load([0], [AUTO_SPECULATION], [AMPLE], 0)).search
    rule = search.rule(MeasuredDrafter(), AUTO_DEPTH)
    assert (rule.depth([]), rule.depth([0.5, 0.4])) == (0, 2)
    assert 0 < rule.min_survival < 0.4


def test_rounds_without_an_outlook_do_not_change_the_share_of_covered_rows() -> None:
    """While drafting is paused the drafter is not asked, so these rounds do not show whether it has draft tokens."""
    controller = MeasuredDepth()
    world = VaryingRates((0.9,), 0.02)
    world.speed(controller, 200, 0)
    controller.advice.off, controller.taken.assigned = True, {0: None}
    controller.taken.num_held = 0
    assert controller.taken.rule is not None
    before = controller.drafters.all[0].covered
    assert before == pytest.approx(1.0)
    load = Load([0], [AUTO_SPECULATION], [AMPLE], 0)
    while controller.skips(load):
        controller.record(Outcome([RowOutcome(0, 0, 0, 0, 1)], 0, 1e-4, 0.1))
    assert controller.drafters.all[0].covered == before
