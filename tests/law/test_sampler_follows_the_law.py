"""The real sampler against the exact law: keyed noise, float32, top-p on, 100 000 rounds per rule; any drafter."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor
from typing_extensions import override

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
from kit.laws import chi_square
from kit.unchecked import unchecked
from law.exact import Context, Law, chains, judged, trees
from law.sampler import drafted, emitted, first_pairs, judged_round, law_of, sequences, transitions

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
    """(tokens that every sequence emitted, number of accepted draft tokens)."""
    with unchecked():
        draws, tree = offered(rule != "coupled", width)
        verdict = judged_round(draws, tree, TARGET, rule)
    return emitted(tree, verdict), verdict.length


def worst_position(text: Tensor, num_positions: int = DEPTH + 1) -> float:
    """The least p-value of a position's tokens, given those before them, among rounds that reached it."""
    p = law_of(TARGET, PARAMS)
    seen = [transitions(text, ROOT, position, VOCAB) for position in range(num_positions)]
    return min(chi_square(counts, counts.sum(1, keepdim=True) * p) for counts in seen)


@pytest.mark.short("coupled-1", "token-3")
@pytest.mark.parametrize(("rule", "width"), [("coupled", 1), ("token", 1), ("block", 1), ("token", 3)])
def test_each_position_follows_the_target_given_that_the_round_reached_it(rule: Verification, width: int) -> None:
    """The emission lemma itself: among rounds long enough, the next token follows the target's law."""
    assert worst_position(rounds(rule, width)[0], DEPTH + 1 if width == 1 else 2) > 1e-4


GROWN = {
    "in shares": Budget(2, 2, 5),
    "with min_survival": Budget(2, 2, 5, min_survival=0.2),
    "in a shape": Budget.of(Speculation(tree=StaticTree([[0], [1], [0, 0], [1, 0], [1, 1]]))),
    "in a shape with a gap": Budget.of(Speculation(tree=StaticTree([[0], [1], [0, 1], [1, 0]]))),
}


