"""A model's chains, drawn and read step by step, where it has no single call for them.

This module decides which rows are drafted at each step. It does what `expand` does with a width of 1, but without
trees: a small model's step is so short that laying out trees would take as long. On a device the host lays out every
step before it knows any token: budgets alone decide where chains end, so slots, positions and tables need no tokens.
The tokens stay there, from one step's draw to the next step's read and on to the target's pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.device import upload
from forerun.models.chains import Chains, Start
from forerun.models.runner import DeviceTokens, Read
from forerun.sampling.draws import Draws, PathState

ReadTokens = Callable[[Sequence[int], Sequence[int]], Tensor | None]  # of sequences; the logits, or None: no room
ReadUnseen = Callable[[Sequence[Read], DeviceTokens], Tensor | None]


def seen_chains(
    draws: Draws, starts: Sequence[Start], logits: Float[Tensor, "starts vocab"], read: ReadTokens
) -> Chains:
    """A chain for every start, each token of which the host has at once; `logits` are those after their roots.

    A chain ends where its depth says, where the draws offer nothing, before a guess that is not worth its price, or
    where there is no room to read on.
    """
    chains = Chains([0] * len(draws.rows), {}, texts=[[row.tokens[-1]] for row in draws.rows])
    assert chains.texts is not None, "they are known to the host"
    priced = any(start.price for start in starts)
    chains.survival = {start.row: [] for start in starts} if priced else {}
    active, level = starts, 0
    while active:
        level += 1
        rows = [start.row for start in active]
        paths = [chains.texts[row][1:] for row in rows]
        drawn = worth(draws, active, logits, paths, chains.survival) if priced else draws.guess(logits, rows, paths)
        offered = [(start, token) for start, token in zip(active, drawn, strict=True) if token >= 0]
        for start, token in offered:
            chains.add(start, [token], level - 1)
        ahead = [(start, token) for start, token in offered if start.depth > level]
        active = [start for start, _ in ahead]
        seq_ids = [start.seq_id for start in active]
        read_on = read(seq_ids, [token for _, token in ahead]) if ahead else None
        if read_on is None:
            break
        chains.num_read |= dict.fromkeys(seq_ids, level)
        logits = read_on
    return chains


def worth(
    draws: Draws,
    starts: Sequence[Start],
    logits: Float[Tensor, "starts vocab"],
    paths: Sequence[Sequence[int]],
    survival: Mapping[int, list[float]],
) -> Sequence[int]:
    """The next guess of every chain, or -1 where it survives with too little; what survives is added by row."""
    offer, guesses = draws.offer(logits, [start.row for start in starts], paths, 1), []
    assert offer.survival is not None, "it was asked for"
    for start, tokens, shares in zip(starts, offer.tokens, offer.survival, strict=True):
        chances = survival[start.row]
        chance = shares[0] * (chances[-1] if chances else 1.0)
        guesses.append(tokens[0] if chance >= start.price else -1)
        if guesses[-1] >= 0:
            chances.append(chance)
    return guesses


def unseen_chains(
    draws: Draws, starts: Sequence[Start], logits: Float[Tensor, "starts vocab"], read: ReadUnseen
) -> Chains:
    """Chains that stay on the device. One ends where its depth says, or where there is no room to read on."""
    batch, deepest = len(draws.rows), max(start.depth for start in starts)
    guesses = torch.full((batch, deepest), -1, dtype=torch.long, device=draws.device)
    chains = Chains([0] * batch, {}, guesses=guesses, law_row=[[-1] * deepest for _ in range(batch)])
    active = list(starts)
    at = some(draws.roots(), [start.row for start in active])
    for level in range(deepest):
        children = draws.children(logits, at, 1, survival=False)
        rows = upload([start.row for start in active], torch.long, draws.device)
        guesses[rows, level] = children.tokens[:, 0]
        note(chains, active, level, children.law)
        ahead = [i for i, start in enumerate(active) if start.depth > level + 1]
        if not ahead:
            break
        kept = upload(ahead, torch.long, draws.device)
        at = draws.advance(at, kept, children.tokens[kept, 0].clamp_min(0))
        active = [active[i] for i in ahead]
        source = [start.row * deepest + level for start in active]
        reads = [Read(start.seq_id, [-1], judged=[0]) for start in active]
        logits_ahead = read(reads, DeviceTokens(guesses, source))
        if logits_ahead is None:
            break
        logits = logits_ahead
        chains.num_read |= {start.seq_id: level + 1 for start in active}
    return chains


def note(chains: Chains, active: Sequence[Start], level: int, law: Tensor | None) -> None:
    """Record a level's guesses, and where its laws are packed."""
    first = sum(map(len, chains.laws))
    for i, start in enumerate(active):
        chains.counts[start.row] = level + 1
        if law is not None:
            chains.law_row[start.row][level] = first + i
    if law is not None:
        chains.laws.append(law)


def some(at: PathState, rows: Sequence[int]) -> PathState:
    """Some of the states, in the order asked for."""
    index = upload(rows, torch.long, at.row.device)
    return PathState(at.row[index], at.drawn[index], at.position[index])
