"""sanitize: turns any draft, however wrong, into a valid tree within its budget.

This file decides which draft tokens stay and whether the declared `q` is still trusted. After it no step meets a bad
index, a NaN or a tree beyond its limits, whatever the drafter returned. Nothing synchronises with a device.

If `q` is not trusted, `q.row` is set to -1 in the whole sequence. Each child's law is then the point mass at itself,
and the rules are lossless for each fixed draft, hence for every way of making drafts (`follow`, in law). Whether `q`
stays must not depend on the value of a draft token, so:

- Cut by depth, by width, or (chains) by number: the limit was known before sampling; `q` stays.
- Cut by number in a tree: which siblings come late may depend on their values; `q` goes.
- A token out of range, a repeated sibling, a bad parent, a wrong root: none of these can happen under an honest `q`, so
  the tokens were not sampled from the declared law; `q` goes.
- `q` with rows that are NaN, negative, not normalised or missing: `q` goes.

A false `q` that is a valid law cannot be detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.annotations import Bool, Int
from forerun.device import upload
from forerun.kernels.sampling import SamplingKernels
from forerun.tree import DraftLaw, DraftTree, HostTree

MASS_TOLERANCE = 1e-3  # float32 sums over 150 000 tokens stay well inside


@runtime_checkable
class Limit(Protocol):
    """The bounds of one sequence's tree: `draft.base.Budget` is one."""

    @property
    def depth(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def nodes(self) -> int: ...


def sanitize(
    tree: DraftTree,
    roots: Int[Tensor, " batch"],
    limits: Sequence[Limit],
    vocab: int,
    kernels: SamplingKernels | None = None,
) -> DraftTree:
    """The valid part of a draft: all invariants of DraftTree hold, and each sequence is within its limit.

    An invalid draft token becomes padding, together with all below it; the others keep their node indices. A draft has
    a column for the root and one for each token of the largest limit; further columns are cut off. Nodes beyond the
    declared depth and width are removed. If the tensors have a wrong type, shape or batch size, only the roots are
    left. A valid draft is returned with the same values; `kernels` recognise it faster, and collect what the host needs
    to know of it.
    """
    assert len(limits) == roots.shape[0], f"{len(limits)} limits for {roots.shape[0]} sequences"
    if not _well_formed(tree, roots):
        return DraftTree.bare(roots)
    bounds = [(limit.depth, limit.width, limit.nodes if limit.depth > 0 else 0) for limit in limits]
    deepest, widest, most = (max(column) for column in zip(*bounds, strict=True))
    columns = min(1 + most, tree.tokens.shape[1])
    depth, width = min(tree.depth, deepest, columns - 1), max(1, min(tree.width, widest, columns - 1))
    if depth <= 0:
        return DraftTree.bare(roots)
    whole = columns == tree.tokens.shape[1]
    if kernels is not None and whole:
        seen = _seen_clean(tree, roots, bounds, (depth, width, vocab), kernels)
        if seen is not None:
            return DraftTree(tree.tokens, tree.parents, depth, width, known=seen)
    counts = _counts(tree, len(roots), columns)
    if counts is not None and tree.q is None:
        fitting = [min(d, n, count) for (d, _, n), count in zip(bounds, counts, strict=True)]
        if tree.sound and whole and fitting == counts:
            return tree
        return _unseen_chains(tree, roots, fitting, vocab)
    tokens = torch.cat([roots[:, None], tree.tokens[:, 1:columns]], dim=1)
    parents = tree.parents[:, :columns]
    sound = _sound(tokens, parents, vocab)
    if counts is not None:  # these are read as the chains they are said to be, so they must be that
        bounds = [(d, w, min(n, count)) for (d, w, n), count in zip(bounds, counts, strict=True)]
        sound &= parents == torch.arange(columns, device=parents.device) - 1
    keep, late = _within(sound, parents, upload(bounds, torch.long, tokens.device), depth, width)
    doubted = (tree.tokens[:, 0] != roots) | (~sound & ((tokens != -1) | (parents != -1)))[:, 1:].any(1)
    if width > 1:
        doubted = doubted | late.any(1) | (tree.tokens[:, columns:] >= 0).any(1)
    tokens = torch.where(keep, tokens, -1)
    parents = torch.where(keep & sound, parents, -1)
    q = None if tree.q is None else _believed(tree.q, parents, doubted, vocab)
    known = None if counts is None else [HostTree.unseen(count) for count in counts]
    return DraftTree(tokens, parents, depth, width, q, known, widths=[min(width, limit.width) for limit in limits])


def _seen_clean(
    tree: DraftTree,
    roots: Int[Tensor, " batch"],
    limits: Sequence[tuple[int, int, int]],
    bounds: tuple[int, int, int],
    kernels: SamplingKernels,
) -> list[HostTree] | None:
    """The host's view of trees that need no change; None if that is not known. Does not judge laws or unseen tokens."""
    tokens, parents = tree.tokens, tree.parents
    seen = tree.q is None and not tree.unseen
    packed = tokens.is_contiguous() and parents.is_contiguous() and roots.is_contiguous()
    if not seen or not packed or not tokens.is_cpu or tokens.dtype != torch.int64:
        return None
    columns = kernels.clean(tokens, parents, roots, limits, bounds)
    return None if columns is None else [HostTree.in_columns(*row) for row in zip(*columns, strict=True)]


def _counts(tree: DraftTree, batch: int, columns: int) -> list[int] | None:
    """The number of tokens in each chain of a draft that the host has not seen; None for any other draft."""
    if tree.known is None or not tree.unseen or len(tree.known) != batch or tree.width != 1:
        return None
    counts = [min(len(known.tokens), columns) - 1 for known in tree.known]
    return counts if min(counts) >= 0 else None


def _unseen_chains(tree: DraftTree, roots: Int[Tensor, " batch"], counts: Sequence[int], vocab: int) -> DraftTree:
    """The first `counts` tokens of each chain, up to the first invalid one. Needs few kernel launches."""
    longest = max(counts)
    guesses, step = tree.tokens[:, 1 : 1 + longest], torch.arange(longest, device=roots.device)
    sound = (guesses >= 0) & (guesses < vocab) & (tree.parents[:, 1 : 1 + longest] == step)
    if min(counts) < longest:
        sound &= step < upload(counts, torch.long, roots.device)[:, None]
    chains = DraftTree.chains(roots, torch.where(sound, guesses, -1))
    return replace(chains, known=[HostTree.unseen(count) for count in counts], widths=[1] * len(counts))


def _well_formed(tree: DraftTree, roots: Int[Tensor, " batch"]) -> bool:
    """Whether these are two integer matrices of one shape, with a row per sequence. Needs no data from the device."""
    tokens, parents = tree.tokens, tree.parents
    kinds = tokens.dtype == parents.dtype == roots.dtype
    places = tokens.device == parents.device == roots.device
    shapes = tokens.ndim == 2 and tokens.shape == parents.shape and tokens.shape[0] == roots.shape[0]
    return kinds and places and shapes and tokens.shape[1] > 0


def _sound(
    tokens: Int[Tensor, "batch nodes"], parents: Int[Tensor, "batch nodes"], vocab: int
) -> Bool[Tensor, "batch nodes"]:
    """Tokens that are valid by themselves: in range, with an earlier parent that is no padding, not repeated."""
    node = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    sound = (tokens >= 0) & (tokens < vocab) & (parents >= 0) & (parents < node)
    above = torch.where(sound, parents, 0)
    sound &= (above == 0) | (tokens.gather(1, above) >= 0)
    return sound & (_num_equal_before(torch.where(sound, above * vocab + tokens, -1 - node)) == 0)


def _within(
    sound: Bool[Tensor, "batch nodes"],
    parents: Int[Tensor, "batch nodes"],
    bounds: Int[Tensor, "batch 3"],
    depth: int,
    width: int,
) -> tuple[Bool[Tensor, "batch nodes"], Bool[Tensor, "batch nodes"]]:
    """(nodes that stay, roots included; nodes that go only because of the limit on their number)."""
    node = torch.arange(sound.shape[1], device=sound.device).expand_as(sound)
    deepest, widest, most = bounds.unbind(1)
    rank = _num_equal_before(torch.where(sound, parents, -1 - node))
    above = torch.where(sound & (rank < widest.clamp_max(width)[:, None]), parents, node)  # the rest never climbs
    at, level = node, torch.zeros_like(node)
    for _ in range(depth):
        level = level + (at > 0)
        at = above.gather(1, at)
    keep = (at == 0) & (level <= deepest[:, None])
    late = keep & (keep.long().cumsum(1) > 1 + most[:, None])
    return keep & ~late, late


def _num_equal_before(keys: Int[Tensor, "batch nodes"]) -> Int[Tensor, "batch nodes"]:
    """How many earlier entries of the row have the same key."""
    return (keys[:, :, None] == keys[:, None, :]).tril(-1).sum(2)


def _believed(
    q: DraftLaw, parents: Int[Tensor, "batch nodes"], doubted: Bool[Tensor, " batch"], vocab: int
) -> DraftLaw | None:
    """The declared law, withdrawn for sequences that cannot have been sampled from it; None if it is malformed."""
    columns = parents.shape[1]
    if not _well_formed_law(q, parents, vocab):
        return None
    num_rows, ids, row = len(q.probs), q.ids, q.row[:, :columns]
    mass = q.probs.sum(1)  # NaN and infinity pass on to the sum
    good = (q.probs >= 0).all(1) & ((mass - 1).abs() <= MASS_TOLERANCE)
    if ids is not None:
        ordered = ids.sort(1).values
        good &= ((ids >= 0) & (ids < vocab)).all(1) & (ordered[:, 1:] != ordered[:, :-1]).all(1)
        ids = ids.clamp(0, vocab - 1)
    parent = torch.zeros(len(parents), columns + 1, dtype=torch.bool, device=parents.device)
    parent.scatter_(1, torch.where(parents >= 0, parents, columns), True)
    known = (row >= -1) & (row < num_rows)
    wrong = ~known | ((row >= 0) & ~good[row.clamp(0, num_rows - 1)])
    doubted = doubted | (wrong & parent[:, :columns]).any(1)
    return DraftLaw(torch.where(doubted[:, None] | ~known, -1, row), q.probs, ids)


def _well_formed_law(q: DraftLaw, parents: Int[Tensor, "batch nodes"], vocab: int) -> bool:
    """Whether `DraftLaw.dense` can read these shapes and dtypes. Needs no data from the device."""
    row, probs, ids = q.row, q.probs, q.ids
    rows_fit = row.ndim == 2 and row.shape[0] == parents.shape[0] and row.shape[1] >= parents.shape[1]
    probs_fit = probs.ndim == 2 and probs.is_floating_point() and probs.shape[0] > 0
    if not (rows_fit and probs_fit and row.dtype == parents.dtype and row.device == probs.device == parents.device):
        return False
    if ids is None:
        return probs.shape[1] == vocab
    return ids.shape == probs.shape and ids.dtype == parents.dtype and ids.device == probs.device
