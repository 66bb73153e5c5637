"""Chains from a model's logits, token by token, for draws on the host.

This module decides which rows are drafted at each step. It does what `expand` does with a width of 1, but without
trees: a small model's step is so short that laying out trees would take as long. A callback reads the tokens with the
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from forerun.annotations import Float
from forerun.draft.base import Budget
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree


@runtime_checkable
class ReadTokens(Protocol):
    """Reads one more token of each of these rows of the round, and gives the logits after them; None: no room."""

    def __call__(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor | None: ...


def are_plain_chains(draws: Draws, budgets: Sequence[Budget]) -> bool:
    """Whether only chains are asked for, without a law or a price, and the host may have each token at once."""
    return draws.on_host and not draws.rejection and all(b.width == 1 and b.price == 0 for b in budgets)


def grow_chains(
    draws: Draws, budgets: Mapping[int, Budget], logits: Float[Tensor, "drafted vocab"], read: ReadTokens
) -> DraftTree:
    """A chain for every row with a budget, the root alone for others; `logits` are those after the roots of the former.

    A chain ends where its budget says, where the draws offer nothing, or where there is no room to read on.
    """
    chains = [[row.tokens[-1]] for row in draws.rows]
    most = {row: min(budget.depth, budget.nodes) for row, budget in budgets.items()}
    active, level = [row for row in sorted(most) if most[row] > 0], 0
    while active:
        level += 1
        drawn = draws.guess(logits, active, [chains[row][1:] for row in active])
        offered = [(row, token) for row, token in zip(active, drawn, strict=True) if token >= 0]
        for row, token in offered:
            chains[row].append(token)
        ahead = [(row, token) for row, token in offered if most[row] > level]
        active = [row for row, _ in ahead]
        read_on = read(active, [token for _, token in ahead]) if ahead else None
        if read_on is None:
            break
        logits = read_on
    return DraftTree.of_texts(chains)
