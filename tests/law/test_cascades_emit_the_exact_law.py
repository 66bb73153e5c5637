"""Cascades emit the exact law in every verification mode: all draft tokens, coins and draws of a round are enumerated.

The production `CascadeDrafter` and `verify` run. Mutants must fail.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from forerun.draft import base
from forerun.draft.base import Budget, ChainToJudge, Committed, JudgeLogits
from forerun.draft.many.cascade import CascadeDrafter, Chain, MeasuredLengths
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree
from kit.drafters import FixedLength, Stateless
from law.exact import RULES, TOLERANCE, Context, Draft, Family, Model, deviation, families
from law.scripted import WRONG, ToyDrafter, check, drafts_of

FAMILIES = [family for family in families(12) if family.vocab == 3]


class ToyJudge(Stateless):
    """A judge that is a model and drafts by itself; `full` says after which texts its cache has no space."""

    def __init__(self, model: Model, full: Callable[[Context], bool] = lambda _: False) -> None:
        self.model, self.full = model, full

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> base.Draft:
        text, room = draws.rows[0].tokens[1:], self.full
        return ToyDrafter(self.model, room=lambda more: not room((*text, *more))).propose(draws, budgets, tail)

    def judge(self, chains: Sequence[ChainToJudge]) -> JudgeLogits:
        (asked,) = chains
        if self.full(tuple(asked.after_text[1:])):
            return JudgeLogits([], torch.empty(0, 3), 0.0)
        texts = [(*asked.after_text[1:], *asked.draft_tokens[:n]) for n in range(len(asked.draft_tokens) + 1)]
        laws = torch.tensor([[float(x) for x in self.model(text)] for text in texts], dtype=torch.float64)
        return JudgeLogits([0], laws.log(), 0.0)


class Alternating(MeasuredLengths):
    """Lengths that differ from round to round."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.lengths, self.turn = lengths, 0

    @override
    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        self.turn += 1
        return [min(each, self.lengths[self.turn % len(self.lengths)]) for each in most]


def chains_of(make: Callable[[], CascadeDrafter], depth: int, rejection: bool = True) -> list[Draft]:
    """Every chain that a cascade may draft, with its probability and declared laws."""
    (drafts,) = drafts_of(make, [Budget(depth)], rejection)
    return drafts


def two(
    family: Family,
    length: int,
    kind: type[CascadeDrafter] = CascadeDrafter,
    judge: ToyJudge | None = None,
    drawn: bool = True,
) -> Callable[[], CascadeDrafter]:
    return lambda: kind(ToyDrafter(family.q, drawn), judge or ToyJudge(family.mid), FixedLength(length))


def top(family: Family) -> Model:
    return lambda context: family._law("top", context)


def three(family: Family, lengths: tuple[int, int], judge: ToyJudge | None = None) -> Callable[[], CascadeDrafter]:
    inner, outer = lengths
    lower = two(family, inner, judge=judge)
    return lambda: CascadeDrafter(lower(), ToyJudge(top(family)), FixedLength(outer))


def check_chains(drafts: Sequence[Draft], model: Model, depth: int) -> None:
    """Assert that the drafts are chains of `depth` tokens drawn from this model, and declare its law."""
    for draft in drafts:
        assert len(draft.tokens) == depth
        chance = 1.0
        for i, token in enumerate(draft.tokens):
            law = [float(x) for x in model(draft.tokens[:i])]
            assert draft.q[i] == pytest.approx(law, abs=TOLERANCE)
            chance *= law[token]
        assert draft.weight == pytest.approx(chance, abs=TOLERANCE)


@pytest.mark.short("3-2")
@pytest.mark.parametrize(("depth", "length"), [(1, 0), (1, 3), (2, 0), (2, 1), (3, 1), (3, 2)])
def test_a_cascade_of_two_emits_the_exact_law(depth: int, length: int) -> None:
    for family in FAMILIES:
        drafts = chains_of(two(family, length), depth)
        check_chains(drafts, family.mid, depth)
        check(drafts, family)


def test_changing_lengths_keep_the_exact_law() -> None:
    for family in FAMILIES[:3]:
        drafts = chains_of(lambda f=family: CascadeDrafter(ToyDrafter(f.q), ToyJudge(f.mid), Alternating((2, 0, 1))), 3)
        check_chains(drafts, family.mid, 3)
        check(drafts, family)


@pytest.mark.full
def test_a_deterministic_lower_member_keeps_the_exact_law() -> None:
    """Its draft tokens have no law and are verified by `follow`; the cascade still emits the judge's law."""
    for family in FAMILIES:
        drafts = chains_of(two(family, 2, drawn=False), 3)
        check_chains(drafts, family.mid, 3)
        check(drafts, family)


