"""A mix that chooses its arms by what earlier rounds gave keeps the exact law, sampled with keyed noise.

An arm that is chosen by what it has drawn is the mutant, and must fail.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from sampler import chi_square, continued, drafted, emitted, sequences
from torch import Tensor

from forerun.config import Verification
from forerun.draft.base import Budget, Committed, Draft, Outlook
from forerun.draft.mix import MixDrafter
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.verify.verify import verify
from kit.unchecked import unchecked

VOCAB, COUNT, ROUNDS, MERGED = 3, 3_000, 2, 2
P = [0.16, 0.44, 0.40]
TARGET = torch.tensor(P).log().expand(VOCAB, VOCAB)
HIGH = torch.tensor([0.04, 0.25, 0.71]).log().expand(VOCAB, VOCAB)
LOW = torch.tensor([0.6, 0.3, 0.1]).log().expand(VOCAB, VOCAB)


class Table:
    """A model that is a table of logits; it is as sure of each guess as the table."""

    taps: tuple[int, ...] = ()
    arms: tuple[str, ...] = ("table",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def observe(self, news: Committed) -> None: ...

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        tree = drafted(draws, self.logits, 2)
        chances = self.logits[0].exp()[tree.tokens]
        survival = torch.cat([torch.ones(len(chances), 1), chances[:, 1:].cumprod(1)], dim=1)
        return Draft(tree, survival)

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook([0] * len(seq_ids), [99] * len(seq_ids))

    def forget(self, seq_ids: Sequence[int]) -> None: ...


class Peeking(MixDrafter):
    """The mutant: both members draft, and the one whose first guess is the larger token is taken, with its law."""

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        each = [super(Peeking, self).propose(draws, [replace(b, arm=arm) for b in budgets]) for arm in range(2)]
        first, second = (draft.tree.tokens[:, 1] for draft in each)
        arms = (second > first).long().tolist()
        return super().propose(draws, [replace(b, arm=arm) for b, arm in zip(budgets, arms, strict=True)])


def first_pairs(mix: MixDrafter, rule: Verification, arms: Sequence[int]) -> float:
    """P-value of the first two tokens of many sequences; a row's arm hangs on what it has said before the round."""
    rows = sequences(COUNT, SamplingParams(), 1, seed=2)
    gained: list[list[int]] = [[] for _ in rows]
    for _ in range(ROUNDS):
        taken = [arms[(i + sum(text)) % len(arms)] for i, text in enumerate(gained)]
        budgets = [Budget(2, 2, 3, arm) if arm == MERGED else Budget(2, arm=arm) for arm in taken]
        with unchecked():
            draws = Draws(rows, VOCAB, rejection=rule != "coupled")
            tree = mix.propose(draws, budgets).tree
            text = emitted(tree, verify(tree, TARGET[tree.tokens[tree.valid]], draws, rule))
        news = continued(text)
        gained = [old + new for old, new in zip(gained, news, strict=True)]
        rows = [replace(row, tokens=[*row.tokens, *new]) for row, new in zip(rows, news, strict=True)]
    counts = torch.bincount(torch.tensor([VOCAB * text[0] + text[1] for text in gained]), minlength=VOCAB**2)
    p = torch.tensor(P, dtype=torch.float64)
    return chi_square(counts.view(1, -1), COUNT * (p[:, None] * p).view(1, -1))


MEMBERS = [Table(LOW), Table(HIGH)], ["low", "high"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("arms", [(0, 1), (MERGED,), (0, 1, MERGED)], ids=str)
@pytest.mark.parametrize("rule", ["coupled", "token", "block"])
def test_arms_that_follow_from_the_past(rule: Verification, arms: tuple[int, ...]) -> None:
    assert first_pairs(MixDrafter(*MEMBERS), rule, arms) > 1e-4


@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_arm_that_was_chosen_by_what_it_drew_is_noticed(rule: Verification) -> None:
    assert first_pairs(Peeking(*MEMBERS), rule, (0,)) < 1e-6
