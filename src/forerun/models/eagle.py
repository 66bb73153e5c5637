"""EAGLE drafters: what a folder must hold to be one, and what it takes to load it.

The file decides how a folder is read: the authors' layouts, with tensors under `midlayer.` or `layers.0.` and
`fc.weight`. EAGLE-3 (2503.01840) may have a head over a vocabulary of the most frequent tokens alone, and `d2t`, which
gives for every id of that vocabulary how much larger the target's is. A folder without its norms is EAGLE-1 or EAGLE-2.
Embeddings or a head that it has no tensor for are the target's own. Names and shapes are in `models/eagle_tensors.py`,
the computation is in `models/eagle_layer.py`.
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
from forerun.fields import Fields, read_fields, short
from forerun.models.config import ModelConfig, config_of
from forerun.models.decoder import Decoder
from forerun.models.eagle_layer import EagleDecoder
from forerun.models.eagle_tensors import (
    EMBEDDING,
    FEATURE,
    HEAD,
    MASK,
    NORM,
    OFFSETS,
    PLACES,
    STATE_NORM,
    EagleForm,
    EagleTensors,
)
from forerun.models.linear import make_linear
from forerun.models.loading import Blueprint
from forerun.models.native import find_kernels
from forerun.models.runner import Runner
from forerun.models.source import find_heads
from forerun.models.weights import BUFFERS, Checkpoint

TAP_IDS = "eagle_aux_hidden_state_layer_ids"
MOST_TAPS = 16
IGNORED = (MASK,)  # says the same as d2t


class DraftVocabulary:
    """The ids of a head over some of the target's tokens; the model reads all of them."""

    same = True

    def __init__(self, vocab_size: int, ids: Int[Tensor, " draft_vocab"]) -> None:
        self.vocab_size = vocab_size
        self.num_own = vocab_size
        self.ids = ids

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
        return Runner.of(EagleDecoder(tensors, Checkpoint(own.folder, own.dtype), make, target), num_tokens)


def plan_layer(model: str, target: Blueprint) -> EagleBlueprint:
    """The drafter in the folder `model`. Raises ModelError for a folder that is not there or cannot be used."""
    folder, of = find_heads(model), target.config
    if target.placement.fixed:
        raise UnsupportedModel(f"{model}: EAGLE drafters are computed on CPUs: use device cpu, or another drafter")
    fields, checkpoint = read_layer_fields(folder, of), Checkpoint(folder, target.dtype)
    if fields.values.get("vocab_size") != of.vocab_size:
        raise fields.refuse("vocab_size", f"{target.name} has {of.vocab_size}: name a drafter that was trained for it")
    tensors = read_tensors(fields, checkpoint, of)
    for name, is_own in ((EMBEDDING, tensors.own_embedding), (HEAD, tensors.own_head)):
        if not is_own and tensors.config.hidden != of.hidden:
            raise fields.refuse("hidden_size", f"{target.name} has {of.hidden}, and the folder has no {name}: add it")
    if not tensors.own_head and tensors.draft_vocab != of.vocab_size:
        raise fields.refuse("draft_vocab_size", f"the folder has no {HEAD} for so many tokens: add it")
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


def read_layer_fields(folder: Path, of: ModelConfig) -> Fields:
    """The layer's config.json, as that of a model of one layer; what it leaves out is the target's or the family's."""
    read = read_fields(folder / "config.json")
    kept = {key: value for key, value in read.values.items() if key != "architectures"}
    defaults = {"max_position_embeddings": of.max_positions, "model_type": "llama", "num_hidden_layers": 1}
    fields = replace(read, values=defaults | kept)
    if fields.whole("num_hidden_layers") != 1:
        raise fields.refuse("num_hidden_layers", "an EAGLE drafter has one layer: use its own config.json")
    return fields


def read_tensors(fields: Fields, checkpoint: Checkpoint, of: ModelConfig) -> EagleTensors:
    """What the folder must hold, by its fields and by the tensors that tell the generations apart."""
    config = replace(config_of(fields), tied=False)
    config = replace(config, qkv_bias=fields.flag("qkv_bias", config.qkv_bias))
    place = next((name for name in PLACES if f"{name}.post_attention_layernorm.weight" in checkpoint), PLACES[0])
    joined = NORM not in checkpoint and f"{place}.{STATE_NORM}" not in checkpoint
    form = EagleForm(FEATURE, True, fields.flag("bias", True)) if joined else read_form(fields, of.layers)
    draft_vocab = of.vocab_size if joined else fields.whole("draft_vocab_size", of.vocab_size, most=of.vocab_size)
    own_head = HEAD in checkpoint and not joined
    return EagleTensors(config, form, place, of.hidden, draft_vocab, EMBEDDING in checkpoint, own_head)


def read_form(fields: Fields, num_layers: int) -> EagleForm:
    """The options of an EAGLE-3 layer."""
    form = EagleForm(
        read_taps(fields, num_layers),
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_before_fc=fields.flag("norm_before_fc"),
        fc_norm=fields.flag("fc_norm"),
        norm_output=fields.flag("norm_output"),
    )
    if form.norm_before_fc and form.fc_norm:
        raise fields.refuse("fc_norm", "norm_before_fc is too, and only one of them can be: correct either")
    return form


def refuse_unread(checkpoint: Checkpoint, read: Collection[str]) -> None:
    """Raise UnsupportedModel for a tensor that nothing reads."""
    unread = sorted(name for name in checkpoint.stored if name not in read and not name.endswith(BUFFERS))
    if unread:
        raise UnsupportedModel(
            f"{checkpoint.folder}: the tensor {short(unread[0])} is none of the EAGLE drafter of its config.json: use "
            "the config.json that came with the weights"
        )


def read_taps(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The states that it reads, each named by the layer that it enters; as the authors choose them, unless said."""
    inside = fields.values.get("eagle_config")
    found = fields.values.get(TAP_IDS, inside.get(TAP_IDS) if isinstance(inside, dict) else None)
    if found is None:
        return usual_taps(num_layers)
    if not isinstance(found, list):
        found = [None]
    is_layer = [isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= num_layers for each in found]
    if not 1 <= len(found) <= MOST_TAPS or not all(is_layer):
        raise fields.refuse(TAP_IDS, f"it must name layers, from 0 to {num_layers}, {MOST_TAPS} at most")
    return tuple(found)


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """The states that the authors choose."""
    return (min(2, num_layers), num_layers // 2, max(0, num_layers - 3))


def read_ids(checkpoint: Checkpoint, draft_vocab: int, vocab_size: int) -> Int[Tensor, " draft_vocab"]:
    """The target's id of every token of the head's. Raises UnsupportedModel for ids that are not the target's."""
    own = torch.arange(draft_vocab)
    if OFFSETS not in checkpoint.stored:
        if draft_vocab == vocab_size:
            return own
        raise UnsupportedModel(f"{checkpoint.folder} has no tensor {OFFSETS}, which says whose tokens the head's are")
    ids = own + checkpoint.take_ids(OFFSETS, (draft_vocab,))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < draft_vocab:
        raise UnsupportedModel(
            f"{checkpoint.folder}: {OFFSETS} must give each token of the head another one of the target's "
            f"{vocab_size} tokens: name a drafter that was trained for it"
        )
    return ids
