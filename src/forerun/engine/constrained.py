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
from forerun.tree import DraftTree, HostTree


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
    seen, kept = tree.fetched(), list[HostTree]()
    for row, (host, chain) in enumerate(zip(seen, forced, strict=True)):
        if chain:
            kept.append(HostTree([host.tokens[0], *chain], list(range(-1, len(chain))), forced=True))
        else:
            kept.append(host if lawful[row] else permitted(host, draws, row))
    if not tree.unseen and all(left is host for left, host in zip(kept, seen, strict=True)):
        return tree
    return rebuilt(tree, kept, max([tree.depth, *map(len, forced)]))


def permitted(host: HostTree, draws: Draws, row: int) -> HostTree:
    """What of a row its grammar allows; it stands where it stood."""
    constraint = draws.rows[row].constraint
    if constraint is None:
        return host
    paths, cut = {0: constraint.behind(draws.rows[row].tokens)}, list[int]()
    for node in range(1, len(host.tokens)):
        token, parent = host.tokens[node], host.parents[node]
        if parent in paths and constraint.after(paths[parent]).permits(token):
            paths[node] = (*paths[parent], token)
        else:
            cut.append(node)
    if not cut:
        return host
    kept, places = list(paths), host.places
    number = {node: i for i, node in enumerate(kept)}
    return replace(
        host.some(kept),
        columns=[places[node] for node in kept],
        cut=[(number.get(host.parents[node], -1), places[node]) for node in cut],
    )


def rebuilt(tree: DraftTree, rows: Seq[HostTree], depth: int) -> DraftTree:
    """A tree of these rows, in the columns they had, that knows what was removed and forced."""
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
