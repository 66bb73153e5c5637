"""The real sampler against the exact law: keyed noise, float32, top-p on, 100 000 rounds per rule."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch
from exact import Context, Law, chains, judged, trees
from sampler import chi_square, continued, drafted, emitted, judged_round, law_of, sequences, transitions
from torch import Tensor

from forerun.config import Speculation, Verification
from forerun.draft.base import Budget
from forerun.draft.model.grower import NodeToExpand, grow
from forerun.draft.model.tree_shape import GrowingTree
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.noise import Purpose, mix
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree
from forerun.tree import DraftTree
from forerun.verify.rules import block_law, token_law
from forerun.verify.verify import verify
from kit.unchecked import unchecked

VOCAB, COUNT, ROOT, DEPTH = 50, 100_000, 3, 2
BATCH = 250  # sequences whose trees are grown together
PARAMS = SamplingParams(temperature=0.9, top_p=0.8)
GENERATOR = torch.Generator().manual_seed(4)
TARGET = 2 * torch.randn(VOCAB, VOCAB, generator=GENERATOR)
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=GENERATOR)
RULES = {"token": token_law, "block": block_law}


@cache
def offered(rejection: bool, width: int) -> tuple[Draws, DraftTree]:
    rows = sequences(COUNT if width == 1 else COUNT // 4, PARAMS, ROOT, seed=1)
    draws = Draws(rows, VOCAB, rejection=rejection)
    return draws, drafted(draws, DRAFT, depth=DEPTH if width == 1 else 1, width=width)


@cache
def rounds(rule: Verification, width: int = 1) -> tuple[Tensor, Tensor]:
    """(what every sequence emitted, how many guesses were accepted)."""
    with unchecked():
        draws, tree = offered(rule != "coupled", width)
        verdict = judged_round(draws, tree, TARGET, rule)
    return emitted(tree, verdict), verdict.length


@pytest.mark.short("coupled")
@pytest.mark.parametrize("rule", ["coupled", "token", "block"])
def test_each_position_given_that_the_round_reached_it(rule: Verification) -> None:
    """The emission lemma itself: among rounds long enough, the next token follows the target's law."""
    text, _ = rounds(rule)
    p = law_of(TARGET, PARAMS)
    for position in range(DEPTH + 1):
        seen = transitions(text, ROOT, position, VOCAB)
        assert chi_square(seen, seen.sum(1, keepdim=True) * p) > 1e-4, f"position {position}"


def test_each_position_on_trees() -> None:
    text, _ = rounds("token", 3)
    p = law_of(TARGET, PARAMS)
    for position in range(2):
        seen = transitions(text, ROOT, position, VOCAB)
        assert chi_square(seen, seen.sum(1, keepdim=True) * p) > 1e-4, f"position {position}"


GROWN = {
    "in shares": Budget(2, 2, 5),
    "with a price": Budget(2, 2, 5, price=0.2),
    "in a shape": Budget.of(Speculation(tree=StaticTree([[0], [1], [0, 0], [1, 0], [1, 1]]))),
    "in a shape with a gap": Budget.of(Speculation(tree=StaticTree([[0], [1], [0, 1], [1, 0]]))),
}


def batches(rows: list[RowSampling]) -> list[list[RowSampling]]:
    return [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]


