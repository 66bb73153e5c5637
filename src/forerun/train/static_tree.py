"""A static tree for a drafter that guesses every depth at once, calibrated on held-out answers.

Such a drafter's trees are products of what it says of each depth. How often its r-th guess at each depth is right is
counted on held-out answers; a path's worth is the product of these shares, and the tree takes the worthiest nodes one
after the other, as Medusa's authors build theirs (2401.10774, section 2.3.3). It is for requests that fix the shape of
drafts; without one, trees are grown in each round from what the drafter says there.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from forerun.heads.student import Student, TargetText, TextBatch
from forerun.shape import RankPath, StaticTree
from forerun.train.held_out import ranked, spread
from forerun.train.objective import Objective

TREE = "tree.json"
MOST_CHILDREN, NUM_NODES = 8, 16


@torch.no_grad()
def shares_right(objective: Objective, student: Student, texts: Sequence[TargetText]) -> list[list[float]]:
    """By depth and then by rank: the share of places where the guess of this rank is what the target drew."""
    counts, places = list[torch.Tensor](), list[int]()
    for text in texts:
        predictions = student.predict(TextBatch.of([text]), None)
        for d, logits in enumerate(predictions.logits):
            found = ranked(objective, text, spread(objective, student, logits)[0].float(), d + 1, MOST_CHILDREN)
            judged = found[: max(0, len(text.roots) - d)]
            if d == len(counts):
                counts.append(torch.zeros(MOST_CHILDREN, dtype=torch.long))
                places.append(0)
            counts[d] += torch.bincount(judged[judged >= 0].cpu(), minlength=MOST_CHILDREN)
            places[d] += len(judged)
    return [(own / max(1, num)).tolist() for own, num in zip(counts, places, strict=True)]


def worthiest(shares: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """The tree of the `num_nodes` paths that are right most often, if depths were independent."""
    waiting: list[tuple[float, int, RankPath]] = [(-share, 1, (rank,)) for rank, share in enumerate(shares[0])]
    heapq.heapify(waiting)
    chosen: list[RankPath] = []
    while waiting and len(chosen) < num_nodes:
        worth, depth, path = heapq.heappop(waiting)
        chosen.append(path)
        if depth < len(shares):
            for rank, share in enumerate(shares[depth]):
                heapq.heappush(waiting, (worth * share, depth + 1, (*path, rank)))
    return StaticTree(chosen)
