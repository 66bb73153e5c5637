"""Controller: the draft budgets of each round, by sequence.

Budgets are decided before the round's tokens are drawn, from the load, the drafter's outlook, the free cache slots and
the outcomes of earlier rounds; models and caches are not involved.
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
    """The next round, with one entry per sequence that samples a token in it.

    `speculations` are the requests' settings; `rooms` the deepest drafts that could still be emitted in full.
    `num_prompt_tokens` are prefilled in the same pass; `num_context` is the total length of the sequences.
    """

    seq_ids: Sequence[int]
    speculations: Sequence[Speculation]
    rooms: Sequence[int]
    num_prompt_tokens: int
    num_context: int = 0

    @property
    def reads(self) -> bool:
        """Whether the round also prefills prompts."""
        return self.num_prompt_tokens > 0


@runtime_checkable
class Controller(Protocol):
    """Decides how deep each sequence is drafted."""

    def skips(self, load: Load) -> bool:
        """Whether nothing is drafted in this round, in which case the drafter's outlook is not needed."""
        ...

    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        """One budget per sequence of the load; the sum of their `slots_of` fits into the free cache slots."""
        ...

    def admit(self, draft: Draft, load: Load) -> DraftTree:
        """The part of the draft that is verified.

        Choosing it after the tokens were drawn changes their distribution. A changed tree is therefore verified without
        the drafter's law (`q`), which is exact for any choice.
        """
        ...

    def record(self, outcome: Outcome) -> None:
        """Learn from the outcome of a round."""
        ...

    def plain_s(self, num_rows: int) -> float | None:
        """Expected seconds of the last round without drafts, for `num_rows` sequences; None if unknown."""
        ...


class FixedDepth:
    """Drafts every request to its requested depth, if cache slots allow; by the merged mix if it names no member."""

    def skips(self, load: Load) -> bool:
        """Whether no request wants drafts."""
        return not any(each.depth for each in load.speculations)

    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        """The requested depths, cut to the rooms, the drafter's limits and, the youngest first, the free slots."""
        names = [*outlook.drafters, MERGED] if outlook.drafters else []
        budgets = []
        for each, room, limit in zip(load.speculations, load.rooms, outlook.limit, strict=True):
            budget = Budget.of(each, min(room, limit))
            if names and budget.depth > 0:
                number = names.index(each.drafter) if each.drafter in names else len(outlook.drafters)
                budget = budget.merged(number) if number == len(outlook.drafters) else replace(budget, drafter=number)
            budgets.append([budget])
        return fitting(load.seq_ids, budgets, spare)

    def admit(self, draft: Draft, load: Load) -> DraftTree:
        """The whole draft is verified."""
        return draft.tree

    def record(self, outcome: Outcome) -> None:
        """Learn nothing, since no budget depends on it."""

    def plain_s(self, num_rows: int) -> float | None:
        """None: it is not known."""
        return None


def fitting(seq_ids: Sequence[int], wanted: Sequence[Sequence[Budget]], spare: Spare) -> list[Budget]:
    """For every row, the oldest first, the first of its `wanted` budgets that fits into the free cache slots."""
    budgets, num_blocks = [], spare.num_blocks
    for seq_id, options in zip(seq_ids, wanted, strict=True):
        needed = [spare.blocks_for(seq_id, slots_of(budget)) for budget in options]
        first = next((i for i, blocks in enumerate(needed) if blocks <= num_blocks), None)
        budgets.append(NO_DRAFT if first is None else options[first])
        num_blocks -= 0 if first is None else needed[first]
    return budgets


def slots_of(budget: Budget) -> int:
    """Cache slots that a draft may need beside its root's: for its nodes, and to copy the accepted path of a tree."""
    if budget.depth == 0:
        return 0
    return budget.nodes + (budget.depth + 1 if budget.width > 1 else 0)
