"""Cascades keep the exact law over several rounds of the target, sampled with keyed noise of rounds inside rounds.

An inner round may begin behind a root at which an earlier inner round began too, one whose draws the target has judged
since. Its noise must be another's all the same; mutants that do not see to it must fail.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from sampler import drafted, first_pairs
from torch import Tensor

from forerun.config import Verification
from forerun.draft.base import Budget, Committed, Draft, JudgeLogits, Question
from forerun.draft.many.cascade import CascadeDrafter, Chain
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.noise import Purpose, mix
from forerun.tree import DraftTree
from kit.drafters import FixedLength, Stateless

VOCAB = 3
P = [0.16, 0.44, 0.40]
MIDDLE = torch.tensor([0.04, 0.25, 0.71]).log().expand(VOCAB, VOCAB)
LOW = torch.tensor([0.4, 0.2, 0.4]).log().expand(VOCAB, VOCAB)


class Table(Stateless):
    """A model that is a table of logits, as lower member and as judge; tokens are independent of each other."""

    def __init__(self, logits: Tensor, drawn: bool = True) -> None:
        self.logits, self.drawn = logits, drawn

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        depth = max(budget.depth for budget in budgets)
        if self.drawn:
            return Draft(drafted(draws, self.logits, depth))
        return Draft(DraftTree.chains(draws.roots_tokens, torch.full((len(draws.rows), depth), 2)))

    def judge(self, questions: Sequence[Question]) -> JudgeLogits:
        last = [token for asked in questions for token in (asked.late[-1], *asked.guesses)]
        return JudgeLogits(range(len(questions)), self.logits[torch.tensor(last)], 0.0)


class RoundByRound(CascadeDrafter):
    """Goes on in rounds where the judge might as well draft by itself."""

    def go_alone(
        self, draws: Draws, rows: Sequence[int], chains: Sequence[Chain], tail: Committed | None, timed: bool
    ) -> float:
        return 0.0


class OfStates(Table):
    """Guesses behind the target's text alone."""

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
    """P-value of what is said where this drafts two guesses a round."""
    return first_pairs(P, rule, lambda draws, _: drafter.propose(draws, [Budget(2)] * len(draws.rows)).tree)


@pytest.mark.short("drawn-block", "three-block")
@pytest.mark.parametrize(("kind", "rule"), [*((kind, "block") for kind in CASCADES), ("drawn", "token")])
def test_what_is_drafted_again_is_drawn_afresh(kind: str, rule: Verification) -> None:
    assert bias(CASCADES[kind](), rule) > 1e-4


def rounds_by_their_own_root(patch: pytest.MonkeyPatch) -> None:
    """Inner rounds that know where they begin, and not the round they lie in."""
    within = Draws.within

    def forgetful(self: Draws, places: Sequence[int], tails: Sequence[Sequence[int]]) -> Draws:
        inner = within(self, places, tails)
        inner.rounds = inner.root_places
        return inner

    patch.setattr(Draws, "within", forgetful)


def choices_by_position(patch: pytest.MonkeyPatch) -> None:
    """A judge that chooses under the noise of positions, as the target does where it judges by choices."""

    def shared(self: Draws, row: RowSampling, purpose: Purpose, round_: int) -> int:
        where = (0, 0) if purpose is Purpose.COUPLED else (self.level, round_)
        return mix((row.seed, row.sample, purpose, *where))

    patch.setattr(Draws, "_row_key", shared)


@pytest.mark.short("choices_by_position")
@pytest.mark.parametrize("mutant", [rounds_by_their_own_root, choices_by_position])
def test_block_with_noise_that_was_looked_at_is_biased(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert bias(CASCADES["judge alone, in rounds"](), "block") < 1e-6