def grown(rule: Verification, budget: Budget) -> Tensor:
    """What sequences emit whose trees a model drafter grew. The time that a batch takes is quadratic in its size."""

    def read(growing: Sequence[GrowingTree], places: Sequence[NodeToExpand]) -> Tensor:
        return DRAFT[[growing[place.row].tree.tokens[place.node] for place in places]]

    texts = []
    for rows in batches(sequences(COUNT // 8, PARAMS, ROOT, seed=3)):
        with unchecked():
            draws = Draws(rows, VOCAB, rejection=rule != "coupled")
            tree = grow(draws, [budget] * len(rows), DRAFT[ROOT].expand(len(rows), VOCAB), read).tree
            assert (tree.q is not None) == draws.rejection
            at = tree.tokens[tree.valid]
            text = emitted(tree, verify(tree, TARGET[at], draws, rule))
        texts.append(torch.nn.functional.pad(text, (0, budget.depth + 1 - text.shape[1]), value=-1))
    return torch.cat(texts)


def worst_position(text: Tensor) -> float:
    """The least p-value of a position's tokens, given those before them."""
    p = law_of(TARGET, PARAMS)
    seen = [transitions(text, ROOT, position, VOCAB) for position in range(3)]
    return min(chi_square(counts, counts.sum(1, keepdim=True) * p) for counts in seen)


@pytest.mark.full
@pytest.mark.parametrize("budget", GROWN)
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_each_position_on_trees_that_were_grown(rule: Verification, budget: str) -> None:
    assert worst_position(grown(rule, GROWN[budget])) > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("mutant", ["the likeliest of what was drawn", "a law where something is missing"])
def test_trees_whose_law_is_not_their_own_are_biased(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So there is a reason for what rejection rules are given."""
    if mutant == "the likeliest of what was drawn":
        monkeypatch.setattr("forerun.draft.model.grower.GrowingTree", lambda b, _, tree: GrowingTree(b, True, tree))
        assert worst_position(grown("token", Budget(2, 3, 3))) < 1e-6
    else:
        honest = grown("token", GROWN["in a shape with a gap"])
        monkeypatch.setattr("forerun.draft.model.grower.in_turn", lambda _: True)
        found = grown("token", GROWN["in a shape with a gap"])
        assert worst_position(found) < 1e-6 < worst_position(honest)


def as_model(table: Tensor) -> Callable[[Context], Law]:
    laws = [tuple(Fraction(x) for x in row) for row in law_of(table, PARAMS).tolist()]
    return lambda context: laws[context[-1] if context else ROOT]


def pairs(text: Tensor, length: Tensor, depth: int) -> Tensor:
    """How often a round accepted so many guesses and then said this token, as [depth+1, vocab]."""
    last = text.gather(1, length[:, None])[:, 0]
    return torch.bincount(length * VOCAB + last, minlength=(depth + 1) * VOCAB).view(depth + 1, VOCAB)


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_pairs_of_length_and_next_token(rule: Verification) -> None:
    """Against the same kernels in float64, over every draft and every coin."""
    exact = judged(chains(as_model(DRAFT), DEPTH), as_model(TARGET), VOCAB, RULES[rule])
    expected = torch.stack([exact.mass[n + 1].view(-1, VOCAB).sum(0) for n in range(DEPTH + 1)])
    assert chi_square(pairs(*rounds(rule), DEPTH).view(1, -1), COUNT * expected.view(1, -1)) > 1e-4


def test_pairs_of_length_and_next_token_on_trees() -> None:
    exact = judged(trees(as_model(DRAFT), (-1, -1, -1)), as_model(TARGET), VOCAB, token_law)
    expected = torch.stack([exact.mass[n + 1].view(-1, VOCAB).sum(0) for n in range(2)])
    seen = pairs(*rounds("token", 3), 1)
    assert chi_square(seen.view(1, -1), seen.sum() * expected.view(1, -1)) > 1e-4


def test_pairs_of_length_and_next_token_under_shared_noise() -> None:
    """P(both draw i) = 1 / sum_j max(p_j/p_i, q_j/q_i), noise being fresh at every position."""
    p, q = law_of(TARGET, PARAMS), law_of(DRAFT, PARAMS)
    both = (p > 0) & (q > 0)
    ratio = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None]).sum(2)  # [context, i]
    met = torch.where(both, 1 / ratio, 0.0)
    expected = [p[ROOT] - met[ROOT], met[ROOT] @ (p - met), met[ROOT] @ met @ p]
    assert chi_square(pairs(*rounds("coupled"), DEPTH).view(1, -1), COUNT * torch.stack(expected).view(1, -1)) > 1e-4


ROUNDS = 10_000


class PositionOnly(Draws):
    """The mutant: noise of the rejection modes that does not know which round it is for."""

    def _row_key(self, row: RowSampling, purpose: Purpose, root: int) -> int:
        return mix((row.seed, row.sample, purpose, self.level))


def two_rounds(kind: type[Draws], rule: Verification) -> Tensor:
    """The first two tokens of sequences of independent tokens, over a vocabulary of 3 and two rounds."""
    target = torch.tensor([0.5, 0.3, 0.2]).log().expand(3, 3)
    draft = torch.tensor([0.2, 0.3, 0.5]).log().expand(3, 3)
    params = SamplingParams()
    rows = sequences(ROUNDS, params, 1, seed=2)
    gained: list[list[int]] = [[] for _ in rows]
    for _ in range(2):
        with unchecked():
            draws = kind(rows, 3, rejection=True)
            tree = drafted(draws, draft, depth=2)
            text = emitted(tree, judged_round(draws, tree, target, rule))
        news = continued(text)
        gained = [old + new for old, new in zip(gained, news, strict=True)]
        rows = [replace(row, tokens=[*row.tokens, *new]) for row, new in zip(rows, news, strict=True)]
    pair = torch.tensor([3 * text[0] + text[1] for text in gained])
    return torch.bincount(pair, minlength=9)


@pytest.mark.short("block")
@pytest.mark.parametrize("rule", RULES)
def test_noise_of_a_position_that_is_drafted_again_is_fresh(rule: Verification) -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    expected = ROUNDS * (p[:, None] * p).view(1, -1)
    assert chi_square(two_rounds(Draws, rule).view(1, -1), expected) > 1e-4


@pytest.mark.full
def test_block_with_noise_keyed_by_position_alone_is_biased() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    expected = ROUNDS * (p[:, None] * p).view(1, -1)
    assert chi_square(two_rounds(PositionOnly, "block").view(1, -1), expected) < 1e-12
