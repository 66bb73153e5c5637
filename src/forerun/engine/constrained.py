"""Constrained drafts: what the grammars of a round change of its guesses.

This file decides which tokens are drafted because a grammar leaves no choice, which need no drafter and are always
accepted, and removes guesses that a grammar forbids, which never are. A sequence with forced tokens is drafted with
them alone: its next round drafts what comes behind. Guesses that were drawn from a law all stay: what is removed
follows from what was drawn, so the rest would not have that law any more, and the token rule and the block rule would
not be lossless.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch.nn.functional import pad

from forerun.cache.paged import PagedCache
from forerun.engine.scheduler import RowPlan
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, HostView


def forced_chains(rows: Seq[RowPlan], drawing: Seq[RowPlan], cache: PagedCache) -> list[list[int]]:
    """For each drawing row the tokens that its grammar forces next, within its room; none where memory is short."""
    chains = [forced_chain(row) for row in drawing]
    needed = {row.sequence.id: len(chain) for row, chain in zip(drawing, chains, strict=True)}
    counts = [row.num_certain + needed.get(row.sequence.id, 0) for row in rows]
    if any(chains) and not cache.can_reserve([row.sequence.id for row in rows], counts):
        return [[] for _ in drawing]
    return chains


def forced_chain(row: RowPlan) -> list[int]:
    """What the grammar of a row forces next; a request without speculation is drafted with nothing."""
    sequence = row.sequence
    if sequence.constraint is None or row.num_chunk or not sequence.speculation.depth:
        return []
    return sequence.constraint.forced(sequence.room - 1)


def constrained_tree(tree: DraftTree, draws: Draws, forced: Seq[Seq[int]]) -> DraftTree:
    """The tree without guesses that grammars forbid, and with the chains that they force behind bare roots.

    Rows with a law keep their guesses. Those that a device has drawn and the host has not seen are waited for.
    """
    law = tree.rows_with_law()
    lawful = [False] * len(draws.rows) if law is None else law.tolist()
    unseen = tree.known is not None and tree.known.tokens is None
    seen = (replace(tree, known=None) if unseen else tree).host()
    assert seen.tokens is not None, "they were looked up"
    rows = [list(zip(*nodes, strict=True)) for nodes in zip(seen.nodes, seen.parents, seen.tokens, strict=True)]
    kept = [list(nodes) if lawful[row] else permitted(nodes, draws, row) for row, nodes in enumerate(rows)]
    for nodes, chain in zip(kept, forced, strict=True):
        nodes += [(column, column - 1, token) for column, token in enumerate(chain, 1)]
    depth = max([tree.depth, *map(len, forced)])
    if kept == rows and not unseen:
        return tree
    cut = []
    for nodes, left in zip(rows, kept, strict=True):
        columns = {column for column, _, _ in left}
        cut.append([(column, parent) for column, parent, _ in nodes if column not in columns])
    return rebuilt(tree, kept, depth, cut, list(map(bool, forced)))


def permitted(nodes: Seq[tuple[int, int, int]], draws: Draws, row: int) -> list[tuple[int, int, int]]:
    """The nodes of a row, each with its column, parent and token, that its grammar allows."""
    constraint = draws.rows[row].constraint
    if constraint is None:
        return list(nodes)
    start = constraint.behind(draws.rows[row].tokens)
    paths, kept = {nodes[0][0]: start}, [nodes[0]]
    for column, parent, token in nodes[1:]:
        if parent in paths and constraint.after(paths[parent]).permits(token):
            paths[column] = (*paths[parent], token)
            kept.append((column, parent, token))
    return kept


def rebuilt(
    tree: DraftTree,
    rows: Seq[Seq[tuple[int, int, int]]],
    depth: int,
    cut: Seq[Seq[tuple[int, int]]],
    forced: Seq[bool],
) -> DraftTree:
    """A tree of these nodes, in the columns they had, that knows what was removed and forced."""
    columns = max(tree.tokens.shape[1], *(1 + max(column for column, _, _ in row_nodes) for row_nodes in rows))
    tokens, parents = (torch.full((len(rows), columns), -1, dtype=torch.long) for _ in range(2))
    for row, row_nodes in enumerate(rows):
        places = [column for column, _, _ in row_nodes]
        tokens[row, places] = torch.tensor([token for _, _, token in row_nodes])
        parents[row, places] = torch.tensor([parent for _, parent, _ in row_nodes])
    q = tree.q
    if q is not None:
        q = replace(q, row=pad(q.row, (0, columns - q.row.shape[1]), value=-1))
    nodes, above, own_tokens = ([[node[i] for node in row_nodes] for row_nodes in rows] for i in range(3))
    known = HostView(nodes, above, own_tokens, cut=cut, forced=forced)
    return replace(tree, tokens=tokens, parents=parents, depth=depth, q=q, known=known)
