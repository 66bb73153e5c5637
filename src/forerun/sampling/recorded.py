"""Recorded: draws that emit a recorded text, to replay it through an engine.

The target's sample at each position is the token of the recorded text, whatever was drafted. Passes, drafting and
sampling run as usual and take their usual time. This works with coupled verification only: the other rules do not
compare draft tokens with the target's sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.annotations import Int
from forerun.kernels.sampling import UNKNOWN
from forerun.sampling.draws import Draws, PathState, RowSampling
from forerun.sampling.transforms import Logits
from forerun.tree import DraftTree


class Recorded(Draws):
    """A round's draws in which the sequences of `texts` sample their recorded tokens.

    `texts[seq_id]` is an entire text, prompt and answer. Other sequences, and positions after a text's end, are sampled
    as usual. Nodes off the recorded path get the recorded token of their position too; they are never accepted.
    """

    def __init__(
        self, rows: Sequence[RowSampling], vocab: int, texts: Mapping[int, Sequence[int]], **options: Any
    ) -> None:
        super().__init__(rows, vocab, **options)
        assert not self.rejection, "a recorded text can be replayed with coupled verification only"
        self.texts = texts

    def draw(self, logits: Logits, at: PathState) -> Int[Tensor, " nodes"]:
        """The recorded token at each node's position."""
        drawn = super().draw(logits, at)
        places = zip(at.row.tolist(), at.position.tolist(), strict=True)
        tokens = [self.recorded_token(row, position) for row, position in places]
        recorded = torch.tensor(tokens, dtype=drawn.dtype, device=drawn.device)
        return torch.where(recorded >= 0, recorded, drawn)

    def verdict(
        self, tree: DraftTree, logits: Logits, drawn: array[int] | None = None
    ) -> Int[Tensor, "batch verdict"] | None:
        """The verdict with the recorded tokens; the usual sampling is done before, so that it takes its time."""
        super().verdict(tree, logits, drawn)
        recorded = [
            self.recorded_token(row, self.root_places[row] + 1 + depth)
            for row, depths in enumerate(tree.depths().tolist())
            for depth in depths
        ]
        return super().verdict(tree, logits, array("q", [UNKNOWN if token < 0 else token for token in recorded]))

    def recorded_token(self, row: int, position: int) -> int:
        """The recorded token of a row at a position; -1 if there is none."""
        text = self.texts.get(self.seq_ids[row], ())
        return text[position] if position < len(text) else -1
