"""Chains and trees of drafters that say, in one computation, what follows any guesses of theirs.

Heads and blocks look several tokens ahead at once: the logits behind some guesses are a function of the row and of the
guesses, and nothing has to be read into a cache first. This module decides how drafts grow from such a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from forerun.draft.base import Budget, Draft
from forerun.draft.model.grower import NodeToExpand, grow, paths_to
from forerun.draft.model.tree_shape import GrowingTree
from forerun.sampling.draws import Draws

Paths = Sequence[Sequence[int]]
LogitsAhead = Callable[[Sequence[int], Paths], Tensor]  # behind these guesses of these rows, equally many of each
ConfidenceAhead = Callable[[Sequence[int], Paths], Sequence[float]]  # that the first guess there is accepted


def first_places(draws: Draws, granted: Mapping[int, Budget]) -> Mapping[int, int]:
    """By row, where a sequence's logits begin among those of all guesses that were granted, which are packed."""
    rows = {seq_id: row for row, seq_id in enumerate(draws.seq_ids)}
    starts = accumulate((budget.depth for budget in granted.values()), initial=0)
    return dict(zip((rows[seq_id] for seq_id in granted), starts, strict=False))


def grow_parallel(
    draws: Draws, budgets: Sequence[Budget], logits: LogitsAhead, confidence: ConfidenceAhead | None = None
) -> Draft:
    """A draft within one budget for each row of `draws`; one of them at least is above 0."""
    rows = [row for row, budget in enumerate(budgets) if budget.depth]

    def read_nodes(growing: Sequence[GrowingTree], places: Sequence[NodeToExpand]) -> Tensor:
        return logits([place.row for place in places], paths_to(growing, places))

    def sure(growing: Sequence[GrowingTree], places: Sequence[NodeToExpand]) -> Sequence[float]:
        assert confidence is not None, "it is asked where the drafter estimates it"
        return confidence([place.row for place in places], paths_to(growing, places))

    return grow(draws, budgets, logits(rows, [()] * len(rows)), read_nodes, sure if confidence else None)
