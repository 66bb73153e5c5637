"""The real sampler on toy models: many one-round sequences at once, with keyed noise, in float32.

A model is a table of logits: row t says what may follow token t. All sequences start from the same root and differ in
their seed alone, so that their tokens can be counted.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from forerun.config import Verification
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftLaw, DraftTree
from forerun.verify.rules import Verdict
from forerun.verify.verify import verify
from kit.laws import chi_square
from kit.unchecked import unchecked


def sequences(count: int, params: SamplingParams, root: int, seed: int) -> list[RowSampling]:
    return [
        RowSampling(seq_id=i, params=params, seed=seed * count + i, sample=0, tokens=[0, root], num_prompt=2)
        for i in range(count)
    ]


def drafted(draws: Draws, model: Tensor, depth: int, width: int = 1) -> DraftTree:
    """Drafts from such a table: chains, or trees with `width` children below the root and chains below them."""
    at, batch = draws.roots(), len(draws.rows)
    tokens, parents = [draws.roots_tokens[:, None]], [torch.full((batch, 1), -1)]
    frontier, laws, row = torch.zeros(batch, 1, dtype=torch.int64), [], []
    for step in range(depth):
        branch = width if step == 0 else 1
        last = tokens[-1].flatten()
        found = draws.children(model[last], at, branch)
        laws.append(model.new_zeros(0) if found.law is None else found.law)
        row.append(torch.arange(len(last)).view(batch, -1) + sum(map(len, laws[:-1])))
        tokens.append(found.tokens.view(batch, -1))
        parents.append(frontier.repeat_interleave(branch, 1))
        at = draws.advance(at, torch.arange(len(last)).repeat_interleave(branch), found.tokens.flatten())
        frontier = torch.arange(tokens[-1].shape[1]).expand(batch, -1) + sum(t.shape[1] for t in tokens[:-1])
    q = None
    if draws.rejection:
        leaves = torch.full_like(tokens[-1], -1)
        q = DraftLaw(torch.cat([*row, leaves], dim=1), torch.cat(laws))
    return DraftTree(torch.cat(tokens, 1), torch.cat(parents, 1), depth=depth, width=width, q=q)


def judged_round(draws: Draws, tree: DraftTree, target: Tensor, rule: Verification) -> Verdict:
    return verify(tree, target[tree.tokens[tree.valid]], draws, rule)


def emitted(tree: DraftTree, verdict: Verdict) -> Tensor:
    """[batch, depth+1]: the tokens of the round, -1 beyond the last."""
    path = verdict.path[:, 1:]
    accepted = torch.where(path >= 0, tree.tokens.gather(1, path.clamp_min(0)), -1)
    text = torch.cat([accepted, torch.full_like(verdict.length, -1)[:, None]], dim=1)
    return text.scatter(1, verdict.length[:, None], verdict.next_token[:, None])


def law_of(model: Tensor, params: SamplingParams) -> Tensor:
    """Each row of a table as the sampler's final law, in float64."""
    rows = [RowSampling(0, params, 0, 0, [0], 1)]
    draws = Draws(rows, model.shape[1])
    at = draws.roots()
    return torch.cat([draws.probs(row[None].double(), at) for row in model])


def transitions(text: Tensor, root: int, position: int, vocab: int) -> Tensor:
    """[vocab, vocab]: how often token b stands at `position` after token a, in rounds that emitted so far."""
    before = torch.full_like(text[:, 0], root) if position == 0 else text[:, position - 1]
    there = text[:, position] >= 0
    code = before[there] * vocab + text[there, position]
    return torch.bincount(code, minlength=vocab * vocab).view(vocab, vocab)


def first_pairs(
    law: list[float],
    rule: Verification,
    propose: Callable[[Draws, list[list[int]]], DraftTree],
    kind: type[Draws] = Draws,
    count: int = 3_000,
) -> float:
    """P-value of the first two tokens of sequences of a target of this law, drafted and judged for two rounds.

    Each round is drafted from its draws and from the tokens that the sequences gained before it.
    """
    vocab, p = len(law), torch.tensor(law, dtype=torch.float64)
    target, rows = p.log().float().expand(vocab, vocab), sequences(count, SamplingParams(), 1, seed=2)
    gained: list[list[int]] = [[] for _ in rows]
    for _ in range(2):
        with unchecked():
            draws = kind(rows, vocab, rejection=rule != "coupled")
            tree = propose(draws, gained)
            text = emitted(tree, judged_round(draws, tree, target, rule)).tolist()
        news = [[token for token in line if token >= 0] for line in text]
        gained = [old + new for old, new in zip(gained, news, strict=True)]
        rows = [replace(row, tokens=[*row.tokens, *new]) for row, new in zip(rows, news, strict=True)]
    counts = torch.bincount(torch.tensor([vocab * text[0] + text[1] for text in gained]), minlength=vocab**2)
    return chi_square(counts.view(1, -1), count * (p[:, None] * p).view(1, -1))
