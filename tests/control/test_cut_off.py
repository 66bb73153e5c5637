"""Cut-offs in simulated rounds of a drafter that says, guess by guess, how sure it is."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from control.worlds import AMPLE, AUTO_WISH
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.control.controller import Load
from forerun.control.drafters import CutOff
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Draft, Outlook
from forerun.tree import DraftTree


@dataclass(frozen=True)
class Sure:
    """Guesses are accepted with one of some chances, drawn for each anew; `told` is what the drafter says of each."""

    chances: Sequence[float]
    told: Sequence[float]
    draw_s: float = 0.004
    guess_s: float = 0.02
    pass_s: float = 0.1

    def chain(self, dice: random.Random, depth: int, price: float) -> tuple[list[float], int, float]:
        """Survival of the guesses that are made, how many are accepted, and what drawing took."""
        survival, accepted, right, reached = [], 0, True, 1.0
        for drawn in range(1, depth + 1):
            kind = dice.randrange(len(self.chances))
            luck = dice.random()
            reached *= self.told[kind]
            if reached < price:
                return survival, accepted, drawn * self.draw_s
            survival.append(reached)
            right = right and luck < self.chances[kind]
            accepted += right
        return survival, accepted, depth * self.draw_s

    def round_s(self, num_guesses: int, drawing_s: float) -> float:
        return self.pass_s + self.guess_s * num_guesses + drawing_s

    def speed(self, depth: int, price: float = 0.0, count: int = 3000) -> float:
        """Tokens per second of a fixed depth and price."""
        dice, tokens, taken_s = random.Random(1), 0, 0.0
        for _ in range(count):
            survival, accepted, drawing_s = self.chain(dice, depth, price)
            tokens, taken_s = tokens + 1 + accepted, taken_s + self.round_s(len(survival), drawing_s)
        return tokens / taken_s

    def played(self, controller: MeasuredDepth, count: int, batch: int = 1, wish: Speculation = AUTO_WISH) -> float:
        """Tokens per second under a controller, from half of so many rounds on; times are off by up to 5 %."""
        dice, tokens, taken_s = random.Random(2), 0, 0.0
        ids = list(range(batch))
        for number in range(count):
            load = Load(ids, [wish] * batch, [AMPLE] * batch, 0)
            outlook = Outlook([0] * batch, [AMPLE] * batch, ends_early=True)
            budgets = controller.budgets(load, outlook, Spare(dict.fromkeys(ids, AMPLE), AMPLE, 16))
            chains = [self.chain(dice, budget.depth, budget.min_survival) for budget in budgets]
            nodes = 1 + max(len(survival) for survival, _, _ in chains)
            told = [[1.0, *survival, *[0.0] * (nodes - 1 - len(survival))] for survival, _, _ in chains]
            tree = DraftTree.of_texts([[0] * (1 + len(survival)) for survival, _, _ in chains])
            controller.admit(Draft(tree, torch.tensor(told)), load)
            rows = [
                RowOutcome(i, len(own), min(len(own), accepted + 1), accepted, accepted + 1)
                for i, (own, accepted, _) in zip(ids, chains, strict=True)
            ]
            draft_s = max(drawing_s for _, _, drawing_s in chains)
            pass_s = self.round_s(sum(len(own) for own, _, _ in chains) + batch - 1, 0.0)
            noise = dice.uniform(0.95, 1.05)
            controller.record(Outcome(rows, 0, noise * draft_s, noise * pass_s))
            if number >= count // 2:
                tokens += sum(row.num_emitted for row in rows)
                taken_s += draft_s + pass_s
        return tokens / taken_s


SURE = Sure((0.97, 0.2), told=(0.97, 0.2))


def best_depth(world: Sure) -> float:
    return max(world.speed(depth) for depth in range(9))


def test_chains_that_end_before_unlikely_guesses_are_better_than_any_fixed_depth() -> None:
    best = max(SURE.speed(depth, price) for depth in (4, 8, 16) for price in (0.1, 0.2, 0.3, 0.4, 0.5))
    assert best > 1.1 * best_depth(SURE)
    assert SURE.played(MeasuredDepth(), 4000) > 0.95 * best


@pytest.mark.short("told1-0.97")
@pytest.mark.parametrize(
    ("told", "least"), [((0.6, 0.02), 1.05), ((0.5, 0.5), 0.97), ((0.3, 0.3), 0.96), ((0.05, 0.9), 0.93)]
)
def test_estimates_that_are_wrong_cost_next_to_nothing(told: Sequence[float], least: float) -> None:
    """Too low, the same for all, low for all, upside down, beside chains of the same guesses that are never cut."""
    uncut = Sure((0.97, 0.2), told=(1.0, 1.0)).played(MeasuredDepth(), 2000)
    assert Sure((0.97, 0.2), told).played(MeasuredDepth(), 2000) > least * uncut


def test_rows_among_others_are_never_cut() -> None:
    controller, ids = MeasuredDepth(), [0, 1]
    SURE.played(controller, 1000)
    assert controller.drafters.all[0].cut_off.min_survival > 0.1
    outlook = Outlook([0, 0], [AMPLE] * 2, ends_early=True)
    load = Load(ids, [AUTO_WISH] * 2, [AMPLE] * 2, 0)
    found = controller.budgets(load, outlook, Spare(dict.fromkeys(ids, AMPLE), AMPLE, 16))
    assert {budget.min_survival for budget in found} == {0.0}


def test_a_fixed_depth_is_never_cut() -> None:
    controller, load = MeasuredDepth(), Load([0], [Speculation(4)], [AMPLE], 0)
    SURE.played(controller, 1000)
    assert controller.drafters.all[0].cut_off.min_survival > 0.1
    outlook = Outlook([0], [AMPLE], ends_early=True)
    (budget,) = controller.budgets(load, outlook, Spare({0: AMPLE}, AMPLE, 16))
    assert (budget.depth, budget.min_survival) == (4, 0.0)


def test_a_modest_drafter_is_cut_later() -> None:
    """The price falls as guesses that were held unlikely are accepted."""
    prices = []
    for accepted in (0, 1):
        cut_off = CutOff()
        for _ in range(200):
            cut_off.learn([0.2], 1, accepted)
        cut_off.aim(10.0, 0.02)
        prices.append(cut_off.min_survival)
    assert prices[0] > 4 * prices[1]
    assert prices[1] == pytest.approx(0.2 / 5, rel=0.2)
