"""A draft model's chains, drawn on the device: the host lays out every step before it knows any token.

This module decides when that is possible and what is read at each step. Budgets alone decide where chains end, so
slots, positions and tables need no tokens. The tokens stay on the device, from one step's draw to the next step's read
and on to the target's pass, and are downloaded without waiting. Where a draw needs the host (a request's own
processors) or a shape depends on what was drawn (trees, prices), `expand` drafts level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.device import Download, upload
from forerun.draft.base import Budget
from forerun.models.runner import DeviceTokens, Read
from forerun.sampling.draws import Draws, PathState
from forerun.tree import DraftLaw, DraftTree, HostView

ReadOn = Callable[[Sequence[Read], DeviceTokens], Tensor | None]  # the logits asked for; None: no room


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence to be drafted: its row in the round, its id, and how deep."""

    row: int
    seq_id: int
    depth: int


@dataclass(slots=True)
class Chains:
    """What was drawn: the guesses of every row of the round, -1 where there are fewer, and how many were read."""

    guesses: Int[Tensor, "batch depth"]
    counts: list[int]  # guesses of each row
    num_read: dict[int, int]  # by sequence: guesses that lie in its tail
    laws: list[Tensor] = field(default_factory=list)
    law_row: list[list[int]] = field(default_factory=list)  # by row and guess: where its law is packed

    def tree(self, draws: Draws) -> DraftTree:
        """The guesses as a tree on the device, of which the host knows the shape."""
        tree = DraftTree.chains(draws.roots_tokens, self.guesses, self.law(draws))
        return replace(tree, known=HostView.chains(self.counts))

    def law(self, draws: Draws) -> DraftLaw | None:
        """The laws that the guesses were drawn from, by the node that they follow; rejection modes only."""
        if not self.laws:
            return None
        rows = [
            [-1 if greedy else at for at in row] + [-1] for row, greedy in zip(self.law_row, draws.greedy, strict=True)
        ]
        return DraftLaw(upload(rows, torch.long, draws.device), torch.cat(self.laws))


def can_draw_unseen(draws: Draws, budgets: Sequence[Budget]) -> bool:
    """Whether only chains are asked for whose ends and draws do not need the host."""
    return all(b.width == 1 and b.price == 0 for b in budgets) and not any(
        row.params.logits_processors for row in draws.rows
    )


def draw_chains(draws: Draws, starts: Sequence[Start], logits: Float[Tensor, "starts vocab"], read: ReadOn) -> Chains:
    """Draw a guess after each root, read it, draw the next, ...; `logits` are those after the roots of `starts`.

    A chain ends where its depth says, or where the cache has no room to read on.
    """
    batch, deepest = len(draws.rows), max(start.depth for start in starts)
    guesses = torch.full((batch, deepest), -1, dtype=torch.long, device=draws.device)
    chains = Chains(guesses, [0] * batch, {})
    chains.law_row = [[-1] * deepest for _ in range(batch)]
    active = list(starts)
    at = some(draws.roots(), [start.row for start in active])
    for level in range(deepest):
        children = draws.children(logits, at, 1, survival=False)
        rows = upload([start.row for start in active], torch.long, draws.device)
        chains.guesses[rows, level] = children.tokens[:, 0]
        note(chains, active, level, children.law)
        ahead = [i for i, start in enumerate(active) if start.depth > level + 1]
        if not ahead:
            break
        kept = upload(ahead, torch.long, draws.device)
        at = draws.advance(at, kept, children.tokens[kept, 0].clamp_min(0))
        active = [active[i] for i in ahead]
        source = [start.row * deepest + level for start in active]
        reads = [Read(start.seq_id, [-1], judged=[0]) for start in active]
        logits_ahead = read(reads, DeviceTokens(chains.guesses, source))
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


@dataclass(frozen=True, slots=True)
class UnseenGuesses:
    """Guesses of one sequence that were read into its tail before the host saw them."""

    guesses: Download
    row: int
    num_read: int

    def tokens(self) -> list[int]:
        """The guesses, once the device has drawn them."""
        found: list[int] = self.guesses.values()[self.row][: self.num_read]
        return found
