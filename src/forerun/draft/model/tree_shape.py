"""The shape of a growing draft tree: which nodes get children, and how many.

There are three rules. In coupled mode any choice is exact, so the tree gets the most likely paths, chosen after
sampling (`best_first`). In rejection modes every sampled token must stay, so the number of children is fixed before
they are sampled (`equal_shares`). If the budget has a fixed shape the tree follows it (`fixed_shape`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.draft.base import Budget
from forerun.tree import HostTree

Ranks = Sequence[int]  # of children in the order in which they are sampled, ascending from 0
FIRST_CHILD: Ranks = range(1)


@dataclass(slots=True)
class GrowingTree:
    """A tree while it is grown, level by level, within a budget.

    `coupled`: whether sampled tokens may be left out, because verification is exact for any choice of them. `ranks[i]`
    is the number of siblings sampled before node i. `level` is the depth of the nodes that `extend` handled last, and
    `num_extended` the number of nodes up to this level. Nodes whose survival is not above `least` are left out, because
    `budget.nodes` others are at least as likely.
    """

    budget: Budget
    coupled: bool
    tree: HostTree
    ranks: list[int] = field(default_factory=lambda: [-1])
    level: int = -1
    num_extended: int = 0
    least: float = -1.0

    def add(self, parent: int, rank: int, token: int, survival: float) -> None:
        """Append a draft token with its survival given its parent, unless it cannot be in the final tree."""
        tree = self.tree
        survival *= tree.survival[parent]
        if self.coupled and (survival <= self.least or survival < self.budget.min_survival):
            return
        tree.add(token, parent, survival)
        tree.law_rows.append(-1)
        self.ranks.append(rank)

    def along(self, values: Sequence[int], node: int) -> list[int]:
        """The values of the nodes on the path from the root, which is left out, to this node."""
        if self.budget.width == 1:
            return [*values[1 : node + 1]]
        path = []
        while node:
            path.append(values[node])
            node = self.tree.parents[node]
        return path[::-1]

    def extend(self) -> Mapping[int, Ranks]:
        """The nodes of the newest level that get children, and the ranks of these children."""
        first, self.num_extended, self.level = self.num_extended, len(self.tree.tokens), self.level + 1
        budget, survival = self.budget, self.tree.survival
        if self.level >= budget.depth:
            return {}
        if budget.width == 1 and budget.shape is None:  # a chain: all rules agree
            last = self.num_extended - 1
            return {last: FIRST_CHILD} if first <= last and survival[last] >= budget.min_survival else {}
        rule = fixed_shape if budget.shape is not None else best_first if self.coupled else equal_shares
        return rule(self, [node for node in range(first, self.num_extended) if survival[node] >= budget.min_survival])

    def finished(self) -> HostTree:
        """The final tree: the `budget.nodes` most likely nodes in coupled mode, otherwise all nodes.

        A parent is at least as likely as its children, so no node loses its parent.
        """
        tree, num_nodes = self.tree, self.budget.nodes
        if not self.coupled or len(tree.tokens) - 1 <= num_nodes:
            return tree
        likely = sorted(range(1, len(tree.tokens)), key=lambda node: -tree.survival[node])
        return tree.subtree([0, *sorted(likely[:num_nodes])])


def best_first(growing: GrowingTree, newest: Sequence[int]) -> Mapping[int, Ranks]:
    """The nodes that may have children among the `budget.nodes` most likely nodes.

    Survival never grows along a path. So a node that is not among the most likely sampled so far never will be, nor
    will its descendants; and children of the last of them are no better than it. All other new nodes get children in
    one pass, so after `depth` levels the most likely nodes sampled are the most likely of all. After EAGLE-2 (Li et
    al., 2024), where the width of a level is fixed, so that its trees are not always the best.
    """
    budget, survival = growing.budget, growing.tree.survival
    if len(survival) > budget.nodes:
        growing.least = sorted(survival[1:], reverse=True)[budget.nodes - 1]
    ranks = range(min(budget.width, budget.nodes))
    return {node: ranks for node in newest if survival[node] > growing.least}


def equal_shares(growing: GrowingTree, newest: Sequence[int]) -> Mapping[int, Ranks]:
    """An equal share of the remaining nodes for each further level; likelier parents get `width` children first."""
    budget, survival = growing.budget, growing.tree.survival
    likely = sorted(newest, key=lambda node: -survival[node])
    left = budget.nodes - (len(survival) - 1)
    share = -(-left // (budget.depth - growing.level))  # rounded up, so that upper levels get the remainder
    shares = {}
    for node in likely[: budget.width]:
        shares[node] = range(min(budget.width, share))
        share -= len(shares[node])
    return {node: ranks for node, ranks in shares.items() if ranks}


def fixed_shape(growing: GrowingTree, newest: Sequence[int]) -> Mapping[int, Ranks]:
    """The children that the budget's shape has at the places of these nodes."""
    assert growing.budget.shape is not None, "the budget has no shape"
    below = growing.budget.shape.below
    ranks_below = {node: below[tuple(growing.along(growing.ranks, node))] for node in newest}
    return {node: ranks for node, ranks in ranks_below.items() if ranks}
