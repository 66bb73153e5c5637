"""Proposal: a round's plan, and what a drafter guesses for it.

This file decides what the controller and the drafter are told of a round. The engine decides what of the guesses is
judged.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.cache.paged import PagedCache
from forerun.control.controller import Controller, Load
from forerun.draft.base import Budget, Draft, Drafter
from forerun.engine.constrained import guessing_room
from forerun.engine.scheduler import RowPlan
from forerun.sampling.draws import Draws


@dataclass(frozen=True, slots=True)
class Round:
    """One round's plan: all rows that are read, and those of them that draw a token, with their randomness."""

    rows: Seq[RowPlan]
    drawing: Seq[RowPlan]
    draws: Draws

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens read without being drawn from."""
        return sum(row.num_chunk for row in self.rows)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The guesses, and what they were asked for with."""

    load: Load
    budgets: Seq[Budget]
    draft: Draft


def propose(
    drafter: Drafter, controller: Controller, cache: PagedCache, plan: Round, forced: Seq[Seq[int]]
) -> Proposal | None:
    """What the drafter guesses, as far as the controller allows, beside `forced` tokens; None for nothing."""
    seq_ids = plan.draws.seq_ids
    load = Load(
        seq_ids=seq_ids,
        wishes=[row.sequence.speculation for row in plan.drawing],
        rooms=[guessing_room(row, chain) for row, chain in zip(plan.drawing, forced, strict=True)],
        num_prompt_tokens=plan.num_prompt_tokens,
        num_context=sum(len(row.sequence.tokens) for row in plan.drawing),
    )
    if controller.rests(load):
        return None
    needed = dict(zip(seq_ids, map(len, forced), strict=True))
    counts = [row.num_certain + needed.get(row.sequence.id, 0) for row in plan.rows]
    spare = cache.spare([row.sequence.id for row in plan.rows], counts)
    budgets = controller.budgets(load, drafter.outlook(seq_ids), spare)
    if not any(budget.depth for budget in budgets):
        return None
    return Proposal(load, budgets, drafter.propose(plan.draws, budgets))
