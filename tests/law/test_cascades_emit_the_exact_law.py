"""Cascades emit the exact law in every verification mode: every guess, coin and draw of their rounds is enumerated.

`CascadeDrafter` and `verify` run as they serve. Mutants must fail.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from exact import RULES, TOLERANCE, Context, Draft, Family, Model, deviation, families
from scripted import WRONG, Guesser, check, drafts_of
from torch import Tensor

from forerun.draft import base
from forerun.draft.base import Budget, ChainToJudge, Committed, JudgeLogits
from forerun.draft.many.cascade import CascadeDrafter, Chain, RoundTiming
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree
from kit.drafters import FixedLength, Stateless

FAMILIES = [family for family in families(12) if family.vocab == 3]


class ToyJudge(Stateless):
    """A model that reads anything and drafts by itself; or has no room behind some texts."""

    def __init__(self, model: Model, full: Callable[[Context], bool] = lambda _: False) -> None:
        self.model, self.full = model, full

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> base.Draft:
        text, room = draws.rows[0].tokens[1:], self.full
        return Guesser(self.model, room=lambda more: not room((*text, *more))).propose(draws, budgets, tail)

    def judge(self, chains: Sequence[ChainToJudge]) -> JudgeLogits:
        (asked,) = chains
        if self.full(tuple(asked.after_text[1:])):
            return JudgeLogits([], torch.empty(0, 3), 0.0)
        texts = [(*asked.after_text[1:], *asked.draft_tokens[:n]) for n in range(len(asked.draft_tokens) + 1)]
        laws = torch.tensor([[float(x) for x in self.model(text)] for text in texts], dtype=torch.float64)
        return JudgeLogits([0], laws.log(), 0.0)


@dataclass
class Alternating:
    """Lengths that differ from round to round."""

    lengths: tuple[int, ...]
    turn: int = 0

    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        self.turn += 1
        return [min(each, self.lengths[self.turn % len(self.lengths)]) for each in most]

    def count(self, seq_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None: ...

    def forget(self, seq_ids: Sequence[int]) -> None: ...

    def time(self, timing: RoundTiming) -> None: ...

    def record_alone(self, seq_ids: Sequence[int], depth: int, taken_s: float | None) -> None: ...


def chains_of(make: Callable[[], CascadeDrafter], depth: int, rejection: bool = True) -> list[Draft]:
    """Every chain that a cascade drafts, with its probability and the laws it declares."""
    (found,) = drafts_of(make, [Budget(depth)], rejection)
    return found


def two(family: Family, length: int, kind: type[CascadeDrafter] = CascadeDrafter) -> Callable[[], CascadeDrafter]:
    return lambda: kind(Guesser(family.q), ToyJudge(family.mid), FixedLength(length))


def top(family: Family) -> Model:
    return lambda context: family._law("top", context)


def choosing(family: Family, length: int) -> Callable[[], CascadeDrafter]:
    return lambda: CascadeDrafter(Guesser(family.q, drawn=False), ToyJudge(family.mid), FixedLength(length))


def three(family: Family, lengths: tuple[int, int]) -> Callable[[], CascadeDrafter]:
    inner, outer = lengths

    def make() -> CascadeDrafter:
        lower = CascadeDrafter(Guesser(family.q), ToyJudge(family.mid), FixedLength(inner))
        return CascadeDrafter(lower, ToyJudge(top(family)), FixedLength(outer))

    return make


def check_chains(drafts: Sequence[Draft], model: Model, depth: int) -> None:
    """They are `depth` tokens drawn from this model one after the other, and say so."""
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
def test_a_cascade_of_two(depth: int, length: int) -> None:
    for family in FAMILIES:
        drafts = chains_of(two(family, length), depth)
        check_chains(drafts, family.mid, depth)
        check(drafts, family)


def test_lengths_that_change() -> None:
    for family in FAMILIES[:3]:
        drafts = chains_of(lambda f=family: CascadeDrafter(Guesser(f.q), ToyJudge(f.mid), Alternating((2, 0, 1))), 3)
        check_chains(drafts, family.mid, 3)
        check(drafts, family)


@pytest.mark.full
@pytest.mark.parametrize("chosen", [FAMILIES[:3], pytest.param(FAMILIES[3:], marks=pytest.mark.full)], ids=len)
def test_a_lower_member_that_chooses(chosen: list[Family]) -> None:
    """Without a law its guesses are judged by `follow`, and what is emitted has the judge's law all the same."""
    for family in chosen:
        drafts = chains_of(choosing(family, 2), 3)
        check_chains(drafts, family.mid, 3)
        check(drafts, family)


