"""Which nodes of a tree that grows get children, and how many.

This module decides the shape in one of three ways. Where guesses are judged by equality any choice is exact, so the
tree has the likeliest paths, chosen after drawing. Rejection rules need the law that every guess was drawn from, so
there the number of children is fixed before they are drawn, from what was drawn before, and all stay. Or the budget
names a shape.
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
    """A tree while it is drawn, level by level, within a budget.

    `coupled`: guesses are judged by equality, so that what was drawn may be left out. `ranks` say how many siblings
    were drawn before a node.
    """

    budget: Budget
    coupled: bool
    tree: HostTree
    ranks: list[int] = field(default_factory=lambda: [-1])
    level: int = -1  # at which the nodes were drawn that `extend` decided on last
    decided: int = 0  # how many nodes were there then
    least: float = -1.0  # what survives with no more than this comes behind `budget.nodes` others

    def add(self, parent: int, rank: int, token: int, survival: float) -> None:
        """Append a guess, given its survival on from its parent; unless it may be left out and would be in the end."""
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
        """Which of the nodes drawn since the last call get children, and of which ranks."""
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
        """The tree without what does not stay; of a node that stays the parent does too, being no less likely."""
        tree, num_nodes = self.tree, self.budget.nodes
        if not self.coupled or len(tree.tokens) - 1 <= num_nodes:
            return tree
        likely = sorted(range(1, len(tree.tokens)), key=lambda node: -tree.survival[node])
        return tree.some([0, *sorted(likely[:num_nodes])])


def best_first(growing: GrowingTree, fresh: Sequence[int]) -> Mapping[int, Ranks]:
    """All that could have children among the likeliest `budget.nodes` paths.

    Survival never grows along a path. So a node that is not among the likeliest drawn so far never will be, nor will
    its children; and those of the last among them come behind it. What is left is read in one pass, and after `depth`
    passes nothing is: the likeliest drawn are then the likeliest of all. After EAGLE-2 (Li et al., 2024), whose levels
    are of a fixed width, so that its trees are not always the best.
    """
    budget, survival = growing.budget, growing.tree.survival
    if len(survival) > budget.nodes:
        growing.least = sorted(survival[1:], reverse=True)[budget.nodes - 1]
    ranks = range(min(budget.width, budget.nodes))
    return {node: ranks for node in fresh if survival[node] > growing.least}


def settled(growing: GrowingTree, fresh: Sequence[int]) -> Mapping[int, Ranks]:
    """An even share of the guesses left for each level to come, `width` of them for its likeliest node, and so on."""
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
