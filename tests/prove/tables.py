"""Many sequences at once from a table model: the real draws and verdicts, without an engine.

Row t of a table are the logits of what may follow token t. All sequences start from the same root and differ in their
seeds alone. A mutant may spoil what was drafted before it is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.config import Verification
from forerun.prove.cells import Cells, TokenIds, choose_cells
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftTree
from forerun.verify import verify as judging
from law.sampler import drafted

VOCAB, ROOT = 12, 0
Spoil = Callable[[DraftTree], DraftTree]


@dataclass(frozen=True)
class Pair:
    """A target and a drafter."""

    target: Tensor
    draft: Tensor

    @classmethod
    def opposed(cls, *chances: float) -> Pair:
        """Independent tokens, and a drafter that has the likeliest token as the unlikeliest and so on."""
        tables = [torch.full((VOCAB, VOCAB), -20.0) for _ in range(2)]
        for table, law in zip(tables, (chances, chances[::-1]), strict=True):
            table[:, : len(law)] = torch.tensor(law).log()
        return cls(*tables)

    @classmethod
    def random(cls, seed: int) -> Pair:
        """Another distribution after every token, and a drafter that is close to it."""
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(VOCAB, VOCAB, generator=generator)
        return cls(target, target + torch.randn(VOCAB, VOCAB, generator=generator))

    def cells(self, params: SamplingParams, num_texts: int) -> Cells:
        """The cells of texts after the root, from the target's distribution."""
        draws = Draws([RowSampling(0, params, 0, 0, [ROOT], 1)], VOCAB)
        laws = torch.cat([draws.probs(row[None].double(), draws.roots()) for row in self.target])
        after = [{token: chance for token, chance in enumerate(row) if chance} for row in laws.tolist()]
        return choose_cells(lambda texts: [after[text[-1] if text else ROOT] for text in texts], num_texts)


def texts(
    pair: Pair,
    rule: Verification,
    params: SamplingParams,
    num_texts: int,
    num_tokens: int,
    depth: int,
    seed: int,
    spoil: Spoil = lambda tree: tree,
) -> list[TokenIds]:
    """So many texts of at least `num_tokens` tokens, in as many rounds as they take."""
    sequences: list[TokenIds] = [() for _ in range(num_texts)]
    while short := [i for i, text in enumerate(sequences) if len(text) < num_tokens]:
        rows = [RowSampling(i, params, seed * num_texts + i, 0, [ROOT, *sequences[i]], 1) for i in short]
        draws = Draws(rows, VOCAB, rejection=True)
        tree = spoil(drafted(draws, pair.draft, depth))
        verdict = judging.verify(tree, pair.target[tree.tokens[tree.valid]], draws, rule)
        lines = zip(short, tree.tokens.tolist(), verdict.length.tolist(), verdict.next_token.tolist(), strict=True)
        for i, tokens, length, next_token in lines:
            sequences[i] += (*tokens[1 : length + 1], next_token)
    return sequences


def flattened(share: float) -> Spoil:
    """Declares a distribution other than the one drawn from: nearer to the uniform one by this share."""

    def spoil(tree: DraftTree) -> DraftTree:
        if tree.q is None:
            return tree
        support = (tree.q.probs > 0).to(tree.q.probs.dtype)
        uniform = support / support.sum(1, keepdim=True).clamp_min(1)
        return replace(tree, q=replace(tree.q, probs=(1 - share) * tree.q.probs + share * uniform))

    return spoil


def dropping(least: float) -> Spoil:
    """Drops a drawn draft token with all below it if its own probability was small."""

    def spoil(tree: DraftTree) -> DraftTree:
        if tree.q is None or tree.width > 1 or tree.depth == 0:
            return tree
        above = tree.q.row[:, :-1]
        chance = tree.q.probs[above.clamp_min(0)].gather(2, tree.tokens[:, 1:, None].clamp_min(0))[:, :, 0]
        unlikely = (above >= 0) & (chance < least)
        kept = torch.cat([torch.ones_like(unlikely[:, :1]), (~unlikely).long().cumprod(1).bool()], dim=1)
        return replace(tree, tokens=torch.where(kept, tree.tokens, -1), parents=torch.where(kept, tree.parents, -1))

    return spoil