def grown(rule: Verification, budget: Budget) -> Tensor:
    """The tokens of sequences whose trees `grow` made. The time of a batch is quadratic in its size."""

    def read(places: Sequence[NodeToExpand]) -> Tensor:
        return DRAFT[[place.growing.tree.tokens[place.node] for place in places]]

    texts = []
    every = sequences(COUNT // 8, PARAMS, ROOT, seed=3)
    for rows in (every[first : first + BATCH] for first in range(0, len(every), BATCH)):
        with unchecked():
            draws = Draws(rows, VOCAB, rejection=rule != "coupled")
            tree = grow(draws, [budget] * len(rows), DRAFT[ROOT].expand(len(rows), VOCAB), read).tree
            assert (tree.q is not None) == draws.rejection
            at = tree.tokens[tree.valid]
            text = emitted(tree, verify(tree, TARGET[at], draws, rule))
        texts.append(torch.nn.functional.pad(text, (0, budget.depth + 1 - text.shape[1]), value=-1))
    return torch.cat(texts)


@pytest.mark.full
@pytest.mark.parametrize("budget", GROWN)
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_each_position_follows_the_target_on_grown_trees(rule: Verification, budget: str) -> None:
    assert worst_position(grown(rule, GROWN[budget])) > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("mutant", ["the likeliest of what was drawn", "a law where something is missing"])
def test_trees_that_declare_a_wrong_law_are_biased(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows why rejection rules get no law for trees that were pruned by what was drawn or lack siblings."""
    if mutant == "the likeliest of what was drawn":
        monkeypatch.setattr("forerun.draft.model.grower.GrowingTree", lambda b, _, tree: GrowingTree(b, True, tree))
        assert worst_position(grown("token", Budget(2, 3, 3))) < 1e-6
    else:
        honest = grown("token", GROWN["in a shape with a gap"])
        monkeypatch.setattr("forerun.draft.model.grower.has_all_siblings", lambda _: True)
        found = grown("token", GROWN["in a shape with a gap"])
        assert worst_position(found) < 1e-6 < worst_position(honest)


def as_model(table: Tensor) -> Callable[[Context], Law]:
    laws = [tuple(Fraction(x) for x in row) for row in law_of(table, PARAMS).tolist()]
    return lambda context: laws[context[-1] if context else ROOT]


def pairs(text: Tensor, length: Tensor, depth: int) -> Tensor:
    """How often a round accepted n draft tokens and then emitted token t, as [depth+1, vocab]."""
    last = text.gather(1, length[:, None])[:, 0]
    return torch.bincount(length * VOCAB + last, minlength=(depth + 1) * VOCAB).view(depth + 1, VOCAB)


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_accepted_length_and_next_token_have_the_enumerated_joint_law(rule: Verification) -> None:
    """Against the same kernels in float64, over every draft and every coin."""
    exact = judged(chains(as_model(DRAFT), DEPTH), as_model(TARGET), VOCAB, RULES[rule])
    expected = torch.stack([exact.mass[n + 1].view(-1, VOCAB).sum(0) for n in range(DEPTH + 1)])
    assert chi_square(pairs(*rounds(rule), DEPTH).view(1, -1), COUNT * expected.view(1, -1)) > 1e-4


def test_accepted_length_and_next_token_have_the_enumerated_joint_law_on_trees() -> None:
    exact = judged(trees(as_model(DRAFT), (-1, -1, -1)), as_model(TARGET), VOCAB, token_law)
    expected = torch.stack([exact.mass[n + 1].view(-1, VOCAB).sum(0) for n in range(2)])
    seen = pairs(*rounds("token", 3), 1)
    assert chi_square(seen.view(1, -1), seen.sum() * expected.view(1, -1)) > 1e-4


def test_accepted_length_and_next_token_have_the_joint_law_of_shared_noise() -> None:
    """P(both draw i) = 1 / sum_j max(p_j/p_i, q_j/q_i), noise being fresh at every position."""
    p, q = law_of(TARGET, PARAMS), law_of(DRAFT, PARAMS)
    both = (p > 0) & (q > 0)
    ratio = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None]).sum(2)  # [context, i]
    met = torch.where(both, 1 / ratio, 0.0)
    expected = [p[ROOT] - met[ROOT], met[ROOT] @ (p - met), met[ROOT] @ met @ p]
    assert chi_square(pairs(*rounds("coupled"), DEPTH).view(1, -1), COUNT * torch.stack(expected).view(1, -1)) > 1e-4


class PositionOnly(Draws):
    """The mutant: noise of the rejection modes without the round's root position in its key."""

    @override
    def _row_key(self, row: RowSampling, purpose: Purpose, root: int) -> int:
        return mix((row.seed, row.sample, purpose, self.level))


def drawn_again(kind: type[Draws], rule: Verification) -> float:
    """P-value of the first two tokens, over two rounds whose second may draft a position again."""
    model = torch.tensor([0.2, 0.3, 0.5]).log().expand(3, 3)
    return first_pairs([0.5, 0.3, 0.2], rule, lambda draws, _: drafted(draws, model, depth=2), kind, 10_000)


@pytest.mark.short("block")
@pytest.mark.parametrize("rule", RULES)
def test_redrafted_positions_get_fresh_noise(rule: Verification) -> None:
    assert drawn_again(Draws, rule) > 1e-4


@pytest.mark.full
def test_block_with_noise_keyed_by_position_alone_is_biased() -> None:
    assert drawn_again(PositionOnly, "block") < 1e-12


def test_siblings_are_accepted_by_coins_of_their_own() -> None:
    """The second sibling is likely to be accepted, by a coin that says nothing about the rejection of the first."""
    model = torch.tensor([0.7, 0.15, 0.1, 0.05]).log().expand(4, 4)
    assert first_pairs([0.1, 0.2, 0.3, 0.4], "token", lambda draws, _: drafted(draws, model, depth=1, width=3)) > 1e-4


DRAFTERS = {
    "constant": torch.zeros(VOCAB, VOCAB),
    "opposite": -TARGET,
    "sure of an illegal token": torch.zeros(VOCAB, VOCAB).scatter(1, TARGET.argmin(1, keepdim=True), 30.0),
    "sure of the likeliest token": torch.zeros(VOCAB, VOCAB).scatter(1, TARGET.argmax(1, keepdim=True), 30.0),
    "another context": TARGET.roll(1, 0),
    "the target": TARGET,
}


@pytest.mark.short("opposite-coupled", "sure of an illegal token-token", "another context-block")
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_any_drafter_keeps_the_law_and_acceptance_is_the_overlap_of_the_laws(drafter: str, rule: Verification) -> None:
    count = COUNT // 10
    with unchecked():
        draws = Draws(sequences(count, PARAMS, ROOT, seed=7), VOCAB, rejection=rule != "coupled")
        tree = drafted(draws, DRAFTERS[drafter], depth=1)
        verdict = judged_round(draws, tree, TARGET, rule)
    assert worst_position(emitted(tree, verdict), 2) > 1e-4
    p, q = law_of(TARGET, PARAMS)[ROOT], law_of(DRAFTERS[drafter], PARAMS)[ROOT]
    accepted = verdict.length.double().mean().item()
    overlap = torch.minimum(p, q).sum().item()
    noise = 4 * math.sqrt(overlap * (1 - overlap) / count) + 1e-6
    if rule == "coupled":  # shared noise alone: never above the overlap, and not below its known bound
        assert overlap / (2 - overlap) - noise <= accepted <= overlap + noise
    else:
        assert abs(accepted - overlap) <= noise
