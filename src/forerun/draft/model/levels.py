"""Reading the nodes of growing trees, level by level, behind the roots in a model's cache.

This module decides which reads a level is, and how its nodes are numbered. How trees grow is decided in `growth.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from torch import Tensor

from forerun.draft.model.drafted_text import DraftedText
from forerun.draft.model.expand import NodeToExpand
from forerun.draft.model.growth import Growth
from forerun.models.chains import IdExchange
from forerun.models.runner import Read

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
        own = self.ids.own_list([growths[place.row].tokens[place.node] for place in places])
        parents = [self.numbers[place.row, growths[place.row].parents[place.node]] for place in places]
        reads = []
        for row, group in groupby(range(len(places)), key=lambda i: places[i].row):
            nodes = list(group)
            tokens = [max(0, own[i]) for i in nodes]
            scratch = growths[row].budget.depth - 1 if growths[row].budget.width > 1 else 0
            own_parents = [parents[i] for i in nodes]
            reads.append(Read(self.seq_ids[row], tokens, own_parents, range(len(nodes)), scratch))
        logits = self.read(reads)
        if logits is None:
            return None
        for place, token, parent in zip(places, own, parents, strict=True):
            following = self.sequences[self.seq_ids[place.row]]
            self.numbers[place.row, place.node] = following.add(parent, token)
        return logits
