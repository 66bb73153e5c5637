"""The shape of a growing draft tree: which nodes get children, and how many.

There are three ways. If draft tokens are judged by equality any choice is exact, so the tree has the most likely paths,
chosen after sampling. Rejection rules need the law that every token was sampled from, so there the number of children
is fixed before they are sampled, and all stay. Or the budget gives a fixed shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.draft.base import Budget
from forerun.tree import HostTree

Ranks = Sequence[int]  # ascending: 0 is the first child drawn
FIRST: Ranks = range(1)


@dataclass(slots=True)
class GrowingTree:
    """A tree while it is grown, level by level, within a budget.

    `coupled`: draft tokens are judged by equality, so sampled ones may be left out. `ranks` is the number of siblings
    sampled before a node.
    """

    budget: Budget
    coupled: bool
    tree: HostTree
    ranks: list[int] = field(default_factory=lambda: [-1])
    level: int = -1  # at which the nodes were drawn that `extend` decided on last
    decided: int = 0  # how many nodes were there then
    least: float = -1.0  # what survives with no more than this comes behind `budget.nodes` others

    def add(self, parent: int, rank: int, token: int, survival: float) -> None:
        """Append a draft token with its survival given its parent, unless it would be left out in the end."""
        tree = self.tree
        survival *= tree.survival[parent]
        if self.coupled and (survival <= self.least or survival < self.budget.min_survival):
            return
        tree.add(token, parent, survival)
        tree.law_rows.append(-1)
        self.ranks.append(rank)

    def along(self, values: Sequence[int], node: int) -> list[int]:
        """The values of the nodes from below the root down to this one."""
        if self.budget.width == 1:
            return [*values[1 : node + 1]]
        path = []
        while node:
            path.append(values[node])
            node = self.tree.parents[node]
        return path[::-1]

    def extend(self) -> Mapping[int, Ranks]:
        """Which of the nodes sampled since the last call get children, and of which ranks."""
        first, self.decided, self.level = self.decided, len(self.tree.tokens), self.level + 1
        budget, survival = self.budget, self.tree.survival
        if self.level >= budget.depth:
            return {}
        if budget.width == 1 and budget.shape is None:  # both rules, at less cost
            last = self.decided - 1
            return {last: FIRST} if first <= last < budget.nodes and survival[last] >= budget.min_survival else {}
        choose = shaped if budget.shape is not None else best_first if self.coupled else settled
        return choose(self, [node for node in range(first, self.decided) if survival[node] >= budget.min_survival])

    def finished(self) -> HostTree:
        """The tree of the nodes that stay, each with its parent, which is at least as likely."""
        tree, num_nodes = self.tree, self.budget.nodes
        if not self.coupled or len(tree.tokens) - 1 <= num_nodes:
            return tree
        likely = sorted(range(1, len(tree.tokens)), key=lambda node: -tree.survival[node])
        return tree.some([0, *sorted(likely[:num_nodes])])


def best_first(growing: GrowingTree, fresh: Sequence[int]) -> Mapping[int, Ranks]:
    """All nodes that could have children among the most likely `budget.nodes` paths.

    Survival never grows along a path. So a node that is not among the most likely sampled so far never will be, nor
    will its children; and the children of the last among them come after it. The rest is read in one pass, and after
    `depth` passes nothing is left: the most likely nodes sampled are then the most likely of all. After EAGLE-2 (Li et
    al., 2024), whose levels have a fixed width, so that its trees are not always the best.
    """
    budget, survival = growing.budget, growing.tree.survival
    if len(survival) > budget.nodes:
        growing.least = sorted(survival[1:], reverse=True)[budget.nodes - 1]
    ranks = range(min(budget.width, budget.nodes))
    return {node: ranks for node in fresh if survival[node] > growing.least}


def settled(growing: GrowingTree, fresh: Sequence[int]) -> Mapping[int, Ranks]:
    """An equal share of the remaining nodes for each level to come, `width` of them for its likeliest node."""
    budget, survival = growing.budget, growing.tree.survival
    likely = sorted(fresh, key=lambda node: -survival[node])
    left = budget.nodes - (len(survival) - 1)
    share = -(-left // (budget.depth - growing.level))  # rounded up: what does not divide goes to the upper levels
    shares = {}
    for node in likely[: budget.width]:
        shares[node] = range(min(budget.width, share))
        share -= len(shares[node])
    return {node: ranks for node, ranks in shares.items() if ranks}


def shaped(growing: GrowingTree, fresh: Sequence[int]) -> Mapping[int, Ranks]:
    assert growing.budget.shape is not None, "no shape to follow"
    below = growing.budget.shape.below
    ranks_below = {node: below[tuple(growing.along(growing.ranks, node))] for node in fresh}
    return {node: ranks for node, ranks in ranks_below.items() if ranks}
