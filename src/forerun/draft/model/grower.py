"""Growing token trees from a model's logits, level by level, for many sequences with different budgets.

`Growth` is one sequence's tree while it grows, and decides its shape in one of three ways. Where guesses are judged by
equality any choice is exact, so the tree has the likeliest paths, chosen after drawing. Rejection rules need the law
that every guess was drawn from, so there the number of children is fixed before they are drawn, from what was drawn
before, and all stay. Or the budget names a shape. `expand` grows the trees of a round together: each level is one pass
of the model over the nodes of all sequences, which `LevelReader` reads behind the roots in the model's cache. Chains
that need no tree are drawn in `chain_steps.py`, or in one call where the runner has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.draft.base import Budget, Draft
from forerun.draft.model.drafted_text import DraftedText
from forerun.models.chains import IdExchange
from forerun.models.runner import Read
from forerun.sampling.draws import Draws
from forerun.tree import DraftLaw, DraftTree

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
    ranks_below = {node: below[tuple(growth.along(growth.ranks, node))] for node in fresh}
    return {node: ranks for node, ranks in ranks_below.items() if ranks}


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
        chances = [with_first(row_chances, first) for row_chances, first in zip(chances, firsts, strict=True)]
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


ReadAll = Callable[[Sequence[Read]], Tensor | None]  # the logits asked for; None: no room


class LevelReader:
    """Reads nodes for `expand`, numbered as in the sequences' tails, whose last nodes are the roots.

    Where there is no tail the root is the last token of the text that is kept, and its number -1.
    """

    def __init__(
        self, sequences: Mapping[int, DraftedText], read: ReadAll, ids: IdExchange, seq_ids: Sequence[int]
    ) -> None:
        self.sequences = sequences
        self.read = read
        self.ids = ids
        self.seq_ids = seq_ids
        self.numbers = {(row, 0): len(sequences[s].tail) - 1 for row, s in enumerate(seq_ids) if s in sequences}

    def __call__(self, growths: Sequence[Growth], places: Sequence[NodeToExpand]) -> Tensor | None:
        """The logits after the nodes, in their order; None where the cache has no room for them."""
        guesses = self.ids.own_list([growths[place.row].tokens[place.node] for place in places])
        parents = [self.numbers[place.row, growths[place.row].parents[place.node]] for place in places]
        reads = []
        for row, group in groupby(range(len(places)), key=lambda i: places[i].row):
            nodes = list(group)
            tokens = [max(0, guesses[i]) for i in nodes]
            scratch = growths[row].budget.depth - 1 if growths[row].budget.width > 1 else 0
            own_parents = [parents[i] for i in nodes]
            reads.append(Read(self.seq_ids[row], tokens, own_parents, range(len(nodes)), scratch))
        logits = self.read(reads)
        if logits is None:
            return None
        for place, token, parent in zip(places, guesses, parents, strict=True):
            drafted = self.sequences[self.seq_ids[place.row]]
            self.numbers[place.row, place.node] = drafted.add(parent, token)
        return logits
