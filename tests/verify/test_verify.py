"""verify: logits and draws to a verdict, under each rule, on chains and trees, with and without q."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.config import Verification
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftLaw, DraftTree
from forerun.verify.rules import Verdict
from forerun.verify.verify import verify

VOCAB = 16
MODEL = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))  # row t: what follows token t
EVERY = pytest.mark.parametrize("rule", ["coupled", "token", "block"])


def draws_for(texts: list[list[int]], *, temperature: float = 1.0, rejection: bool = False) -> Draws:
    params = SamplingParams(temperature=temperature)
    rows = [RowSampling(i, params, 9, 0, text, len(text)) for i, text in enumerate(texts)]
    return Draws(rows, VOCAB, rejection=rejection)


def logits_of(tree: DraftTree) -> Tensor:
    """One row per valid node, batch-major."""
    return MODEL[tree.tokens[tree.valid]]


def plain(text: list[int], count: int, temperature: float) -> list[int]:
    """Plain decoding: one token per round, no draft."""
    for _ in range(count):
        draws = draws_for([text], temperature=temperature)
        text = [*text, int(draws.draw(MODEL[[text[-1]]], draws.roots()))]
    return text


def emitted(tree: DraftTree, verdict: Verdict, b: int) -> list[int]:
    path = verdict.path[b][: verdict.length[b] + 1].tolist()
    return [*tree.tokens[b, path[1:]].tolist(), int(verdict.next_token[b])]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@EVERY
def test_without_a_law_every_rule_emits_the_tokens_of_plain_decoding(rule: Verification, temperature: float) -> None:
    """A ragged batch: rows with all tokens right, the first one right, none right, and no draft."""
    texts = [[1, 2], [5], [3, 3, 3], [7, 1]]
    truth = [plain(text, 4, temperature)[len(text) :] for text in texts]
    wrong = [(truth[1][1] + 1) % VOCAB, (truth[2][0] + 1) % VOCAB]
    draft_tokens = torch.tensor([truth[0][:3], [truth[1][0], wrong[0], truth[1][2]], [wrong[1], 0, -1], [-1, -1, -1]])
    tree = DraftTree.chains(torch.tensor([text[-1] for text in texts]), draft_tokens)
    draws = draws_for(texts, temperature=temperature, rejection=rule != "coupled")
    verdict = verify(tree, logits_of(tree), draws, rule)
    assert verdict.length.tolist() == [3, 1, 0, 0]
    for b, text in enumerate(truth):
        assert emitted(tree, verdict, b) == text[: verdict.length[b] + 1]


def with_law(tree: DraftTree, law: Tensor) -> DraftTree:
    row = torch.where(tree.valid, 0, -1)
    return replace(tree, q=DraftLaw(row, law[None]))


def mixed_trees(seed: int) -> list[DraftTree]:
    """A root, a chain and a tree, each without and with a law, each alone in its batch."""
    chance = torch.Generator().manual_seed(seed)
    law = torch.rand(1, VOCAB, generator=chance).softmax(1)
    shapes = {"bare": [], "chain": [0, 1, 2], "tree": [0, 0, 1, 1]}
    alone = []
    for lawful in (False, True):
        for parents in shapes.values():
            tokens = torch.randperm(VOCAB, generator=chance)[: len(parents)].tolist()
            tree = DraftTree(
                torch.tensor([[seed % VOCAB, *tokens]]),
                torch.tensor([[-1, *parents]]),
                depth=[0, 0, 0, 3, 2][len(parents)],
                width=1 + (len(parents) == 4),
            )
            alone.append(with_law(tree, law[0]) if lawful else tree)
    return alone


def side_by_side(trees: list[DraftTree]) -> DraftTree:
    """The trees as one draft; rows without a law stay without."""
    columns = max(tree.tokens.shape[1] for tree in trees)
    tokens, parents = (
        torch.cat([torch.nn.functional.pad(own, (0, columns - own.shape[1]), value=-1) for own in each])
        for each in ([tree.tokens for tree in trees], [tree.parents for tree in trees])
    )
    laws = [tree.q for tree in trees if tree.q is not None]
    rows = torch.full_like(tokens, -1)
    for b, tree in enumerate(trees):
        if tree.q is not None:
            rows[b, : tree.tokens.shape[1]] = next(i for i, law in enumerate(laws) if law is tree.q)
    q = DraftLaw(rows, torch.cat([law.probs for law in laws])) if laws else None
    widths = [tree.width for tree in trees]
    return DraftTree(tokens, parents, max(tree.depth for tree in trees), max(widths), q, widths=widths)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_row_gets_the_same_verdict_alone_and_in_any_batch(rule: Verification, seed: int) -> None:
    trees, rng = mixed_trees(seed), random.Random(seed)
    texts = [[7] * i + [int(tree.tokens[0, 0])] for i, tree in enumerate(trees)]
    alone = []
    for tree, text in zip(trees, texts, strict=True):
        verdict = verify(tree, logits_of(tree), draws_for([text], rejection=True), rule)
        alone.append(emitted(tree, verdict, 0))
    for _ in range(6):
        rows = rng.sample(range(len(trees)), rng.randint(1, len(trees)))
        tree = side_by_side([trees[row] for row in rows])
        verdict = verify(tree, logits_of(tree), draws_for([texts[row] for row in rows], rejection=True), rule)
        assert [emitted(tree, verdict, b) for b in range(len(rows))] == [alone[row] for row in rows]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_declared_law_with_coupled_noise_is_refused_by_rejection_rules(rule: Verification) -> None:
    tree = with_law(DraftTree.chains(torch.tensor([2]), torch.tensor([[4]])), torch.full((VOCAB,), 1 / VOCAB))
    with pytest.raises(AssertionError, match="coupled noise would be used twice"):
        verify(tree, logits_of(tree), draws_for([[1, 2]]), rule)


def test_logits_must_match_the_nodes() -> None:
    tree = DraftTree.chains(torch.tensor([2]), torch.tensor([[4, -1]]))
    with pytest.raises(AssertionError, match="3 rows of logits for 2 nodes"):
        verify(tree, torch.zeros(3, VOCAB), draws_for([[1, 2]]), "coupled")
