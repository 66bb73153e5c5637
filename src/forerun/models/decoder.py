"""One decoder for all model families: its weights, and a forward pass over packed tokens.

Families differ only by declared values of ModelConfig; machines by the backend that computes the layers.
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
from forerun.config import Quantization
from forerun.device import DeviceSpan, upload
from forerun.models.backends.base import Backend, DecoderParts
from forerun.models.batch import TokenBatch
from forerun.models.config import ModelConfig
from forerun.models.layer import Linear
from forerun.models.packing import LayerMaker, Take, TakeGroups, centred, gains, shifted
from forerun.models.projections import EMBEDDING, FINAL_NORM, FINAL_NORM_BIAS, HEAD
from forerun.models.rope import rope_tables
from forerun.models.rows import rms_norm
from forerun.models.shards.ranks import RankGroup
from forerun.models.shards.shard import WHOLE, Columns


@dataclass(frozen=True, slots=True)
class Tapped:
    """The hidden states of a pass at the requested taps, one tensor per tap.

    States after the final norm are normed by `norms` when they are read, since most are never needed. If a pass returns
    all taps in one tensor, already normed, that is `together`.
    """

    states: Sequence[Float[Tensor, "total hidden"]]
    norms: Sequence[Callable[[Tensor], Tensor] | None]
    together: Float[Tensor, "total taps hidden"] | None = None

    @classmethod
    def side_by_side(cls, states: Float[Tensor, "total taps hidden"]) -> Tapped:
        return cls(states.unbind(1), [None] * states.shape[1], states)

    @classmethod
    def joined(cls, passes: Sequence[Tapped]) -> Tapped:
        """The states of several passes, concatenated."""
        if len(passes) == 1:
            return passes[0]
        wholes = [each.together for each in passes if each.together is not None]
        if len(wholes) == len(passes):
            return cls.side_by_side(torch.cat(wholes))
        return cls([torch.cat(tap) for tap in zip(*(each.states for each in passes), strict=True)], passes[0].norms)

    def rows(self, places: list[int] | None = None) -> Float[Tensor, "rows taps hidden"]:
        """The states of the tokens with these indices, of all tokens if None."""
        states = self.states
        if self.together is not None:
            together = self.together
            if places is None:
                return together
            first = min(places, default=0)
            if places == [*range(first, first + len(places))]:  # as of one chain
                return together[first : first + len(places)]
            return together[upload(places, torch.long, together.device)]
        if places is not None and places != [*range(len(states[0]))]:
            at = upload(places, torch.long, states[0].device)
            states = [each.index_select(0, at) for each in states]
        normed = [each if norm is None else norm(each) for each, norm in zip(states, self.norms, strict=True)]
        return torch.stack(normed, dim=1) if len(normed) > 1 else normed[0][:, None]


@dataclass(frozen=True, slots=True)
class Hidden:
    """The result of a pass through layers: the residual stream after the last one, and the requested taps."""

    last: Float[Tensor, "total hidden"]
    tapped: Tapped | None


@dataclass(frozen=True, slots=True)
class States:
    """The result of a pass: the requested logits, and the hidden states of all tokens, packed in the order of the
    reads.

    On a GPU later passes overwrite `hidden`: copy it to keep it. `span` is when the pass ran, if it was launched ahead.
    """

    logits: Float[Tensor, "judged vocab"]
    hidden: Float[Tensor, "total hidden"]
    tapped: Tapped | None
    span: DeviceSpan | None = None

    @property
    def taps(self) -> Float[Tensor, "total taps hidden"] | None:
        """The hidden states of all tokens at the requested taps."""
        return None if self.tapped is None else self.tapped.rows()


class Decoder:
    """A decoder-only transformer over a PagedCache.

    `take(name, shape)` yields each checkpoint tensor once, layer by layer; each is packed and dropped, so loading never
    holds more than the weights and the tensors of one layer. A tied head keeps a packed copy of the embedding.
    `quantize` applies to the layers, and the head has 8 bits; embedding, norms, attention and routers have `dtype`.
    Weights from `take_groups` keep their stored format. With a `host` the layers read its states, and use its embedding
    and head. A `head` replaces the checkpoint's. With `ranks` layers and head are this rank's shard; `whole_head` makes
    the whole head.
    """

    layers_alone: ClassVar[bool] = True  # whether a pass is embeddings, or states in their place, layers and a norm
    ranks: RankGroup | None = None
    whole_head: Callable[[], Linear] | None = None

    def __init__(
        self,
        config: ModelConfig,
        take: Take,
        dtype: torch.dtype,
        backend: Backend,
        quantize: Quantization | None = None,
        host: Decoder | None = None,
        take_groups: TakeGroups | None = None,
        head: Linear | None = None,
        ranks: RankGroup | None = None,
        whole_head: Callable[[], Linear] | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        shard = WHOLE if ranks is None else ranks.shard
        self.dtype = dtype
        layers = LayerMaker(config, dtype, backend, quantize, take_groups, shard)
        table = (config.vocab_size, config.hidden)
        self.embedding: Tensor = host.embedding if host else take(EMBEDDING, table).to(dtype)
        self.layers = [layers.load(take, i) for i in range(config.layers)]
        self.norm = gains(take(FINAL_NORM, (config.hidden,)).to(dtype), config.from_one)
        if config.logits_scale != 1:
            self.norm = self.norm.float() * config.logits_scale

        def take_again(name: str, shape: tuple[int, ...]) -> Tensor:
            return self.embedding if name == EMBEDDING else take(name, shape).to(dtype)

        ids = None
        if shard.world > 1:
            mine = shard.columns(Columns.TOKENS, config.vocab_size, config)[shard.rank]
            ids = torch.arange(mine.start, mine.stop)
        head = host.shared_head() if host else head
        self.head: Linear = head or make_head(config, backend, take_again, take_groups, quantize, ids)
        self.whole_head = whole_head
        if config.embedding_scale != 1 and host is None:  # after making the head, which may share the table
            self.embedding = self.embedding * torch.tensor(config.embedding_scale, dtype=dtype)
        if config.centred and host is None:
            self.embedding = centred(self.embedding, 1)
        if shard.rank:  # rank 0 sends states, not tokens
            self.embedding = self.embedding[:1].clone()
        self.rope = rope_tables(config).to(self.embedding.device)
        parts = DecoderParts(config, self.embedding, self.layers, self.norm, self.head, self.rope, ranks=ranks)
        self.executor = backend.executor(parts)

    def shared_head(self) -> Linear:
        """The whole output head, for drafters that use it: a separate copy if ranks share the head."""
        return self.head if self.whole_head is None else self.whole_head()

    @property
    def stream(self) -> torch.dtype:
        """The dtype of the residual stream, and of all states that passes return."""
        return self.executor.stream

    @property
    def num_experts_read(self) -> int:
        """Counters, updated by every pass: experts read in each layer; empty for dense models."""
        return self.executor.num_experts_read

    @property
    def cache_shape(self) -> dict[str, Any]:
        """The arguments of its PagedCache, except the number of tokens; with ranks, for this rank's heads."""
        c = self.ranks.shard.of(self.config) if self.ranks else self.config
        sizes = {"layers": c.layers, "kv_heads": c.kv_heads, "head_dim": c.head_dim}
        return {**sizes, "dtype": self.dtype, "device": self.embedding.device}

    def lower(self, num_layers: int) -> Decoder:
        """The first layers with the same norm and head, as a decoder that shares its tensors.

        It gives the same bits as those layers of the whole decoder, and reads and writes the first layers of the same
        caches.
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
    ) -> Hidden:
        """Run the batch through `layers` (default: all), from `inputs` (default: the embeddings).

        Keys and values are written to `batch.slots`. Taps: i is the residual stream entering layer i, num_layers the
        one before the final norm, -1 the one after it.
        """
        x = (self.embedding[batch.tokens] if inputs is None else inputs).to(self.executor.stream)
        layers = range(len(self.layers)) if layers is None else layers
        kept: dict[int, Tensor] = {}
        cuts = sorted({layers.start, layers.stop, *(t for t in taps if t in layers)})
        for first, end in pairwise(cuts):
            kept[first] = x
            x = self.executor.run(range(first, end), x, batch, cache)
        kept[layers.stop] = kept[-1] = x
        norms = [partial(rms_norm, gain=self.norm, eps=self.config.norm_eps) if t == -1 else None for t in taps]
        return Hidden(x, Tapped([kept[t] for t in taps], norms) if taps else None)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """The logits in float32 of these rows of the residual stream."""
        return self.executor.logits(hidden)


def make_head(
    config: ModelConfig,
    backend: Backend,
    take: Take,
    take_groups: TakeGroups | None,
    quantize: Quantization | None,
    ids: Int[Tensor, " ids"] | None = None,
) -> Linear:
    """The output head for all tokens, or for these only; tied to the embedding where the model is."""
    c, rows = config, slice(None) if ids is None else ids
    name, shape = EMBEDDING if c.tied else HEAD, (c.vocab_size, c.hidden)
    groups = take_groups(name, shape) if take_groups is not None and not c.norm_bias else None
    if groups is not None:
        head = backend.grouped(groups[rows])
    else:
        weight = take(name, shape)[rows]
        bias = shifted(weight, None, take(FINAL_NORM_BIAS, (c.hidden,))) if c.norm_bias else None
        head = backend.linear(weight, bias, quantize="int8" if quantize else None)
    return head if c.logits_cap is None else backend.capped(head, c.logits_cap)
