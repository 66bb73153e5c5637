"""Decoder: the one decoder-only transformer of all model families, with its weights and its forward pass.

Families differ only in the values of ModelConfig; a `Backend` computes the layers on the device at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.device import DeviceSpan, upload
from forerun.models.backends.base import DecoderParts
from forerun.models.batch import TokenBatch
from forerun.models.config import ModelConfig
from forerun.models.layer import Linear
from forerun.models.packing import LayerMaker, WeightLoader, centred, gains, shifted
from forerun.models.projections import EMBEDDING, FINAL_NORM, FINAL_NORM_BIAS, HEAD
from forerun.models.rope import rope_tables
from forerun.models.rows import rms_norm
from forerun.models.shards.ranks import RankGroup
from forerun.models.shards.shard import WHOLE, Columns


@dataclass(frozen=True, slots=True)
class TapStates:
    """The hidden states of a pass at the requested taps, one tensor per tap.

    `norms[i]` is applied to the states of tap i when `rows` reads them, since most states after the final norm are
    never read. If a pass returns all taps in one tensor, already normed, that is `stacked`.
    """

    states: Sequence[Float[Tensor, "total hidden"]]
    norms: Sequence[Callable[[Tensor], Tensor] | None]
    stacked: Float[Tensor, "total taps hidden"] | None = None

    @classmethod
    def of_stacked(cls, states: Float[Tensor, "total taps hidden"]) -> TapStates:
        return cls(states.unbind(1), [None] * states.shape[1], states)

    @classmethod
    def joined(cls, passes: Sequence[TapStates]) -> TapStates:
        """The states of several passes, concatenated."""
        if len(passes) == 1:
            return passes[0]
        stacked = [each.stacked for each in passes if each.stacked is not None]
        if len(stacked) == len(passes):
            return cls.of_stacked(torch.cat(stacked))
        return cls([torch.cat(tap) for tap in zip(*(each.states for each in passes), strict=True)], passes[0].norms)

    def rows(self, indices: list[int] | None = None) -> Float[Tensor, "rows taps hidden"]:
        """The states of the tokens with these indices in the pass; of all tokens if None."""
        states, stacked = self.states, self.stacked
        if stacked is not None:
            if indices is None:
                return stacked
            first = min(indices, default=0)
            if indices == [*range(first, first + len(indices))]:  # a view, without a copy
                return stacked[first : first + len(indices)]
            return stacked[upload(indices, torch.long, stacked.device)]
        if indices is not None and indices != [*range(len(states[0]))]:
            at = upload(indices, torch.long, states[0].device)
            states = [each.index_select(0, at) for each in states]
        normed = [each if norm is None else norm(each) for each, norm in zip(states, self.norms, strict=True)]
        return torch.stack(normed, dim=1) if len(normed) > 1 else normed[0][:, None]


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """The outputs of some layers: the residual stream after the last of them, and the requested taps."""

    last: Float[Tensor, "total hidden"]
    tapped: TapStates | None


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a runner's pass: the requested logits, and the hidden states of all tokens, in the reads' order.

    `hidden` is the residual stream after the last layer; on a GPU the next pass overwrites it. `tapped` is None if no
    taps were requested. `span` is the time that the pass took on the device, if it was launched ahead.
    """

    logits: Float[Tensor, "judged vocab"]
    hidden: Float[Tensor, "total hidden"]
    tapped: TapStates | None
    span: DeviceSpan | None = None

    @property
    def taps(self) -> Float[Tensor, "total taps hidden"] | None:
        """The hidden states of all tokens at the requested taps."""
        return None if self.tapped is None else self.tapped.rows()


