"""Constrained drafts: applies the grammars of requests to a round's draft trees.

Tokens that a grammar forces (it allows no other) are drafted without a drafter, and always accepted; a sequence with
forced tokens has no other draft tokens. Draft tokens that a grammar forbids are removed, since they would be rejected,
but not from sequences with a declared `q`: removing tokens after sampling changes their distribution, and the token and
block rules would no longer be lossless.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch.nn.functional import pad

from forerun.cache.paged import PagedCache
from forerun.engine.scheduler import RowPlan
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, HostTree


def forced_chains(rows: Seq[RowPlan], drawing: Seq[RowPlan], cache: PagedCache) -> list[list[int]]:
    """The tokens that the grammar of each drawing row forces next; none for all rows if the cache is too full."""
    chains = [forced_chain(row) for row in drawing]
    num_forced = {row.sequence.id: len(chain) for row, chain in zip(drawing, chains, strict=True)}
    counts = [row.num_certain + num_forced.get(row.sequence.id, 0) for row in rows]
    if any(chains) and not cache.can_reserve([row.sequence.id for row in rows], counts):
        return [[] for _ in drawing]
    return chains


def forced_chain(row: RowPlan) -> list[int]:
    """The tokens that a row's grammar forces next; none for a request without speculation."""
    sequence = row.sequence
    if sequence.constraint is None or row.num_chunk or not sequence.speculation.depth:
        return []
    return sequence.constraint.forced(sequence.room - 1)


def constrained_tree(tree: DraftTree, draws: Draws, forced: Seq[Seq[int]]) -> DraftTree:
    """The tree without draft tokens that grammars forbid; a row with a `forced` chain has this chain instead.

    Rows with a declared law do not change. If only the device knows the draft tokens, the host waits for them.
    """
    law = tree.rows_with_law()
    has_law = [False] * len(draws.rows) if law is None else law.tolist()
    before, after = tree.fetched(), list[HostTree]()
    for row, (host, chain) in enumerate(zip(before, forced, strict=True)):
        if chain:
            after.append(HostTree([host.tokens[0], *chain], list(range(-1, len(chain))), forced=True))
        else:
            after.append(host if has_law[row] else permitted(host, draws, row))
    if not tree.unseen and all(new is old for new, old in zip(after, before, strict=True)):
        return tree
    return rebuilt(tree, after, max([tree.depth, *map(len, forced)]))


def permitted(host: HostTree, draws: Draws, row: int) -> HostTree:
    """A row's tree without the nodes that its grammar forbids; the columns of the other nodes do not change."""
    constraint = draws.rows[row].constraint
    if constraint is None:
        return host
    paths = {0: constraint.suffix(draws.rows[row].tokens)}
    removed: list[int] = []
    for node in range(1, len(host.tokens)):
        token, parent = host.tokens[node], host.parents[node]
        if parent in paths and constraint.after(paths[parent]).permits(token):
            paths[node] = (*paths[parent], token)
        else:
            removed.append(node)
    if not removed:
        return host
    kept, places = list(paths), host.places
    number = {node: i for i, node in enumerate(kept)}
    return replace(
        host.subtree(kept),
        columns=[places[node] for node in kept],
        cut=[(number.get(host.parents[node], -1), places[node]) for node in removed],
    )


def rebuilt(tree: DraftTree, rows: Seq[HostTree], depth: int) -> DraftTree:
    """`tree` with these host trees as its rows, in their columns and as its `known`."""
    columns = max(tree.tokens.shape[1], *(1 + host.places[-1] for host in rows))
    tokens, parents = (torch.full((len(rows), columns), -1, dtype=torch.long) for _ in range(2))
    for row, host in enumerate(rows):
        places = list(host.places)
        tokens[row, places] = torch.tensor(host.tokens)
        parents[row, places[1:]] = torch.tensor([places[parent] for parent in host.parents[1:]], dtype=torch.long)
    q = tree.q
    if q is not None:
        q = replace(q, row=pad(q.row, (0, columns - q.row.shape[1]), value=-1))
    return replace(tree, tokens=tokens, parents=parents, depth=depth, q=q, known=rows)
