"""One sequence's tree while it grows: its nodes, which of them get children, and which stay in the end.

This module decides the shape of trees, in one of three ways. Where guesses are judged by equality any choice is exact,
so the tree has the likeliest paths, chosen after drawing. Rejection rules need the law that every guess was drawn from,
so there the number of children is fixed before they are drawn, from what was drawn before, and all stay. Or the budget
names a shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forerun.draft.base import Budget

Ranks = Sequence[int]  # ascending: 0 is the first child drawn


@dataclass(slots=True)
class Growth:
    """A tree of drawn guesses; node 0 is the root. Nodes are in the order they were drawn, level by level.

    `coupled`: guesses are judged by equality, so that what was drawn may be left out. `ranks` say how many siblings
    were drawn before a node; `law_row` where the law that a node's children were drawn from is packed, -1 nowhere.
    """

    budget: Budget
    coupled: bool
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    survival: list[float] = field(default_factory=lambda: [1.0])
    ranks: list[int] = field(default_factory=lambda: [-1])
    law_row: list[int] = field(default_factory=lambda: [-1])
    level: int = -1  # at which the nodes were drawn that `extend` decided on last
    decided: int = 0  # how many nodes were there then
    least: float = -1.0  # what survives with no more than this comes behind `budget.nodes` others

    def add(self, parent: int, rank: int, token: int, survival: float) -> None:
        """Append a guess, given its survival on from its parent; unless it may be left out and would be in the end."""
        survival *= self.survival[parent]
        if self.coupled and (survival <= self.least or survival < self.budget.price):
            return
        self.tokens.append(token)
        self.parents.append(parent)
        self.survival.append(survival)
        self.ranks.append(rank)
        self.law_row.append(-1)

    def along(self, values: Sequence[int], node: int) -> list[int]:
        """The values of the nodes from below the root down to this one."""
        path = []
        while node:
            path.append(values[node])
            node = self.parents[node]
        return path[::-1]

    def extend(self) -> Mapping[int, Ranks]:
        """Which of the nodes drawn since the last call get children, and of which ranks."""
        fresh = range(self.decided, len(self.tokens))
        self.decided, self.level = len(self.tokens), self.level + 1
        if self.level >= self.budget.depth:
            return {}
        choose = shaped if self.budget.shape is not None else best_first if self.coupled else settled
        return choose(self, [node for node in fresh if self.survival[node] >= self.budget.price])

    def finished(self) -> Growth:
        """The tree without what does not stay; of a node that stays the parent does too, being no less likely."""
        if not self.coupled or len(self.tokens) - 1 <= self.budget.nodes:
            return self
        likely = sorted(range(1, len(self.tokens)), key=lambda node: -self.survival[node])
        kept = [0, *sorted(likely[: self.budget.nodes])]
        number = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return replace(
            self,
            tokens=[self.tokens[node] for node in kept],
            parents=[number[self.parents[node]] for node in kept],
            survival=[self.survival[node] for node in kept],
            ranks=[self.ranks[node] for node in kept],
            law_row=[self.law_row[node] for node in kept],
        )

    def depth(self) -> int:
        """Guesses on the longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return max(depths)


def best_first(growth: Growth, fresh: Sequence[int]) -> Mapping[int, Ranks]:
    """All that could have children among the likeliest `budget.nodes` paths.

    Survival never grows along a path. So a node that is not among the likeliest drawn so far never will be, nor will
    its children; and those of the last among them come behind it. What is left is read in one pass, and after `depth`
    passes nothing is: the likeliest drawn are then the likeliest of all. After EAGLE-2 (Li et al., 2024), whose levels
    are of a fixed width, so that its trees are not always the best.
    """
    budget = growth.budget
    if len(growth.tokens) > budget.nodes:
        growth.least = sorted(growth.survival[1:], reverse=True)[budget.nodes - 1]
    ranks = range(min(budget.width, budget.nodes))
    return {node: ranks for node in fresh if growth.survival[node] > growth.least}


def settled(growth: Growth, fresh: Sequence[int]) -> Mapping[int, Ranks]:
    """An even share of the guesses left for each level to come, `width` of them for its likeliest node, and so on."""
    budget = growth.budget
    likely = sorted(fresh, key=lambda node: -growth.survival[node])
    left = budget.nodes - (len(growth.tokens) - 1)
    share = -(-left // (budget.depth - growth.level))  # rounded up: what does not divide goes to the upper levels
    shares = {}
    for node in likely[: budget.width]:
        shares[node] = range(min(budget.width, share))
        share -= len(shares[node])
    return {node: ranks for node, ranks in shares.items() if ranks}


def shaped(growth: Growth, fresh: Sequence[int]) -> Mapping[int, Ranks]:
    """What the budget's shape says."""
    assert growth.budget.shape is not None, "no shape to follow"
    below = growth.budget.shape.below
    found = {node: below[tuple(growth.along(growth.ranks, node))] for node in fresh}
    return {node: ranks for node, ranks in found.items() if ranks}
