"""EAGLE drafters: what a folder must hold to be one, and what it takes to load it.

The file decides how a folder is read: the authors' layouts, with tensors under `midlayer.` or `layers.0.` and
`fc.weight`. EAGLE-3 (2503.01840) may have a head over a vocabulary of the most frequent tokens alone, and `d2t`, which
gives for every id of that vocabulary how much larger the target's is. A folder without its norms is EAGLE-1 or EAGLE-2.
Embeddings or a head that it has no tensor for are the target's own. `models/eagle_fields.py` reads config.json, names
and shapes are in `models/eagle_tensors.py`, the computation is in `models/eagle_layer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.plan import ModelMemory
from forerun.errors import UnsupportedModel
from forerun.fields import read_fields, short
from forerun.heads.eagle.fields import fitted_tensors
from forerun.heads.eagle.format import EMBEDDING, MASK, OFFSETS, EagleTensors
from forerun.heads.eagle.network import EagleDecoder
from forerun.models.decoder import Decoder
from forerun.models.linear import make_linear
from forerun.models.loading import Blueprint
from forerun.models.native import find_kernels
from forerun.models.runner import Runner
from forerun.models.source import find_heads
from forerun.models.weights import BUFFERS, Checkpoint, draft_checkpoint

IGNORED = (MASK,)  # says the same as d2t


class DraftVocabulary:
    """The ids of a head over some of the target's tokens; the model reads all of them."""

    same = True

    def __init__(self, vocab_size: int, ids: Int[Tensor, " draft_vocab"]) -> None:
        self.vocab_size = vocab_size
        self.num_own = vocab_size
        self.ids = ids
        self.head_ids: Int[Tensor, " draft_vocab"] | None = ids

    def spread(self, logits: Float[Tensor, "rows draft_vocab"]) -> Float[Tensor, "rows vocab"]:
        """The logits over the target's ids, -inf where the head has no such token."""
        if len(logits) == 0:
            return logits.new_empty(0, self.vocab_size)
        return logits.new_full((len(logits), self.vocab_size), -math.inf).index_copy_(1, self.ids, logits)

    def own(self, tokens: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
        """The same tokens."""
        return tokens

    def own_list(self, tokens: Sequence[int]) -> Sequence[int]:
        """The same tokens."""
        return tokens


@dataclass(frozen=True, slots=True)
class EagleBlueprint:
    """A drafter that was checked, but that is not loaded."""

    layer: Blueprint
    tensors: EagleTensors
    ids: Int[Tensor, " draft_vocab"]

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's states that it reads."""
        return self.tensors.form.taps

    @property
    def memory(self) -> ModelMemory:
        """What it takes once loaded; embeddings of its own are never quantised."""
        c, layer = self.tensors.config, self.layer.memory
        table = c.vocab_size * c.hidden * self.layer.dtype.itemsize if self.tensors.own_embedding else 0
        return replace(layer, weights_bytes=layer.weights_bytes + table)

    def load(self, num_tokens: int, max_model_len: int, target: Decoder) -> Runner:
        """The layer with a cache of `num_tokens`, for texts of `max_model_len` at most."""
        own = self.layer
        whole = self.tensors.config
        config = replace(whole, max_positions=min(max_model_len, whole.max_positions))
        kernels = find_kernels(own.kernels, own.dtype)
        make = partial(make_linear, quantize=own.quantize, kernels=kernels)
        tensors = replace(self.tensors, config=config)
        return Runner.of(EagleDecoder(tensors, Checkpoint(own.folder, own.dtype), make, target, kernels), num_tokens)


def plan_layer(model: str, target: Blueprint) -> EagleBlueprint:
    """The drafter in the folder `model`. Raises ModelError for a folder that is not there or cannot be used."""
    folder, of = find_heads(model, "eagle"), target.config
    if target.placement.fixed:
        raise UnsupportedModel(f"{model}: EAGLE drafters are computed on CPUs: use device cpu, or another drafter")
    checkpoint = draft_checkpoint(folder, target.dtype, "eagle")
    tensors = fitted_tensors(read_fields(folder / "config.json"), checkpoint.stored, of, target.name)
    shapes = tensors.shapes()
    for name, shape in shapes.items():
        checkpoint.find(name, shape)
    refuse_unread(checkpoint, {*shapes, *(() if tensors.form.joined else (OFFSETS, *IGNORED))})
    layer = Blueprint(
        spec=target.spec.beside(model),
        name=model,
        folder=folder,
        config=replace(tensors.config, vocab_size=0),
        choice=target.choice,
        num_bytes=sum(math.prod(s) for name, s in shapes.items() if name != EMBEDDING) * target.dtype.itemsize,
        placement=target.placement,
    )
    return EagleBlueprint(layer, tensors, read_ids(checkpoint, tensors.draft_vocab, of.vocab_size))


def refuse_unread(checkpoint: Checkpoint, read: Collection[str]) -> None:
    """Raise UnsupportedModel for a tensor that nothing reads."""
    unread = sorted(name for name in checkpoint.stored if name not in read and not name.endswith(BUFFERS))
    if unread:
        raise UnsupportedModel(
            f"{checkpoint.folder}: the tensor {short(unread[0])} is none of the EAGLE drafter of its config.json: use "
            "the config.json that came with the weights"
        )


def read_ids(checkpoint: Checkpoint, draft_vocab: int, vocab_size: int) -> Int[Tensor, " draft_vocab"]:
    """The target's id of every token of the head's. Raises UnsupportedModel for ids that are not the target's."""
    there = OFFSETS in checkpoint.stored
    offsets = checkpoint.take_ids(OFFSETS, (draft_vocab,)) if there else None
    return ids_of(offsets, draft_vocab, vocab_size, checkpoint.folder)


def ids_of(
    offsets: Int[Tensor, " draft_vocab"] | None, draft_vocab: int, vocab_size: int, folder: Path
) -> Int[Tensor, " draft_vocab"]:
    """The target's ids, each so much larger than the head's own; None is a head over all of them."""
    own = torch.arange(draft_vocab)
    if offsets is None:
        if draft_vocab == vocab_size:
            return own
        raise UnsupportedModel(f"{folder} has no tensor {OFFSETS}, which says whose tokens the head's are")
    ids = own + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < draft_vocab:
        raise UnsupportedModel(
            f"{folder}: {OFFSETS} must give each token of the head another one of the target's {vocab_size} tokens: "
            "name a drafter that was trained for it"
        )
    return ids