@pytest.mark.parametrize("lengths", [(1, 1), (0, 1), (2, 1)])
def test_a_cascade_of_three(lengths: tuple[int, int]) -> None:
    for family in FAMILIES[:3]:
        drafts = chains_of(three(family, lengths), 2)
        check_chains(drafts, top(family), 2)
        check(drafts, family)


def test_a_judge_that_runs_out_of_room() -> None:
    """Room may depend on what was emitted, the last token included: that stays, and what is missing was not drawn."""
    for family in FAMILIES:
        judge = ToyJudge(family.mid, full=lambda text: text[-1:] == (1,))
        drafts = chains_of(lambda f=family, j=judge: CascadeDrafter(Guesser(f.q), j, FixedLength(1)), 3)
        assert len({len(draft.tokens) for draft in drafts}) > 1
        check(drafts, family)


@pytest.mark.full
def test_a_judge_without_room_leaves_it_to_the_lower_member() -> None:
    """Its guesses come with its own laws, or with none; room may depend on the text, and at two levels."""
    for family in FAMILIES[:4]:
        nowhere, at_first = (ToyJudge(family.mid, full) for full in (lambda _: True, lambda text: not text))
        for judge in (nowhere, at_first):
            drafts = chains_of(lambda f=family, j=judge: CascadeDrafter(Guesser(f.q), j, FixedLength(1)), 2)
            check_chains(drafts, family.q, 2)
            check(drafts, family)
            over = chains_of(
                lambda f=family, j=judge: CascadeDrafter(
                    CascadeDrafter(Guesser(f.q), j, FixedLength(1)), ToyJudge(top(f)), FixedLength(1)
                ),
                2,
            )
            check_chains(over, top(family), 2)
            check(over, family)
        chosen = chains_of(lambda f=family, j=nowhere: CascadeDrafter(Guesser(f.q, drawn=False), j, FixedLength(1)), 2)
        assert all(set(draft.q) == {None} for draft in chosen)
        check(chosen, family)


def test_under_shared_noise_only_the_judge_is_heard() -> None:
    """In coupled mode the chain is what the judge draws: again `depth` tokens of its law, and no law is declared."""
    for family in FAMILIES:
        drafts = chains_of(lambda f=family: CascadeDrafter(Guesser(f.q), ToyJudge(f.mid), FixedLength(2)), 2, False)
        chances: dict[Context, float] = {}
        for draft in drafts:
            assert set(draft.q) == {None}
            chances[draft.tokens] = chances.get(draft.tokens, 0.0) + float(draft.weight)
        for text, chance in chances.items():
            assert chance == pytest.approx(float(family.mid(())[text[0]] * family.mid(text[:1])[text[1]]))


class LowerLaw(CascadeDrafter):
    """The mutant: what was guessed below keeps the law that it was guessed from."""

    def emit(self, draws: Draws, chains: Sequence[Chain], tree: DraftTree, logits: Tensor) -> None:
        (chain,) = chains
        before = len(chain.emitted)
        super().emit(draws, chains, tree, logits)
        if tree.q is None:
            return
        laws, guessed = chain.laws[-1].clone(), tree.tokens[0, 1:].tolist()
        for i, token in enumerate(chain.emitted[before:]):
            if i < len(guessed) and token == guessed[i]:
                laws[i] = tree.q.probs[tree.q.row[0, i]]
        chain.laws[-1] = laws


class Choosy(CascadeDrafter):
    """The mutant: a chain ends before a last token that was unlikely, which is dropped for what it is."""

    def emit(self, draws: Draws, chains: Sequence[Chain], tree: DraftTree, logits: Tensor) -> None:
        (chain,) = chains
        super().emit(draws, chains, tree, logits)
        if chain.laws[-1][-1, chain.emitted[-1]] < 0.35:
            chain.emitted.pop()
            chain.laws[-1] = chain.laws[-1][:-1]
            chain.left = 0


class AcceptedAlone(CascadeDrafter):
    """The mutant: where a guess was rejected the chain ends, without the token that was recovered."""

    def emit(self, draws: Draws, chains: Sequence[Chain], tree: DraftTree, logits: Tensor) -> None:
        (chain,) = chains
        before = len(chain.emitted)
        super().emit(draws, chains, tree, logits)
        run, guessed = chain.emitted[before:], tree.tokens[0, 1:].tolist()
        if guessed and len(run) <= len(guessed):
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
