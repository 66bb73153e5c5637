"""Reading the nodes of growing trees, level by level, behind the roots in a draft model's cache.

This module decides which reads a level is, and how its nodes are numbered. How trees grow is decided in `growth.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from torch import Tensor

from forerun.draft.expand import NodeToExpand
from forerun.draft.following import Following
from forerun.draft.growth import Growth
from forerun.models.runner import Read

ReadAll = Callable[[Sequence[Read]], Tensor | None]  # the logits asked for; None: no room
Own = Callable[[Sequence[int]], Sequence[int]]


class LevelReader:
    """Reads nodes for `expand`. `roots[seq_id]` is the root's number in the sequence's tail.

    `own` gives the model's ids of guesses, below 0 and each another where it has none: something is read there.
    """

    def __init__(
        self,
        sequences: Mapping[int, Following],
        read: ReadAll,
        own: Own,
        seq_ids: Sequence[int],
        roots: Mapping[int, int],
    ) -> None:
        self.sequences = sequences
        self.read = read
        self.own = own
        self.seq_ids = seq_ids
        self.numbers = {(row, 0): roots[seq_id] for row, seq_id in enumerate(seq_ids) if seq_id in roots}

    def __call__(self, growths: Sequence[Growth], places: Sequence[NodeToExpand]) -> Tensor | None:
        """The logits after the nodes, in their order; None where the cache has no room for them."""
        reads = []
        own = self.own([growths[place.row].tokens[place.node] for place in places])
        for row, group in groupby(zip(places, own, strict=True), key=lambda pair: pair[0].row):
            pairs = list(group)
            parents = [self.numbers[row, growths[row].parents[place.node]] for place, _ in pairs]
            tokens = [max(0, token) for _, token in pairs]
            reads.append(Read(self.seq_ids[row], tokens, parents, judged=range(len(tokens))))
        logits = self.read(reads)
        if logits is None:
            return None
        for place, token in zip(places, own, strict=True):
            parent = self.numbers[place.row, growths[place.row].parents[place.node]]
            following = self.sequences[self.seq_ids[place.row]]
            self.numbers[place.row, place.node] = following.add(parent, token)
        return logits
