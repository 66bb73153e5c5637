"""Recorded: draws that emit a recorded text, so that it can be replayed through an engine.

This file makes the target's choice at each position the token of the recorded text, whatever was guessed. Passes,
guesses and sampling run as usual and take their usual time. It works with coupled verification, which compares choices;
the rules that judge by laws never ask for a choice.
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
    """A round's draws in which the sequences of `texts` choose their recorded tokens.

    `texts[seq_id]` is a whole text, prompt and answer. Other sequences, and positions behind a text's end, choose for
    themselves. Nodes that are not on the recorded path are given its token too: nothing leads to them.
    """

    def __init__(
        self, rows: Sequence[RowSampling], vocab: int, texts: Mapping[int, Sequence[int]], **options: Any
    ) -> None:
        super().__init__(rows, vocab, **options)
        assert not self.rejection, "a recorded choice is compared with guesses; rejection asks for no choice"
        self.texts = texts

    def draw(self, logits: Logits, at: PathState) -> Int[Tensor, " nodes"]:
        """The recorded token at each node's position."""
        drawn = super().draw(logits, at)
        tokens = [self.said(row, position) for row, position in zip(at.row.tolist(), at.position.tolist(), strict=True)]
        recorded = torch.tensor(tokens, dtype=drawn.dtype, device=drawn.device)
        return torch.where(recorded >= 0, recorded, drawn)

    def verdict(
        self, tree: DraftTree, logits: Logits, drawn: array[int] | None = None
    ) -> Int[Tensor, "batch verdict"] | None:
        """The verdict by the recorded tokens; what rows would draw themselves is drawn too, for its time."""
        super().verdict(tree, logits, drawn)
        depths = tree.depths().tolist()
        recorded = [
            self.said(row, self.root_places[row] + 1 + depth) for row, of_row in enumerate(depths) for depth in of_row
        ]
        return super().verdict(tree, logits, array("q", [UNKNOWN if token < 0 else token for token in recorded]))

    def said(self, row: int, position: int) -> int:
        """The token of a row's text at a position; -1 where nothing is recorded."""
        text = self.texts.get(self.seq_ids[row], ())
        return text[position] if position < len(text) else -1
