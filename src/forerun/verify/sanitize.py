"""sanitize: turns any draft, however wrong, into a valid tree within its budget.

This file decides which draft tokens stay and whether the declared `q` is trusted. After it no step meets a bad index, a
NaN or a tree beyond its limits, whatever the drafter returned. Nothing synchronises with a device.

If `q` is not trusted, `q.row` is set to -1 for the sequence. Each child's law is then the point mass at itself, and the
rules are lossless for each fixed draft, hence for every way of making drafts (in law, they are then `follow`). Whether
`q` is trusted must not depend on the value of a draft token, so:

- The draft is cut by depth, by width, or (chains) by number of tokens: the limit was known before sampling; trusted.
- A tree is cut by number of tokens: which siblings come last may depend on their values; not trusted.
- A token out of range, a repeated sibling, a bad parent, a wrong root: none of these can happen if the tokens were
  sampled from `q`; not trusted.
- Rows of `q` are NaN, negative, not normalised or missing: not trusted.

A wrong `q` that is a valid law cannot be detected.
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

MASS_TOLERANCE = 1e-3  # far above the rounding errors of float32 sums over 150,000 tokens


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

    An invalid draft token becomes padding, together with all nodes below it; the other nodes keep their indices. A
    draft has a column for the root and one for each token of the largest limit; further columns are cut off. Nodes
    beyond the declared depth and width are removed. If the tensors have a wrong type, shape or batch size, only the
    roots are left. The values of a valid draft do not change; on a CPU, `kernels` check it faster and make `known`.
    """
    assert len(limits) == roots.shape[0], f"{len(limits)} limits for {roots.shape[0]} sequences"
    if not well_formed(tree, roots):
        return DraftTree.bare(roots)
    bounds = [(limit.depth, limit.width, limit.nodes if limit.depth > 0 else 0) for limit in limits]
    deepest, widest, most = (max(column) for column in zip(*bounds, strict=True))
    columns = min(1 + most, tree.tokens.shape[1])
    depth, width = min(tree.depth, deepest, columns - 1), max(1, min(tree.width, widest, columns - 1))
    if depth <= 0:
        return DraftTree.bare(roots)
    all_columns = columns == tree.tokens.shape[1]
    if kernels is not None and all_columns:
        known = _known_if_valid(tree, roots, bounds, (depth, width, vocab), kernels)
        if known is not None:
            return DraftTree(tree.tokens, tree.parents, depth, width, known=known)
    counts = _unseen_counts(tree, len(roots), columns)
    if counts is not None and tree.q is None:
        fitting = [min(d, n, count) for (d, _, n), count in zip(bounds, counts, strict=True)]
        if tree.sound and all_columns and fitting == counts:
            return tree
        return _unseen_chains(tree, roots, fitting, vocab)
    tokens = torch.cat([roots[:, None], tree.tokens[:, 1:columns]], dim=1)
    parents = tree.parents[:, :columns]
    sound = _sound(tokens, parents, vocab)
    if counts is not None:  # the host lays out the pass for chains of these lengths, so they must be chains
        bounds = [(d, w, min(n, count)) for (d, w, n), count in zip(bounds, counts, strict=True)]
        sound &= parents == torch.arange(columns, device=parents.device) - 1
    keep, late = _within(sound, parents, upload(bounds, torch.long, tokens.device), depth, width)
    distrusted = (tree.tokens[:, 0] != roots) | (~sound & ((tokens != -1) | (parents != -1)))[:, 1:].any(1)
    if width > 1:
        distrusted = distrusted | late.any(1) | (tree.tokens[:, columns:] >= 0).any(1)
    tokens = torch.where(keep, tokens, -1)
    parents = torch.where(keep & sound, parents, -1)
    q = None if tree.q is None else _trusted_law(tree.q, parents, distrusted, vocab)
    known = None if counts is None else [HostTree.unseen(count) for count in counts]
    return DraftTree(tokens, parents, depth, width, q, known, widths=[min(width, limit.width) for limit in limits])


