"""Controller: how far to draft, per sequence and round.

This module decides budgets from what is known before the round's tokens are drawn, and learns from outcomes. It uses
loads, outlooks, free slots and counts; models and caches are not involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from forerun.accept.outcome import Outcome
from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.draft.base import MERGED, NO_DRAFT, Budget, Draft, Outlook
from forerun.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Load:
    """The round to come: one entry per sequence that will draw tokens.

    `speculations` is what each request asked for; `rooms` the deepest draft that could still be emitted in full;
    `num_prompt_tokens` are read in the same pass, and `num_context` are in the texts together.
    """

    seq_ids: Sequence[int]
    speculations: Sequence[Speculation]
    rooms: Sequence[int]
    num_prompt_tokens: int
    num_context: int = 0

    @property
    def reads(self) -> bool:
        """Whether prompts are read in the round."""
        return self.num_prompt_tokens > 0


@runtime_checkable
class Controller(Protocol):
    """Decides how far drafting pays."""

    def skips(self, load: Load) -> bool:
        """Whether nothing will be drafted, whatever the drafter's outlook: it is not asked for one then."""
        ...

    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        """One budget per sequence of the load; together their `slots_of` fit into what the cache has to spare."""
        ...

    def admit(self, draft: Draft, load: Load) -> DraftTree:
        """The part of the draft that is verified.

        It sees the drawn tokens, so a tree that it changes is judged by `follow`, which is exact for any choice: the
        drafter's law would no longer be the law of what is left.
        """
        ...

    def record(self, outcome: Outcome) -> None:
        """Learn from a round."""
        ...

    def plain_s(self, num_rows: int) -> float | None:
        """Seconds that the last round would have taken without drafts, if so many rows drew in it; None if unknown."""
        ...


class FixedDepth:
    """Every request is drafted as far as it wished, within what fits; by all members of a mix, if it names none."""

    def skips(self, load: Load) -> bool:
        """Where nobody wishes for anything."""
        return not any(each.depth for each in load.speculations)

    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        """The wishes, cut to rooms, the drafter's limits and, the youngest first, the spare room."""
        names = [*outlook.drafters, MERGED] if outlook.drafters else []
        budgets = []
        for each, room, limit in zip(load.speculations, load.rooms, outlook.limit, strict=True):
            budget = Budget.of(each, min(room, limit))
            if names and budget.depth > 0:
                number = names.index(each.drafter) if each.drafter in names else len(outlook.drafters)
                budget = budget.merging(number) if number == len(outlook.drafters) else replace(budget, drafter=number)
            budgets.append([budget])
        return fitting(load.seq_ids, budgets, spare)

    def admit(self, draft: Draft, load: Load) -> DraftTree:
        """All of it is verified."""
        return draft.tree

    def record(self, outcome: Outcome) -> None:
        """Does nothing: no budget depends on it."""

    def plain_s(self, num_rows: int) -> float | None:
        """It is not known."""
        return None


def fitting(seq_ids: Sequence[int], wanted: Sequence[Sequence[Budget]], spare: Spare) -> list[Budget]:
    """For every row the first of the budgets that it wants which fits into the spare room, the oldest rows first."""
    budgets, num_blocks = [], spare.num_blocks
    for seq_id, options in zip(seq_ids, wanted, strict=True):
        needed = [spare.blocks_for(seq_id, slots_of(budget)) for budget in options]
        first = next((i for i, blocks in enumerate(needed) if blocks <= num_blocks), None)
        budgets.append(NO_DRAFT if first is None else options[first])
        num_blocks -= 0 if first is None else needed[first]
    return budgets


def slots_of(budget: Budget) -> int:
    """Cache slots a draft may take beyond its root's: its nodes, and the chain on which a branching path is laid."""
    if budget.depth == 0:
        return 0
    return budget.nodes + (budget.depth + 1 if budget.width > 1 else 0)
