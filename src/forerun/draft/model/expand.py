"""Growing token trees from a model's logits, level by level, for many sequences with different budgets.

This module decides in which order nodes are read and drawn, and how the result is laid out; `Growth` decides which
nodes get children. Each level is one pass of the model, over the nodes of all sequences. A callback reads nodes with
the model and gives their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.draft.base import Budget, Draft
from forerun.draft.model.growth import Growth, Ranks
from forerun.sampling.draws import Draws
from forerun.tree import DraftLaw, DraftTree


@dataclass(frozen=True, slots=True)
class NodeToExpand:
    """A node about to get children of these ranks, and its row in the round."""

    row: int
    node: int
    ranks: Ranks


@runtime_checkable
class ReadNodes(Protocol):
    """Reads nodes of growing trees, level by level, and gives the logits after them; None: no room for more.

    A node that was read may be missing in the tree that is grown in the end.
    """

    def __call__(self, growths: Sequence[Growth], places: Sequence[NodeToExpand]) -> Tensor | None: ...


Confidence = Callable[[Sequence[Growth], Sequence[NodeToExpand]], Sequence[float]]


def expand(
    draws: Draws,
    budgets: Sequence[Budget],
    logits: Float[Tensor, "drafted vocab"],
    read: ReadNodes,
    confidence: Confidence | None = None,
) -> Draft:
    """Grow one tree per sequence of `draws`; `logits` are those after the roots of the rows with a budget, in order.

    Trees keep within depth, width and nodes, and take at most depth - 1 further passes. Where guesses are judged by
    equality a tree is the likeliest `nodes` paths there are, by survival under the round's noise, none below the price.
    In rejection modes it carries the laws its guesses were drawn from. A width of 1 gives chains, and without a price
    the draft tells no survival. `confidence` is a drafter's own estimate, for each of these nodes, of the chance that
    its first child is accepted once it is; without it the law that children are drawn from stands for that.
    """
    growths = [Growth(b, not draws.rejection, [r.tokens[-1]]) for r, b in zip(draws.rows, budgets, strict=True)]
    draws.foresee(max((budget.depth for budget in budgets), default=0))
    laws: list[Tensor] = []
    places = next_places(growths)
    while places:
        draw_level(draws, growths, places, logits, laws, confidence)
        places = next_places(growths)
        read_on = read(growths, places) if places else None
        if read_on is None:
            break
        logits = read_on
    return assemble(draws, growths, laws)


def next_places(growths: Sequence[Growth]) -> list[NodeToExpand]:
    """The nodes that get children on the next level, with the places of each row together."""
    return [
        NodeToExpand(row, node, ranks) for row, growth in enumerate(growths) for node, ranks in growth.extend().items()
    ]


def draw_level(
    draws: Draws,
    growths: Sequence[Growth],
    places: Sequence[NodeToExpand],
    logits: Float[Tensor, "places vocab"],
    laws: list[Tensor],
    confidence: Confidence | None,
) -> None:
    """Draw the children for these places and add them to their trees."""
    rows = [place.row for place in places]
    paths = [growths[place.row].along(growths[place.row].tokens, place.node) for place in places]
    width = 1 + max(place.ranks[-1] for place in places)
    offer = draws.offer(logits, rows, paths, width, survival=survival_counts(growths))
    chances = offer.survival
    if chances is not None and confidence is not None:
        firsts = confidence(growths, places)
        chances = [with_first(own, first) for own, first in zip(chances, firsts, strict=True)]
    first_law = sum(map(len, laws))
    if offer.law is not None:
        laws.append(offer.law)
    for i, place in enumerate(places):
        growth = growths[place.row]
        if offer.law is not None and in_turn(place.ranks) and not draws.greedy[place.row]:
            growth.law_row[place.node] = first_law + i
        for rank in place.ranks:
            if (token := offer.tokens[i][rank]) >= 0:
                growth.add(place.node, rank, token, 1.0 if chances is None else chances[i][rank])


def with_first(chances: Sequence[float], first: float) -> list[float]:
    """The chances of a node's children, the first's set to this; what that leaves the others share as before."""
    left = (1.0 - first) / (1.0 - chances[0]) if chances[0] < 1.0 else 0.0
    return [first, *(left * chance for chance in chances[1:])]


def in_turn(ranks: Ranks) -> bool:
    """Whether all that is drawn stays, so that rejection rules can judge one after the other by the law."""
    return len(ranks) == 1 + ranks[-1]


def survival_counts(growths: Sequence[Growth]) -> bool:
    """Whether any tree's shape depends on survival; over a large vocabulary it costs more than the draw."""
    return any(growth.budget.width > 1 or growth.budget.price > 0 for growth in growths)


def assemble(draws: Draws, growths: Sequence[Growth], laws: Sequence[Tensor]) -> Draft:
    """The trees as they stay, padded to one size; `laws` are the packed laws of the rejection modes."""
    trees = [growth.finished() for growth in growths]
    nodes = max(len(tree.tokens) for tree in trees)

    def padded(lists: Sequence[list[int]]) -> Tensor:
        return torch.tensor([values + [-1] * (nodes - len(values)) for values in lists], device=draws.device)

    tree = DraftTree(
        tokens=padded([tree.tokens for tree in trees]),
        parents=padded([tree.parents for tree in trees]),
        depth=max(tree.depth() for tree in trees),
        width=max(tree.budget.width for tree in trees),
        q=DraftLaw(padded([tree.law_row for tree in trees]), torch.cat(list(laws))) if laws else None,
    )
    if not survival_counts(growths):
        return Draft(tree)
    chances = [tree.survival + [0.0] * (nodes - len(tree.survival)) for tree in trees]
    return Draft(tree, survival=torch.tensor(chances, dtype=torch.float32, device=draws.device))