def _known_if_valid(
    tree: DraftTree,
    roots: Int[Tensor, " batch"],
    limits: Sequence[tuple[int, int, int]],
    bounds: tuple[int, int, int],
    kernels: SamplingKernels,
) -> list[HostTree] | None:
    """The host trees of a draft that the kernels find valid; None for others, and for drafts that they cannot check:
    those with a law, those on a device, and those whose tokens the host does not know."""
    tokens, parents = tree.tokens, tree.parents
    packed = tokens.is_contiguous() and parents.is_contiguous() and roots.is_contiguous()
    if tree.q is not None or tree.unseen or not packed or not tokens.is_cpu or tokens.dtype != torch.int64:
        return None
    columns = kernels.clean(tokens, parents, roots, limits, bounds)
    return None if columns is None else [HostTree.in_columns(*row) for row in zip(*columns, strict=True)]


def _unseen_counts(tree: DraftTree, batch: int, columns: int) -> list[int] | None:
    """The lengths of the chains of a draft whose tokens the host does not know; None for any other draft."""
    if tree.known is None or not tree.unseen or len(tree.known) != batch or tree.width != 1:
        return None
    counts = [min(len(known.tokens), columns) - 1 for known in tree.known]
    return counts if min(counts) >= 0 else None


def _unseen_chains(tree: DraftTree, roots: Int[Tensor, " batch"], counts: Sequence[int], vocab: int) -> DraftTree:
    """The first `counts[i]` tokens of each chain, up to the first invalid one. Needs few kernel launches."""
    longest = max(counts)
    draft_tokens, step = tree.tokens[:, 1 : 1 + longest], torch.arange(longest, device=roots.device)
    sound = (draft_tokens >= 0) & (draft_tokens < vocab) & (tree.parents[:, 1 : 1 + longest] == step)
    if min(counts) < longest:
        sound &= step < upload(counts, torch.long, roots.device)[:, None]
    chains = DraftTree.chains(roots, torch.where(sound, draft_tokens, -1))
    return replace(chains, known=[HostTree.unseen(count) for count in counts], widths=[1] * len(counts))


def well_formed(tree: DraftTree, roots: Int[Tensor, " batch"]) -> bool:
    """Whether these are two integer matrices of one shape, with a row per sequence. Needs no data from the device."""
    tokens, parents = tree.tokens, tree.parents
    same_dtype = tokens.dtype == parents.dtype == roots.dtype
    same_device = tokens.device == parents.device == roots.device
    same_shape = tokens.ndim == 2 and tokens.shape == parents.shape and tokens.shape[0] == roots.shape[0]
    return same_dtype and same_device and same_shape and tokens.shape[1] > 0


def _sound(
    tokens: Int[Tensor, "batch nodes"], parents: Int[Tensor, "batch nodes"], vocab: int
) -> Bool[Tensor, "batch nodes"]:
    """Nodes that are valid regardless of limits: a token in range that no earlier sibling has, and an earlier parent
    that is not padding."""
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
    """(nodes that stay, roots included; nodes removed only because of the limit on their number)."""
    node = torch.arange(sound.shape[1], device=sound.device).expand_as(sound)
    deepest, widest, most = bounds.unbind(1)
    rank = _num_equal_before(torch.where(sound, parents, -1 - node))
    above = torch.where(sound & (rank < widest.clamp_max(width)[:, None]), parents, node)  # others stay at themselves
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


def _trusted_law(
    q: DraftLaw, parents: Int[Tensor, "batch nodes"], distrusted: Bool[Tensor, " batch"], vocab: int
) -> DraftLaw | None:
    """The declared law, removed from sequences that cannot have been sampled from it; None if it is malformed."""
    columns = parents.shape[1]
    if not _well_formed_law(q, parents, vocab):
        return None
    num_rows, ids, row = len(q.probs), q.ids, q.row[:, :columns]
    mass = q.probs.sum(1)  # NaN or infinite if any probability is
    good = (q.probs >= 0).all(1) & ((mass - 1).abs() <= MASS_TOLERANCE)
    if ids is not None:
        ordered = ids.sort(1).values
        good &= ((ids >= 0) & (ids < vocab)).all(1) & (ordered[:, 1:] != ordered[:, :-1]).all(1)
        ids = ids.clamp(0, vocab - 1)
    parent = torch.zeros(len(parents), columns + 1, dtype=torch.bool, device=parents.device)
    parent.scatter_(1, torch.where(parents >= 0, parents, columns), True)
    known = (row >= -1) & (row < num_rows)
    wrong = ~known | ((row >= 0) & ~good[row.clamp(0, num_rows - 1)])
    distrusted = distrusted | (wrong & parent[:, :columns]).any(1)
    return DraftLaw(torch.where(distrusted[:, None] | ~known, -1, row), q.probs, ids)


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
