"""Heads over a reduced vocabulary: the target's ids of the head's tokens, stored and while drafting.

A checkpoint stores the tensor `d2t`, which has for each id of the head the difference to the target's id, and may store
`t2d` for other programs, which marks the target's tokens that the head has.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.device import CPU
from forerun.errors import UnsupportedModel
from forerun.models.chains import IdMap, SameIds
from forerun.models.weights import Checkpoint

OFFSETS, MASK = "d2t", "t2d"


class DraftVocabulary(SameIds):
    """The ids of a head over some of the target's tokens; the drafter's input may be any token of the target."""

    def __init__(self, vocab_size: int, ids: Int[Tensor, " draft_vocab"]) -> None:
        super().__init__(vocab_size, vocab_size)
        self.ids = self.head_ids = ids

    def target_logits(self, logits: Float[Tensor, "rows draft_vocab"]) -> Float[Tensor, "rows vocab"]:
        if len(logits) == 0:
            return logits.new_empty(0, self.vocab_size)
        return logits.new_full((len(logits), self.vocab_size), -math.inf).index_copy_(1, self.ids, logits)


def id_map_of(ids: Int[Tensor, " draft_vocab"], vocab_size: int, device: torch.device = CPU.device) -> IdMap:
    """The mapping between the ids of a head over the tokens `ids` and the target's, for logits on this device."""
    has_all = len(ids) == vocab_size and bool((ids == torch.arange(vocab_size)).all())
    return SameIds(vocab_size, vocab_size) if has_all else DraftVocabulary(vocab_size, ids.to(device))


def read_ids(checkpoint: Checkpoint, draft_vocab: int, vocab_size: int) -> Int[Tensor, " draft_vocab"]:
    """The target's id of each token of the head. Raises UnsupportedModel for ids that the target does not have."""
    offsets = checkpoint.take_ids(OFFSETS, (draft_vocab,)) if OFFSETS in checkpoint else None
    return ids_of(offsets, draft_vocab, vocab_size, checkpoint.folder)


def ids_of(
    offsets: Int[Tensor, " draft_vocab"] | None, draft_vocab: int, vocab_size: int, folder: Path
) -> Int[Tensor, " draft_vocab"]:
    """The target's ids from the table `d2t` (`offsets`), which is None for a head over all tokens."""
    if offsets is None and draft_vocab != vocab_size:
        raise UnsupportedModel(f"{folder} has no tensor {OFFSETS}, which maps the head's tokens to the target's")
    ids = torch.arange(draft_vocab) + (0 if offsets is None else offsets)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < draft_vocab:
        raise UnsupportedModel(
            f"{folder}: {OFFSETS} must map the head's tokens to different ones of the target's {vocab_size} tokens: "
            "name a drafter that was trained for this target"
        )
    return ids
