"""Merging: the trees that several drafters guessed for one sequence become one tree of the likeliest paths.

This module decides which paths are the same, with which survival, and which of them stay: after SpecInfer (Miao et al.,
2305.09781), which joins whole trees.

If survival is estimated correctly, the sum of a tree's survival is its expected number of accepted guesses. A path here
has at least the survival that any member gives it, and at most that of the path it continues. So taking the likeliest
next path n times finds the likeliest n of all, and their sum is at least that of any member's own n.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft.base import Budget


@dataclass(slots=True)
class Branches:
    """One sequence's tree on the host, root first: of each node its token, parent, survival and who guessed it."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    survival: list[float] = field(default_factory=lambda: [1.0])
    drafters: list[int] = field(default_factory=lambda: [-1])

    def add(self, token: int, parent: int, survival: float, drafter: int) -> int:
        """Append a guess; its number. It survives with no more than its parent, and with nothing if that is unknown."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.survival.append(min(max(survival, 0.0), self.survival[parent]) if survival == survival else 0.0)
        self.drafters.append(drafter)
        return len(self.tokens) - 1


def merge(trees: Sequence[Branches], budget: Budget) -> Branches:
    """The likeliest paths of all trees, within the budget's depth, width and number of guesses; all have one root.

    The likeliest come first. Among equals what comes first is what stands first in the trees, and in the first of them.
    """
    whole, below = union(trees)
    merged = Branches([whole.tokens[0]], drafters=[whole.drafters[0]])
    depths, widths = [0], [0]
    # minus survival, node of the union, its parent in what is merged
    heap = [(-whole.survival[child], child, 0) for child in below[0].values()]
    heapq.heapify(heap)
    while heap and len(merged.tokens) <= budget.nodes:
        minus, node, parent = heapq.heappop(heap)
        if widths[parent] == budget.width or -minus < budget.price:
            continue
        at = merged.add(whole.tokens[node], parent, -minus, whole.drafters[node])
        widths[parent] += 1
        widths.append(0)
        depths.append(depths[parent] + 1)
        for child in below[node].values() if depths[at] < budget.depth else ():
            heapq.heappush(heap, (-whole.survival[child], child, at))
    return merged


def union(trees: Sequence[Branches]) -> tuple[Branches, list[dict[int, int]]]:
    """All paths, each of them once, and the children of each node by their tokens.

    A path survives with what the most confident says, and counts as guessed by the first who guessed it.
    """
    whole, below = Branches(trees[0].tokens[:1]), list[dict[int, int]]([{}])
    for tree in trees:
        place = [0]
        for node in range(1, len(tree.tokens)):
            token, parent = tree.tokens[node], place[tree.parents[node]]
            known = below[parent].get(token)
            if known is None:
                known = below[parent][token] = whole.add(token, parent, tree.survival[node], tree.drafters[node])
                below.append({})
            else:
                survival = max(whole.survival[known], tree.survival[node])
                whole.survival[known] = min(survival, whole.survival[parent])
            place.append(known)
    return whole, below
