"""A mix that chooses its arms by what earlier rounds gave keeps the exact law, sampled with keyed noise.

An arm that is chosen by what it has drawn is the mutant, and must fail.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from sampler import drafted, first_pairs
from torch import Tensor

from forerun.config import Verification
from forerun.draft.base import Budget, Committed, Draft
from forerun.draft.many.mix import MixDrafter
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree
from kit.drafters import Stateless

VOCAB, MERGED = 3, 2
P = [0.16, 0.44, 0.40]
HIGH = torch.tensor([0.04, 0.25, 0.71]).log().expand(VOCAB, VOCAB)
LOW = torch.tensor([0.6, 0.3, 0.1]).log().expand(VOCAB, VOCAB)


class Table(Stateless):
    """A model that is a table of logits; it is as sure of each guess as the table."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        tree = drafted(draws, self.logits, 2)
        chances = self.logits[0].exp()[tree.tokens]
        survival = torch.cat([torch.ones(len(chances), 1), chances[:, 1:].cumprod(1)], dim=1)
        return Draft(tree, survival)


class Peeking(MixDrafter):
    """The mutant: both members draft, and the one whose first guess is the larger token is taken, with its law."""

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        each = [super(Peeking, self).propose(draws, [replace(b, drafter=arm) for b in budgets]) for arm in range(2)]
        first, second = (draft.tree.tokens[:, 1] for draft in each)
        arms = (second > first).long().tolist()
        return super().propose(draws, [replace(b, drafter=arm) for b, arm in zip(budgets, arms, strict=True)])


def bias(mix: MixDrafter, rule: Verification, arms: Sequence[int]) -> float:
    """P-value of what is said where a row's arm hangs on what it has said before the round."""

    def propose(draws: Draws, gained: list[list[int]]) -> DraftTree:
        taken = [arms[(i + sum(text)) % len(arms)] for i, text in enumerate(gained)]
        return mix.propose(
            draws, [Budget(2, 2, 3, arm) if arm == MERGED else Budget(2, drafter=arm) for arm in taken]
        ).tree

    return first_pairs(P, rule, propose)


MEMBERS = [Table(LOW), Table(HIGH)], ["low", "high"]


@pytest.mark.short("token-(2,)")
@pytest.mark.parametrize("arms", [(0, 1), (MERGED,), (0, 1, MERGED)], ids=str)
@pytest.mark.parametrize("rule", ["coupled", "token", "block"])
def test_arms_that_follow_from_the_past(rule: Verification, arms: tuple[int, ...]) -> None:
    assert bias(MixDrafter(*MEMBERS), rule, arms) > 1e-4


@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_arm_that_was_chosen_by_what_it_drew_is_noticed(rule: Verification) -> None:
    assert bias(Peeking(*MEMBERS), rule, (0,)) < 1e-6
