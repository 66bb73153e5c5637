"""Chains drawn and read step by step on a device, none of whose tokens the host sees.

The host lays out every step before it knows any token: budgets alone decide where chains end, so slots, positions and
tables need no tokens. The tokens stay on the device, from one step's draw to the next step's read and on to the
target's pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.device import upload
from forerun.models.chains import Chains, Start
from forerun.models.runner import DeviceTokens, Read
from forerun.sampling.draws import Draws, PathState
from forerun.tree import HostTree

ReadUnseen = Callable[[Sequence[Read], DeviceTokens], Tensor | None]  # the logits; None: no room


def unseen_chains(
    draws: Draws, starts: Sequence[Start], logits: Float[Tensor, "starts vocab"], read: ReadUnseen
) -> Chains:
    """A chain for every start. One ends where its depth says, or where there is no room to read on."""
    batch, deepest = len(draws.rows), max(start.depth for start in starts)
    guesses = torch.full((batch, deepest), -1, dtype=torch.long, device=draws.device)
    counts, law_rows, greedy = [0] * batch, [[-1] * (1 + deepest) for _ in range(batch)], draws.greedy
    chains = Chains([], {}, guesses=guesses)
    active = list(starts)
    roots, rows = draws.roots(), upload([start.row for start in active], torch.long, draws.device)
    at = PathState(roots.row[rows], roots.drawn[rows], roots.position[rows])
    for level in range(deepest):
        children = draws.children(logits, at, 1, survival=False)
        rows = upload([start.row for start in active], torch.long, draws.device)
        guesses[rows, level] = children.tokens[:, 0]
        first_law = sum(map(len, chains.laws))
        for i, start in enumerate(active):
            counts[start.row] = level + 1
            if children.law is not None and not greedy[start.row]:
                law_rows[start.row][level] = first_law + i
        if children.law is not None:
            chains.laws.append(children.law)
        ahead = [i for i, start in enumerate(active) if start.depth > level + 1]
        if not ahead:
            break
        kept = upload(ahead, torch.long, draws.device)
        at = draws.advance(at, kept, children.tokens[kept, 0].clamp_min(0))
        active = [active[i] for i in ahead]
        source = [start.row * deepest + level for start in active]
        reads = [Read(start.seq_id, [-1], judged=[0]) for start in active]
        read_on = read(reads, DeviceTokens(guesses, source))
        if read_on is None:
            break
        logits = read_on
        chains.num_read |= {start.seq_id: level + 1 for start in active}
    chains.trees = [replace(HostTree.unseen(n), law_rows=laws) for n, laws in zip(counts, law_rows, strict=True)]
    return chains
