"""Growing token trees from a model's logits, level by level, for many sequences with different budgets.

Decides which nodes get children and how many: at every level a sequence spends an even share of the guesses it has
left on its nodes of highest survival, `width` children each. How many children a node gets is settled before they
are drawn, from what was drawn before them, and all that are drawn stay: so the trees are exact under every verifier,
rejection rules included. Knows nothing of the model: a callback reads nodes and gives their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.draft.base import Budget, Draft
from forerun.sampling.draws import Draws, PathState
from forerun.tree import DraftLaw, DraftTree


@dataclass(slots=True)
class Growth:
    """One sequence's tree while it grows; node 0 is the root.

    `law_row` says where the law that a node's children were drawn from is packed, -1 nowhere.
    """

    budget: Budget
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    survival: list[float] = field(default_factory=lambda: [1.0])
    law_row: list[int] = field(default_factory=lambda: [-1])

    def add(self, parent: int, token: int, survival: float) -> int:
        """Append a guess, given its survival on from its parent; returns its node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.survival.append(self.survival[parent] * survival)
        self.law_row.append(-1)
        return len(self.tokens) - 1

    def shares(self, nodes: Sequence[int], level: int) -> dict[int, int]:
        """Which of the nodes at depth `level` get children, and how many each; the likeliest first."""
        budget = self.budget
        if level >= budget.depth:
            return {}
        likely = [n for n in nodes if self.survival[n] >= budget.price]
        likely.sort(key=lambda n: -self.survival[n])
        left = budget.nodes - (len(self.tokens) - 1)
        share = -(-left // (budget.depth - level))  # rounded up: what does not divide goes to the upper levels
        shares = {}
        for node in likely[: budget.width]:
            shares[node] = min(budget.width, share)
            share -= shares[node]
        return {node: count for node, count in shares.items() if count > 0}


@dataclass(frozen=True, slots=True)
class Place:
    """A node about to get `num_children`: its row in the round, and where its token was drawn a level above."""

    row: int
    node: int
    num_children: int
    drawn_at: int = 0


@runtime_checkable
class ReadNodes(Protocol):
    """Reads nodes of growing trees, level by level, and gives the logits after them; None: no room for more."""

    def __call__(self, growths: Sequence[Growth], places: Sequence[Place]) -> Tensor | None: ...


def expand(draws: Draws, budgets: Sequence[Budget], logits: Float[Tensor, "drafted vocab"], read: ReadNodes) -> Draft:
    """Grow one tree per sequence of `draws`; `logits` are those after the roots of the rows with a budget, in order.

    A width of 1 gives chains, and without a price the draft tells no survival. Trees keep within depth and nodes; a
    node whose survival is below the price stays a leaf. In rejection modes the tree carries the laws its guesses were
    drawn from.
    """
    growths = [Growth(b, [row.tokens[-1]]) for row, b in zip(draws.rows, budgets, strict=True)]
    places = [Place(row, 0, n) for row, g in enumerate(growths) for n in g.shares([0], 0).values()]
    at = select(draws.roots(), [place.row for place in places])
    draws.foresee(max((budget.depth for budget in budgets), default=0))
    laws: list[Tensor] = []
    level = 0
    while places:
        level += 1
        drawn = draw_level(draws, growths, places, logits, at, laws)
        places = choose(growths, drawn, level)
        if not places:
            break
        tokens = [growths[place.row].tokens[place.node] for place in places]
        at = draws.advance(at, column(draws, [place.drawn_at for place in places]), column(draws, tokens))
        read_on = read(growths, places)
        if read_on is None:
            break
        logits = read_on
    return assemble(draws, growths, level, laws)


def draw_level(
    draws: Draws,
    growths: Sequence[Growth],
    places: Sequence[Place],
    logits: Float[Tensor, "places vocab"],
    at: PathState,
    laws: list[Tensor],
) -> list[Place]:
    """Draw the children that the places were promised and add them to their trees; returns them, without shares."""
    width = max(place.num_children for place in places)
    children = draws.children(logits, at, width, survival=survival_counts(growths))
    first_law = sum(map(len, laws))
    if children.law is not None:
        laws.append(children.law)
    drawn = []
    tokens = children.tokens.tolist()
    survival = [[1.0] * width] * len(places) if children.survival is None else children.survival.tolist()
    for i, place in enumerate(places):
        growth = growths[place.row]
        if children.law is not None and not draws.greedy[place.row]:
            growth.law_row[place.node] = first_law + i
        for token, chance in zip(tokens[i][: place.num_children], survival[i], strict=False):
            if token >= 0:
                drawn.append(Place(place.row, growth.add(place.node, token, chance), 0, drawn_at=i))
    return drawn


def survival_counts(growths: Sequence[Growth]) -> bool:
    """Whether any tree's shape depends on survival; over a large vocabulary it costs more than the draw."""
    return any(growth.budget.width > 1 or growth.budget.price > 0 for growth in growths)


def choose(growths: Sequence[Growth], drawn: Sequence[Place], level: int) -> list[Place]:
    """Which of the nodes just drawn get children in turn; rows in order, so that each row's places lie together."""
    chosen = []
    for row, growth in enumerate(growths):
        own = {place.node: place for place in drawn if place.row == row}
        shares = growth.shares(list(own), level) if own else {}
        chosen += [Place(row, node, n, own[node].drawn_at) for node, n in shares.items()]
    return chosen


def assemble(draws: Draws, growths: Sequence[Growth], depth: int, laws: Sequence[Tensor]) -> Draft:
    """Pad the trees to one size; `laws` are the packed laws of the rejection modes."""
    nodes = max(len(growth.tokens) for growth in growths)

    def padded(lists: Sequence[list[int]]) -> Tensor:
        return torch.tensor([values + [-1] * (nodes - len(values)) for values in lists], device=draws.device)

    tree = DraftTree(
        tokens=padded([growth.tokens for growth in growths]),
        parents=padded([growth.parents for growth in growths]),
        depth=depth,
        width=max(growth.budget.width for growth in growths),
        q=DraftLaw(padded([growth.law_row for growth in growths]), torch.cat(list(laws))) if laws else None,
    )
    if not survival_counts(growths):
        return Draft(tree)
    chances = [growth.survival + [0.0] * (nodes - len(growth.survival)) for growth in growths]
    return Draft(tree, survival=torch.tensor(chances, dtype=torch.float32, device=draws.device))


def select(at: PathState, rows: Sequence[int]) -> PathState:
    """Some of the states, in the order asked for."""
    index = torch.tensor(rows, dtype=torch.long, device=at.row.device)
    return PathState(at.row[index], at.drawn[index], at.position[index])


def column(draws: Draws, values: Sequence[int]) -> Tensor:
    """Host integers on the round's device."""
    return torch.tensor(values, dtype=torch.long, device=draws.device)