@pytest.mark.parametrize("lengths", [(1, 1), (0, 1), (2, 1)])
def test_a_cascade_of_three_emits_the_exact_law(lengths: tuple[int, int]) -> None:
    for family in FAMILIES[:3]:
        drafts = chains_of(three(family, lengths), 2)
        check_chains(drafts, top(family), 2)
        check(drafts, family)


def test_a_judge_that_runs_out_of_cache_keeps_the_exact_law() -> None:
    """Cache space may depend on emitted tokens: these stay, and the missing tokens were not drawn."""
    for family in FAMILIES:
        judge = ToyJudge(family.mid, full=lambda text: text[-1:] == (1,))
        drafts = chains_of(two(family, 1, judge=judge), 3)
        assert len({len(draft.tokens) for draft in drafts}) > 1
        check(drafts, family)


@pytest.mark.full
def test_without_cache_for_the_judge_the_lower_member_drafts_alone() -> None:
    """Its draft tokens come with its own laws or none; space may depend on the text, and at two levels."""
    for family in FAMILIES[:4]:
        nowhere, at_first = (ToyJudge(family.mid, full) for full in (lambda _: True, lambda text: not text))
        for judge in (nowhere, at_first):
            drafts = chains_of(two(family, 1, judge=judge), 2)
            check_chains(drafts, family.q, 2)
            check(drafts, family)
            over = chains_of(three(family, (1, 1), judge), 2)
            check_chains(over, top(family), 2)
            check(over, family)
        chosen = chains_of(two(family, 1, judge=nowhere, drawn=False), 2)
        assert all(set(draft.q) == {None} for draft in chosen)
        check(chosen, family)


def test_in_coupled_mode_the_draft_is_what_the_judge_draws() -> None:
    """In coupled mode the chain is what the judge draws: `depth` tokens of its law, and no law is declared."""
    for family in FAMILIES:
        drafts = chains_of(two(family, 2), 2, rejection=False)
        chances: dict[Context, float] = {}
        for draft in drafts:
            assert set(draft.q) == {None}
            chances[draft.tokens] = chances.get(draft.tokens, 0.0) + float(draft.weight)
        for text, chance in chances.items():
            assert chance == pytest.approx(float(family.mid(())[text[0]] * family.mid(text[:1])[text[1]]))


class LowerLaw(CascadeDrafter):
    """The mutant: accepted tokens of the lower member keep the law that it drew them from."""

    @override
    def emit(self, draws: Draws, chains: Sequence[Chain], tree: DraftTree, logits: Tensor) -> None:
        (chain,) = chains
        before = len(chain.emitted)
        super().emit(draws, chains, tree, logits)
        if tree.q is None:
            return
        laws, drafted = chain.laws[-1].clone(), tree.tokens[0, 1:].tolist()
        for i, token in enumerate(chain.emitted[before:]):
            if i < len(drafted) and token == drafted[i]:
                laws[i] = tree.q.probs[tree.q.row[0, i]]
        chain.laws[-1] = laws


class Choosy(CascadeDrafter):
    """The mutant: an unlikely last token is dropped, and the chain ends before it."""

    @override
    def emit(self, draws: Draws, chains: Sequence[Chain], tree: DraftTree, logits: Tensor) -> None:
        (chain,) = chains
        super().emit(draws, chains, tree, logits)
        if chain.laws[-1][-1, chain.emitted[-1]] < 0.35:
            chain.emitted.pop()
            chain.laws[-1] = chain.laws[-1][:-1]
            chain.left = 0


class AcceptedAlone(CascadeDrafter):
    """The mutant: after a rejection the chain ends without the recovered token."""

    @override
    def emit(self, draws: Draws, chains: Sequence[Chain], tree: DraftTree, logits: Tensor) -> None:
        (chain,) = chains
        before = len(chain.emitted)
        super().emit(draws, chains, tree, logits)
        run, drafted = chain.emitted[before:], tree.tokens[0, 1:].tolist()
        if drafted and len(run) <= len(drafted):
            chain.emitted.pop()
            chain.laws[-1] = chain.laws[-1][:-1]
            chain.left = 0


@pytest.mark.short("token-AcceptedAlone")
@pytest.mark.parametrize("kind", [LowerLaw, Choosy, AcceptedAlone])
@pytest.mark.parametrize("rule", RULES)
def test_mutants_are_noticed(kind: type[CascadeDrafter], rule: str) -> None:
    def worst(kind: type[CascadeDrafter]) -> float:
        found = ((chains_of(two(family, 1, kind), 2), family) for family in FAMILIES)
        return max(deviation(RULES[rule](drafts, family.p, 3), family.p) for drafts, family in found)

    assert worst(CascadeDrafter) < TOLERANCE
    assert worst(kind) > WRONG
