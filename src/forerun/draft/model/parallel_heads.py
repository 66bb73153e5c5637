"""Chains and trees of drafters that say, in one computation, what follows any guesses of theirs.

Heads and blocks look several tokens ahead at once: the logits behind some guesses are a function of the row and of the
guesses, and nothing has to be read into a cache first. This module decides how drafts grow from such a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from forerun.draft.base import Budget, Draft
from forerun.draft.model.chain_steps import seen_chains
from forerun.draft.model.grower import Growth, NodeToExpand, expand
from forerun.models.chains import Start
from forerun.sampling.draws import Draws

Paths = Sequence[Sequence[int]]
LogitsAhead = Callable[[Sequence[int], Paths], Tensor]  # behind these guesses of these rows, equally many of each
ConfidenceAhead = Callable[[Sequence[int], Paths], Sequence[float]]  # that the first guess there is accepted


def first_places(draws: Draws, granted: Mapping[int, Budget]) -> Mapping[int, int]:
    """By row, where a sequence's logits begin among those of all guesses that were granted, which are packed."""
    rows = {seq_id: row for row, seq_id in enumerate(draws.seq_ids)}
    starts = accumulate((budget.depth for budget in granted.values()), initial=0)
    return dict(zip((rows[seq_id] for seq_id in granted), starts, strict=False))


def grow_ahead(
    draws: Draws, budgets: Sequence[Budget], logits: LogitsAhead, confidence: ConfidenceAhead | None = None
) -> Draft:
    """A draft within one budget for each row of `draws`; one of them at least is above 0.

    Chains under coupled verification on the host are drawn step by step; everything else grows as trees do.
    """
    rows = [row for row, budget in enumerate(budgets) if budget.depth]
    first = logits(rows, [()] * len(rows))
    own_budgets = [budgets[row] for row in rows]
    chains = all(budget.width == 1 and (not budget.price or confidence is None) for budget in own_budgets)
    if draws.on_host and not draws.rejection and chains:
        starts = [
            Start(row, draws.seq_ids[row], min(budget.depth, budget.nodes), budget.price)
            for row, budget in zip(rows, own_budgets, strict=True)
        ]
        row_of = {draws.seq_ids[row]: row for row in rows}
        paths: dict[int, list[int]] = {row: [] for row in rows}

        def read_on(seq_ids: Sequence[int], tokens: Sequence[int]) -> Tensor:
            active = [row_of[seq_id] for seq_id in seq_ids]
            for row, token in zip(active, tokens, strict=True):
                paths[row].append(token)
            return logits(active, [paths[row] for row in active])

        chains_drawn = seen_chains(draws, starts, first, read_on)
        return Draft(chains_drawn.tree(draws), chains_drawn.chances())

    def read_nodes(growths: Sequence[Growth], places: Sequence[NodeToExpand]) -> Tensor:
        return logits([place.row for place in places], paths_to(growths, places))

    def sure(growths: Sequence[Growth], places: Sequence[NodeToExpand]) -> Sequence[float]:
        assert confidence is not None, "it is asked where the drafter estimates it"
        return confidence([place.row for place in places], paths_to(growths, places))

    return expand(draws, budgets, first, read_nodes, sure if confidence else None)


def paths_to(growths: Sequence[Growth], places: Sequence[NodeToExpand]) -> Paths:
    """The guesses that lead to these nodes."""
    trees = [growths[place.row] for place in places]
    return [growth.along(growth.tokens, place.node) for growth, place in zip(trees, places, strict=True)]
