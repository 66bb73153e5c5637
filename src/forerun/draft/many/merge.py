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

from forerun.draft.base import Budget
from forerun.tree import HostTree


def mixed_root(root: int, drafter: int) -> HostTree:
    """A tree of a mix before its first guess: who drafts it, -1 for all or none."""
    return HostTree([root], [-1], survival=[1.0], drafters=[drafter])


def add_guess(tree: HostTree, token: int, parent: int, survival: float, drafter: int) -> int:
    """Append a guess; its number. It survives with no more than its parent, and with nothing if that is unknown."""
    tree.drafters.append(drafter)
    return tree.add(token, parent, min(max(survival, 0.0), tree.survival[parent]) if survival == survival else 0.0)


def merge(trees: Sequence[HostTree], budget: Budget) -> HostTree:
    """The likeliest paths of all trees, within the budget's depth, width and number of guesses; all have one root.

    The likeliest come first. Among equals what comes first is what stands first in the trees, and in the first of them.
    """
    whole, below = union(trees)
    merged = mixed_root(whole.tokens[0], -1)
    depths, widths = [0], [0]
    # minus survival, node of the union, its parent in what is merged
    heap = [(-whole.survival[child], child, 0) for child in below[0].values()]
    heapq.heapify(heap)
    while heap and len(merged.tokens) <= budget.nodes:
        minus, node, parent = heapq.heappop(heap)
        if widths[parent] == budget.width or -minus < budget.price:
            continue
        at = add_guess(merged, whole.tokens[node], parent, -minus, whole.drafters[node])
        widths[parent] += 1
        widths.append(0)
        depths.append(depths[parent] + 1)
        for child in below[node].values() if depths[at] < budget.depth else ():
            heapq.heappush(heap, (-whole.survival[child], child, at))
    return merged


def union(trees: Sequence[HostTree]) -> tuple[HostTree, list[dict[int, int]]]:
    """All paths, each of them once, and the children of each node by their tokens.

    A path survives with what the most confident says, and counts as guessed by the first who guessed it.
    """
    whole, below = mixed_root(trees[0].tokens[0], -1), list[dict[int, int]]([{}])
    for tree in trees:
        place = [0]
        for node in range(1, len(tree.tokens)):
            token, parent = tree.tokens[node], place[tree.parents[node]]
            known = below[parent].get(token)
            if known is None:
                known = add_guess(whole, token, parent, tree.survival[node], tree.drafters[node])
                below[parent][token] = known
                below.append({})
            else:
                survival = max(whole.survival[known], tree.survival[node])
                whole.survival[known] = min(survival, whole.survival[parent])
            place.append(known)
    return whole, below