class Decoder:
    """A decoder-only transformer over a PagedCache.

    The constructor reads each tensor of `weights` once, layer by layer, and drops it when it is packed: loading never
    holds more than the packed weights and the tensors of one layer. A tied head is a packed copy of the embedding. With
    a `host` (the target of trained layers), embedding and head are the host's. `head` replaces the checkpoint's head.
    With `ranks`, layers and head are this rank's shard, and `whole_head`, if set, makes the entire head.
    """

    has_plain_forward: ClassVar[bool] = True  # False in subclasses whose `forward` is another
    ranks: RankGroup | None = None
    whole_head: Callable[[], Linear] | None = None

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightLoader,
        host: Decoder | None = None,
        head: Linear | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        shard = WHOLE if ranks is None else ranks.shard
        self.dtype, take = weights.dtype, weights.take
        table = (config.vocab_size, config.hidden)
        self.embedding: Tensor = host.embedding if host else take(EMBEDDING, table).to(self.dtype)
        self.layers = [LayerMaker(config, weights, shard, index).layer() for index in range(config.layers)]
        self.norm = gains(take(FINAL_NORM, (config.hidden,)).to(self.dtype), config.gains_minus_one)
        if config.logits_scale != 1:
            self.norm = self.norm.float() * config.logits_scale

        def take_again(name: str, shape: tuple[int, ...]) -> Tensor:
            return self.embedding if name == EMBEDDING else take(name, shape).to(self.dtype)

        ids = None
        if shard.world > 1:
            mine = shard.columns(Columns.TOKENS, config.vocab_size, config)[shard.rank]
            ids = torch.arange(mine.start, mine.stop)
        head = host.shared_head() if host else head
        self.head: Linear = head or make_head(config, replace(weights, take=take_again), ids)
        if config.embedding_scale != 1 and host is None:  # after making the head, which may share the table
            self.embedding = self.embedding * torch.tensor(config.embedding_scale, dtype=self.dtype)
        if config.layer_norm and host is None:
            self.embedding = centred(self.embedding, 1)
        if shard.rank:  # rank 0 sends states, not tokens
            self.embedding = self.embedding[:1].clone()
        self.rope = rope_tables(config).to(self.embedding.device)
        parts = DecoderParts(config, self.embedding, self.layers, self.norm, self.head, self.rope, ranks=ranks)
        self.executor = weights.backend.executor(parts)

    def shared_head(self) -> Linear:
        """The entire output head, for drafters that use it; a separate copy if the head is split over ranks."""
        return self.head if self.whole_head is None else self.whole_head()

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the residual stream, and of all hidden states that passes return."""
        return self.executor.stream_dtype

    @property
    def num_experts_read(self) -> int:
        """The number of experts that all passes so far have read, summed over layers; 0 for dense models."""
        return self.executor.num_experts_read

    @property
    def cache_shape(self) -> dict[str, Any]:
        """The arguments of its PagedCache, except the number of tokens; with ranks, for this rank's heads."""
        c = self.ranks.shard.of(self.config) if self.ranks else self.config
        sizes = {"layers": c.layers, "kv_heads": c.kv_heads, "head_dim": c.head_dim}
        return {**sizes, "dtype": self.dtype, "device": self.embedding.device}

    def lower(self, num_layers: int) -> Decoder:
        """A decoder of the first `num_layers` layers, with the same norm and head; it shares all tensors.

        Its layers give the same bits as in the entire decoder, and use the first layers of the same caches.
        """
        part = copy(self)
        part.config = replace(self.config, layers=num_layers, windows=self.config.windows[:num_layers])
        part.layers = self.layers[:num_layers]
        part.executor = self.executor.lower(num_layers)
        return part

    def forward(
        self,
        batch: TokenBatch,
        cache: PagedCache,
        *,
        layers: range | None = None,
        inputs: Float[Tensor, "total hidden"] | None = None,
        taps: Sequence[int] = (),
    ) -> LayerOutputs:
        """Run the batch through `layers` (default: all), from `inputs` (default: the embeddings of its tokens).

        Keys and values are written to `batch.slots`. Tap i is the residual stream that enters layer i; tap num_layers
        is the stream before the final norm, and tap -1 the stream after it.
        """
        x = (self.embedding[batch.tokens] if inputs is None else inputs).to(self.executor.stream_dtype)
        layers = range(len(self.layers)) if layers is None else layers
        streams: dict[int, Tensor] = {}  # by the layer that they enter
        cuts = sorted({layers.start, layers.stop, *(t for t in taps if t in layers)})
        for first, end in pairwise(cuts):
            streams[first] = x
            x = self.executor.run(range(first, end), x, batch, cache)
        streams[layers.stop] = streams[-1] = x
        norms = [partial(rms_norm, gain=self.norm, eps=self.config.norm_eps) if t == -1 else None for t in taps]
        return LayerOutputs(x, TapStates([streams[t] for t in taps], norms) if taps else None)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """The logits, in float32, of these rows of the residual stream."""
        return self.executor.logits(hidden)


def make_head(config: ModelConfig, weights: WeightLoader, ids: Int[Tensor, " ids"] | None = None) -> Linear:
    """The output head for all tokens, or for the tokens `ids`, from the embedding if the model ties them."""
    c, rows = config, slice(None) if ids is None else ids
    name, shape = EMBEDDING if c.tied else HEAD, (c.vocab_size, c.hidden)
    groups = weights.take_groups(name, shape) if weights.take_groups is not None and not c.norm_bias else None
    if groups is not None:
        head = weights.backend.grouped(groups[rows])
    else:
        weight = weights.take(name, shape)[rows]
        bias = shifted(weight, None, weights.take(FINAL_NORM_BIAS, (c.hidden,))) if c.norm_bias else None
        head = weights.head(weight, bias)
    return head if c.logits_cap is None else weights.backend.capped(head, c.logits_cap)
