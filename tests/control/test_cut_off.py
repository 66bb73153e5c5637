"""`CutOff` in simulated rounds of a drafter that estimates the acceptance of each token when it draws it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from control.worlds import AMPLE, AUTO_SPECULATION
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.control.controller import Load
from forerun.control.drafters import CutOff
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Draft, Outlook
from forerun.tree import DraftTree


@dataclass(frozen=True)
class TokenKinds:
    """Rounds of a lone row in which each draft token is of a random kind.

    A draft token of the i-th kind is accepted with probability `rates[i]`, which the drafter estimates as
    `estimates[i]`. Drawing it takes `draw_s`, and it makes the target's pass longer by `draft_token_s`.
    """

    rates: Sequence[float]
    estimates: Sequence[float]
    draw_s: float = 0.004
    draft_token_s: float = 0.02
    pass_s: float = 0.1

    def chain(self, dice: random.Random, depth: int, min_survival: float) -> tuple[list[float], int, float]:
        """Draft a chain: returns its estimated survival by depth, its accepted tokens, and the seconds of drawing."""
        survival, num_accepted, all_accepted, reached = [], 0, True, 1.0
        for num_drawn in range(1, depth + 1):
            kind = dice.randrange(len(self.rates))
            luck = dice.random()
            reached *= self.estimates[kind]
            if reached < min_survival:
                return survival, num_accepted, num_drawn * self.draw_s
            survival.append(reached)
            all_accepted = all_accepted and luck < self.rates[kind]
            num_accepted += all_accepted
        return survival, num_accepted, depth * self.draw_s

    def round_s(self, num_draft_tokens: int, drawing_s: float) -> float:
        return self.pass_s + self.draft_token_s * num_draft_tokens + drawing_s

    def fixed_speed(self, depth: int, min_survival: float = 0.0, count: int = 3000) -> float:
        """Tokens per second if every round has this depth and minimum survival."""
        dice, tokens, taken_s = random.Random(1), 0, 0.0
        for _ in range(count):
            survival, num_accepted, drawing_s = self.chain(dice, depth, min_survival)
            tokens, taken_s = tokens + 1 + num_accepted, taken_s + self.round_s(len(survival), drawing_s)
        return tokens / taken_s

    def best_fixed_speed(self) -> float:
        """Tokens per second with the best fixed depth, without a minimum survival."""
        return max(self.fixed_speed(depth) for depth in range(9))

    def speed(self, controller: MeasuredDepth, count: int) -> float:
        """Tokens per second under a controller in the second half of `count` rounds; times have noise of 5 %."""
        dice, tokens, taken_s = random.Random(2), 0, 0.0
        load = Load([0], [AUTO_SPECULATION], [AMPLE], 0)
        for number in range(count):
            outlook = Outlook([0], [AMPLE], ends_early=True)
            (budget,) = controller.budgets(load, outlook, Spare({0: AMPLE}, AMPLE, 16))
            survival, num_accepted, drawing_s = self.chain(dice, budget.depth, budget.min_survival)
            num_drafted = len(survival)
            tree = DraftTree.of_texts([[0] * (1 + num_drafted)])
            controller.admit(Draft(tree, torch.tensor([[1.0, *survival]])), load)
            row = RowOutcome(0, num_drafted, min(num_drafted, num_accepted + 1), num_accepted, num_accepted + 1)
            pass_s = self.round_s(num_drafted, 0.0)
            noise = dice.uniform(0.95, 1.05)
            controller.record(Outcome([row], 0, noise * drawing_s, noise * pass_s))
            if number >= count // 2:
                tokens += row.num_emitted
                taken_s += drawing_s + pass_s
        return tokens / taken_s


EXACT = TokenKinds((0.97, 0.2), estimates=(0.97, 0.2))


def test_ending_chains_before_unlikely_tokens_is_faster_than_any_fixed_depth() -> None:
    """With exact estimates the controller reaches 95 % of the best combination of depth and minimum survival."""
    best = max(EXACT.fixed_speed(depth, least) for depth in (4, 8, 16) for least in (0.1, 0.2, 0.3, 0.4, 0.5))
    assert best > 1.1 * EXACT.best_fixed_speed()
    assert EXACT.speed(MeasuredDepth(), 4000) > 0.95 * best


@pytest.mark.short("estimates1-0.97")
@pytest.mark.parametrize(
    ("estimates", "least"), [((0.6, 0.02), 1.05), ((0.5, 0.5), 0.97), ((0.3, 0.3), 0.96), ((0.05, 0.9), 0.93)]
)
def test_cutting_by_wrong_estimates_costs_at_most_7_percent(estimates: Sequence[float], least: float) -> None:
    """Compared with the same chains without cuts, if estimates are too low, equal for all kinds, or inverted.

    Estimates that are too low but in the right order even make it faster.
    """
    uncut = TokenKinds((0.97, 0.2), estimates=(1.0, 1.0)).speed(MeasuredDepth(), 2000)
    assert TokenKinds((0.97, 0.2), estimates).speed(MeasuredDepth(), 2000) > least * uncut


def test_chains_in_a_batch_are_not_cut() -> None:
    """A controller that has learned a minimum survival from a lone row sets none for two rows."""
    controller, ids = MeasuredDepth(), [0, 1]
    EXACT.speed(controller, 1000)
    assert controller.drafters.all[0].cut_off.min_survival > 0.1
    outlook = Outlook([0, 0], [AMPLE] * 2, ends_early=True)
    load = Load(ids, [AUTO_SPECULATION] * 2, [AMPLE] * 2, 0)
    budgets = controller.budgets(load, outlook, Spare(dict.fromkeys(ids, AMPLE), AMPLE, 16))
    assert {budget.min_survival for budget in budgets} == {0.0}


def test_a_chain_of_a_fixed_depth_is_not_cut() -> None:
    """A controller that has learned a minimum survival sets none for a request that fixes its depth."""
    controller, load = MeasuredDepth(), Load([0], [Speculation(4)], [AMPLE], 0)
    EXACT.speed(controller, 1000)
    assert controller.drafters.all[0].cut_off.min_survival > 0.1
    outlook = Outlook([0], [AMPLE], ends_early=True)
    (budget,) = controller.budgets(load, outlook, Spare({0: AMPLE}, AMPLE, 16))
    assert (budget.depth, budget.min_survival) == (4, 0.0)


def test_the_minimum_survival_is_lower_if_tokens_estimated_as_unlikely_are_accepted() -> None:
    """After 200 tokens with an estimate of 0.2, all rejected or all accepted; 0.2 / 5 corrects for the latter."""
    min_survivals = []
    for num_accepted in (0, 1):
        cut_off = CutOff()
        for _ in range(200):
            cut_off.learn([0.2], 1, num_accepted)
        cut_off.aim(10.0, 0.02)
        min_survivals.append(cut_off.min_survival)
    assert min_survivals[0] > 4 * min_survivals[1]
    assert min_survivals[1] == pytest.approx(0.2 / 5, rel=0.2)
