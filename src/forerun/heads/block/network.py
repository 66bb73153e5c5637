"""Block drafters: a few layers that guess a whole block of tokens in one pass, from a target's states (2602.06036).

The target's states of final text, joined and mapped to one state each, are context: every layer makes keys and values
of them, and they pass through no layer. A block is the root's embedding and masked places behind it. Its places read
the context and each other, or those before them alone where the block is `causal`, and the state behind a place gives
the logits of one guess. Embedding and head are the target's.

The cache holds the context's keys and values. Those of a block are of no use after its pass. The file decides how both
are computed; `block_layout.py` says what a folder holds, and `block_heads.py` what stands on the states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.cache.plan import ModelMemory
from forerun.errors import UnsupportedModel
from forerun.fields import read_fields
from forerun.heads.block.block_heads import BlockHeads, product
from forerun.heads.block.format import (
    HEAD,
    IGNORED,
    MASK_EMBEDDING,
    OFFSETS,
    BlockTensors,
    unread,
)
from forerun.heads.eagle.blueprint import DraftVocabulary, read_ids
from forerun.models.chains import IdExchange, SameIds
from forerun.models.decoder import Decoder, Hidden, TokenBatch, rms_norm, rotate
from forerun.models.layer import MakeLinear, Take
from forerun.models.linear import Linear, make_linear, padded_rows
from forerun.models.loading import Blueprint
from forerun.models.mlp import pad_rows
from forerun.models.native import find_kernels
from forerun.models.runner import Runner
from forerun.models.source import find_heads
from forerun.models.weights import Checkpoint

MASKED = -1  # stands for the token of a masked place


class BlockDecoder(Decoder):
    """The layers as a decoder. It reads the target's states as context, if given any, and else the tokens of blocks."""

    def __init__(self, tensors: BlockTensors, checkpoint: Checkpoint, own: Blueprint, target: Decoder) -> None:
        shapes, self.block = tensors.shapes(), tensors.config

        def take(name: str, _shape: tuple[int, ...]) -> Tensor:
            name = name.removeprefix("model.")
            return checkpoint.take(name, shapes[name]) if name in shapes else target.embedding

        kernels = find_kernels(own.kernels, own.dtype)
        self.shared_head = None if tensors.own_head else target.head
        self.head_shape = (tensors.draft_vocab, tensors.config.layers.hidden)
        super().__init__(tensors.config.layers, take, own.dtype, own.quantize, kernels)
        self.fc = make_linear(take("fc.weight", ()), quantize=own.quantize, kernels=kernels)
        self.hidden_norm = take("hidden_norm.weight", ())
        mask_id = self.block.mask_id
        self.mask = take(MASK_EMBEDDING, ()) if mask_id is None else self.embedding[mask_id]

    def make_head(self, take: Take, make: MakeLinear) -> Linear:
        """The target's, unless the folder has one."""
        return self.shared_head or make(take(HEAD, self.head_shape).to(self.dtype))

    def fuse(self, states: Float[Tensor, "total taps target_hidden"]) -> Float[Tensor, "total hidden"]:
        """The target's states as context: joined, mapped to one, and normed."""
        return rms_norm(product(self.fc, states.flatten(1).to(self.stream)), self.hidden_norm, self.config.norm_eps)

    @property
    def stream(self) -> torch.dtype:
        """The number format of states between layers."""
        return torch.float32 if self.native else self.dtype

    def forward(
        self,
        batch: TokenBatch,
        cache: PagedCache,
        *,
        layers: range | None = None,
        inputs: Float[Tensor, "total hidden"] | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Put context into the cache, which is `inputs`; without it read blocks, whose masked places are MASKED."""
        assert layers is None, "all layers are read"
        assert not taps, "nobody reads its states"
        if inputs is not None:
            self.remember(inputs, batch, cache)
            return Hidden(inputs, None)
        masked = (batch.tokens == MASKED)[:, None]
        embedded = torch.where(masked, self.mask, self.embedding[batch.tokens.clamp(min=0)])
        return super().forward(batch if self.block.causal else all_seen(batch), cache, inputs=embedded)

    def remember(self, context: Float[Tensor, "total hidden"], batch: TokenBatch, cache: PagedCache) -> None:
        """The keys and values that every layer makes of the context."""
        c, total = self.config, len(batch.tokens)
        cos, sin = self.rope.cos[batch.positions][:, None], self.rope.sin[batch.positions][:, None]
        x = pad_rows(context, padded_rows(total))
        for i, layer in enumerate(self.layers):
            qkv = layer.attention.qkv(x)[:total].view(total, -1, c.head_dim)
            key, value = qkv[:, c.heads : c.heads + c.kv_heads], qkv[:, c.heads + c.kv_heads :]
            if layer.attention.qk_norm is not None:
                key = rms_norm(key, layer.attention.qk_norm[c.heads :], c.norm_eps)
            for stored, new in ((cache.keys[i], rotate(key, cos, sin)), (cache.values[i], value)):
                stored.index_copy_(1, batch.slots, new.to(stored.dtype).transpose(0, 1))

    def states(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        """What the heads read of the stream behind the last layer."""
        return rms_norm(hidden, self.norm, self.config.norm_eps)


def all_seen(batch: TokenBatch) -> TokenBatch:
    """The batch, in which every place of a sequence sees what its last one does, and so the same sliding window.

    Positions stay as they are.
    """
    last: dict[int, int] = {}
    for path in batch.paths:
        last[path.first_slot] = max(last.get(path.first_slot, 0), path.positions[-1])
    paths = [replace(p, positions=[last[p.first_slot]] * len(p.queries), masks={}) for p in batch.paths]
    return replace(batch, paths=paths)


@dataclass(frozen=True, slots=True)
class BlockBlueprint:
    """A drafter that was checked, but that is not loaded. `ids` are the target's ids of its head's tokens."""

    own: Blueprint
    tensors: BlockTensors
    ids: Int[Tensor, " draft_vocab"] | None

    @property
    def memory(self) -> ModelMemory:
        """What it takes once loaded; embeddings of its own, and what heads look up, are never quantised."""
        shapes, layers = self.tensors.shapes(), self.own.memory
        tables = sum(math.prod(shapes[name]) for name in shapes if not is_multiplied(name))
        return replace(layers, weights_bytes=layers.weights_bytes + tables * self.own.dtype.itemsize)

    def exchange(self) -> IdExchange:
        """Between the ids of its head and the target's."""
        vocab_size = self.tensors.config.layers.vocab_size
        return SameIds(vocab_size, vocab_size) if self.ids is None else DraftVocabulary(vocab_size, self.ids)

    def load(self, num_tokens: int, max_model_len: int, target: Decoder) -> tuple[Runner, BlockHeads]:
        """The layers with a cache of `num_tokens`, for texts of `max_model_len` at most, and what stands on them."""
        config, own = self.tensors.config, self.own
        positions = min(max_model_len + config.block_size, config.layers.max_positions)
        tensors = replace(self.tensors, config=replace(config, layers=replace(config.layers, max_positions=positions)))
        checkpoint = Checkpoint(own.folder, own.dtype)
        decoder = BlockDecoder(tensors, checkpoint, own, target)
        make = partial(make_linear, quantize=own.quantize, kernels=find_kernels(own.kernels, own.dtype))
        return Runner.of(decoder, num_tokens), BlockHeads.load(tensors, checkpoint, make, self.exchange().spread)


def is_multiplied(name: str) -> bool:
    """Whether a tensor is held as layers are, and not as a table in which rows are looked up, or as a head."""
    return not name.endswith(("embed_tokens.weight", "lm_head.weight", "markov_w1.weight", "_codebook"))


def plan_block_drafter(model: str, target: Blueprint) -> BlockBlueprint:
    """The drafter in the folder `model`. Raises ModelError for a folder that is not there or cannot be used."""
    folder, of = find_heads(model, "block"), target.config
    if target.placement.fixed:
        raise UnsupportedModel(f"{model}: block drafters are computed on CPUs: use device cpu, or another drafter")
    fields = read_fields(folder / "config.json")
    checkpoint = Checkpoint(folder, target.dtype)
    tensors = BlockTensors.of(fields, of, target.name, checkpoint.stored)
    shapes = tensors.shapes()
    for name, shape in shapes.items():
        checkpoint.find(name, shape)
    for name in sorted(set(checkpoint.stored) - {*shapes, OFFSETS, *IGNORED}):
        raise unread(folder, name)
    whole = tensors.draft_vocab == of.vocab_size and OFFSETS not in checkpoint
    ids = None if whole else read_ids(checkpoint, tensors.draft_vocab, of.vocab_size)
    own = Blueprint(
        spec=target.spec.beside(model),
        name=model,
        folder=folder,
        config=replace(tensors.config.layers, vocab_size=0),
        choice=target.choice,
        num_bytes=sum(math.prod(s) for name, s in shapes.items() if is_multiplied(name)) * target.dtype.itemsize,
        placement=target.placement,
    )
    return BlockBlueprint(own, tensors, ids)
