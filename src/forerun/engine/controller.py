"""Controller: how far to draft, per sequence and round.

Decides budgets from what is known before the round's tokens are drawn, and learns from outcomes. Knows nothing of
models or of what caches hold; it sees loads, outlooks, spare room and counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forerun.accept.outcome import Outcome
from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.draft.base import NO_DRAFT, Budget, Draft, Outlook
from forerun.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Load:
    """The round to come: one entry per sequence that will draw tokens.

    `wishes` is what each request asked for; `rooms` the deepest draft that could still be emitted in full;
    `num_prompt_tokens` are read in the same pass.
    """

    seq_ids: Sequence[int]
    wishes: Sequence[Speculation]
    rooms: Sequence[int]
    num_prompt_tokens: int


@runtime_checkable
class Controller(Protocol):
    """Decides how far drafting pays."""

    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        """One budget per sequence of the load; together their `slots_of` fit into what the cache has to spare."""
        ...

    def admit(self, draft: Draft, load: Load) -> DraftTree:
        """What of the draft is verified.

        It sees the drawn tokens, so a tree that it changes is judged by `follow`, which is exact for any choice: the
        drafter's law would no longer be the law of what is left.
        """
        ...

    def record(self, outcome: Outcome) -> None:
        """Learn what a round gave."""
        ...


class FixedDepth:
    """Every request is drafted as far as it wished, within what fits."""

    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        """The wishes, cut to rooms, the drafter's limits and, the youngest first, the spare room."""
        budgets, num_blocks = [], spare.num_blocks
        for seq_id, wish, room, limit in zip(load.seq_ids, load.wishes, load.rooms, outlook.limit, strict=True):
            budget = Budget.of(wish, min(room, limit))
            needed = spare.blocks_for(seq_id, slots_of(budget))
            if needed > num_blocks:
                budget, needed = NO_DRAFT, 0
            budgets.append(budget)
            num_blocks -= needed
        return budgets

    def admit(self, draft: Draft, load: Load) -> DraftTree:
        """All of it."""
        return draft.tree

    def record(self, outcome: Outcome) -> None:
        """A fixed depth learns nothing."""


def slots_of(budget: Budget) -> int:
    """Cache slots a draft may take beyond its root's: its nodes, and the chain on which a branching path is laid."""
    if budget.depth == 0:
        return 0
    return budget.nodes + (budget.depth + 1 if budget.width > 1 else 0)
