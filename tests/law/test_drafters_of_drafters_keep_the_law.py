"""Cascades and mixes keep the exact law over several rounds of the target, sampled with keyed noise.

In a cascade an inner round may begin at the same root as an earlier inner round whose draws the target has verified
since: its noise must differ. A mix chooses its members by the results of earlier rounds. Mutants that violate this must
fail.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from forerun.config import Verification
from forerun.draft.base import Budget, ChainToJudge, Committed, Draft, JudgeLogits
from forerun.draft.many.cascade import CascadeDrafter, Chain
from forerun.draft.many.mix import MixDrafter
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.noise import Purpose, mix
from forerun.tree import DraftTree
from kit.drafters import FixedLength, Stateless
from law.sampler import drafted, first_pairs

VOCAB, MERGED = 3, 2
P = [0.16, 0.44, 0.40]
MIDDLE = torch.tensor([0.04, 0.25, 0.71]).log().expand(VOCAB, VOCAB)
LOW = torch.tensor([0.4, 0.2, 0.4]).log().expand(VOCAB, VOCAB)
LOWER = torch.tensor([0.6, 0.3, 0.1]).log().expand(VOCAB, VOCAB)


class Table(Stateless):
    """A model that is a table of logits, as member and as judge; tokens are independent of each other.

    Its survival estimates are the table's probabilities; where it does not draw it chooses the last token.
    """

    def __init__(self, logits: Tensor, drawn: bool = True) -> None:
        self.logits, self.drawn = logits, drawn

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        depth = max(budget.depth for budget in budgets)
        if not self.drawn:
            return Draft(DraftTree.chains(draws.roots_tokens, torch.full((len(draws.rows), depth), 2)))
        tree = drafted(draws, self.logits, depth)
        chances = self.logits[0].exp()[tree.tokens[:, 1:]].cumprod(1)
        return Draft(tree, torch.cat([torch.ones(len(chances), 1), chances], dim=1))

    def judge(self, chains: Sequence[ChainToJudge]) -> JudgeLogits:
        last = [token for asked in chains for token in (asked.after_text[-1], *asked.draft_tokens)]
        return JudgeLogits(range(len(chains)), self.logits[torch.tensor(last)], 0.0)


class RoundByRound(CascadeDrafter):
    """Continues in rounds where the judge would otherwise draft alone."""

    @override
    def judge_alone(
        self, draws: Draws, rows: Sequence[int], chains: Sequence[Chain], tail: Committed | None, timed: bool
    ) -> float:
        return 0.0


class OfStates(Table):
    """A drafter that can draft after committed text only, since it reads the target's states."""

    taps = (1,)


CASCADES: dict[str, Callable[[], CascadeDrafter]] = {
    "judge alone": lambda: CascadeDrafter(Table(LOW), Table(MIDDLE), FixedLength(0)),
    "judge alone, in rounds": lambda: RoundByRound(Table(LOW), Table(MIDDLE), FixedLength(0)),
    "drawn": lambda: CascadeDrafter(Table(LOW), Table(MIDDLE), FixedLength(1)),
    "chosen": lambda: CascadeDrafter(Table(LOW, drawn=False), Table(MIDDLE), FixedLength(1)),
    "drawn from states": lambda: CascadeDrafter(OfStates(LOW), Table(MIDDLE), FixedLength(1)),
    "three": lambda: CascadeDrafter(
        CascadeDrafter(Table(LOW), Table(LOW), FixedLength(0)), Table(MIDDLE), FixedLength(1)
    ),
}


def bias(drafter: CascadeDrafter, rule: Verification) -> float:
    """P-value of the first two tokens where this drafter drafts two tokens per round."""
    return first_pairs(P, rule, lambda draws, _: drafter.propose(draws, [Budget(2)] * len(draws.rows)).tree)


@pytest.mark.short("judge alone, in rounds-block", "three-block")
@pytest.mark.parametrize(("kind", "rule"), [*((kind, "block") for kind in CASCADES), ("drawn", "token")])
def test_redrafted_positions_of_a_cascade_get_fresh_noise(kind: str, rule: Verification) -> None:
    assert bias(CASCADES[kind](), rule) > 1e-4


def rounds_by_their_own_root(patch: pytest.MonkeyPatch) -> None:
    """The mutant: the noise of inner rounds depends on their own root and not on the outer round."""
    within = Draws.within

    def forgetful(self: Draws, places: Sequence[int], tails: Sequence[Sequence[int]]) -> Draws:
        inner = within(self, places, tails)
        inner.rounds = inner.root_places
        return inner

    patch.setattr(Draws, "within", forgetful)


def choices_by_position(patch: pytest.MonkeyPatch) -> None:
    """The mutant: a judge chooses with the noise of positions, which coupled verification uses as well."""

    def shared(self: Draws, row: RowSampling, purpose: Purpose, round_: int) -> int:
        where = (0, 0) if purpose is Purpose.COUPLED else (self.level, round_)
        return mix((row.seed, row.sample, purpose, *where))

    patch.setattr(Draws, "_row_key", shared)


@pytest.mark.short("choices_by_position")
@pytest.mark.parametrize("mutant", [rounds_by_their_own_root, choices_by_position])
def test_block_with_reused_noise_is_biased(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert bias(CASCADES["judge alone, in rounds"](), "block") < 1e-6


class Peeking(MixDrafter):
    """The mutant: both members draft, and the one with the larger first token is chosen, with its law."""

    @override
    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        each = [
            super(Peeking, self).propose(draws, [replace(b, drafter=number) for b in budgets]) for number in range(2)
        ]
        first, second = (draft.tree.tokens[:, 1] for draft in each)
        taken = (second > first).long().tolist()
        return super().propose(draws, [replace(b, drafter=number) for b, number in zip(budgets, taken, strict=True)])


def mix_bias(mix: MixDrafter, rule: Verification, which: Sequence[int]) -> float:
    """P-value of the first two tokens where a row's drafter depends on its tokens before the round."""

    def propose(draws: Draws, gained: list[list[int]]) -> DraftTree:
        taken = [which[(i + sum(text)) % len(which)] for i, text in enumerate(gained)]
        return mix.propose(
            draws, [Budget(2, 2, 3, each) if each == MERGED else Budget(2, drafter=each) for each in taken]
        ).tree

    return first_pairs(P, rule, propose)


MEMBERS = [Table(LOWER), Table(MIDDLE)], ["low", "high"]


@pytest.mark.short("token-(2,)")
@pytest.mark.parametrize("which", [(0, 1), (MERGED,), (0, 1, MERGED)], ids=str)
@pytest.mark.parametrize("rule", ["coupled", "token", "block"])
def test_a_mix_that_chooses_members_by_past_tokens_keeps_the_law(rule: Verification, which: tuple[int, ...]) -> None:
    assert mix_bias(MixDrafter(*MEMBERS), rule, which) > 1e-4


@pytest.mark.short("token")
@pytest.mark.parametrize("rule", ["token", "block"])
def test_choosing_a_member_by_its_own_draws_is_noticed(rule: Verification) -> None:
    assert mix_bias(Peeking(*MEMBERS), rule, (0,)) < 1e-6
