"""Children: a drafter's guesses after some nodes, as `Draws` makes them.

This file decides what drafters get beside the tokens: their survival, and in rejection modes the law they were drawn
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.annotations import Float, Int


@dataclass(frozen=True, slots=True)
class Children:
    """A drafter's guesses after some nodes: distinct tokens in draw order, -1 where there are fewer.

    `survival` is the drafter's own probability that a child is what the target chooses there, given that its parent
    was reached; 0 where there is none; None where it was not asked for. `law` are the probabilities the children were
    drawn from, without replacement (rejection modes only; greedy rows choose, so their DraftLaw.row must be -1).
    """

    tokens: Int[Tensor, "nodes width"]
    survival: Float[Tensor, "nodes width"] | None = None
    law: Float[Tensor, "nodes vocab"] | None = None


@dataclass(frozen=True, slots=True)
class HostChildren:
    """Children as the host sees them: node by node tokens and survival, and their law on the device."""

    tokens: Sequence[Sequence[int]]
    survival: Sequence[Sequence[float]] | None = None
    law: Float[Tensor, "nodes vocab"] | None = None
