"""Backend: the interface of the code that computes a model. `choice.py` chooses one when a model is loaded.

A backend makes linear layers from weights, and an `Executor` that runs a decoder's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.config import Quantization
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from forerun.models.batch import QueryRule, TokenBatch
from forerun.models.chains import Start, UnreadTexts
from forerun.models.config import ModelConfig
from forerun.models.layer import Bias, GatedMlp, Layer, Linear, StackedExperts, StateEntry, WeightMatrix
from forerun.models.rope import RopeTables
from forerun.models.shards.ranks import RankGroup
from forerun.sampling.draws import Draws

Stream = Float[Tensor, "total hidden"]
AttentionInputs = Float[Tensor, "total inputs"]


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The layers between an embedding table and a head; all linear layers are of one backend.

    `norm` is the final norm, None if the head's inputs are normed already. With an `entry` layers read hidden states
    with the tokens. With `ranks`, layers and head are this rank's shard; the configuration is the whole model's.
    """

    config: ModelConfig
    embedding: Float[Tensor, "vocab hidden"]
    layers: Sequence[Layer]
    norm: Float[Tensor, " hidden"] | None
    head: Linear
    rope: RopeTables
    entry: StateEntry | None = None
    ranks: RankGroup | None = None


@dataclass(frozen=True, slots=True)
class ChainStarts:
    """Where the chains of these `starts` begin, and their places in the cache.

    `slots` are the first slots of their sequences, `positions` those of their first draft tokens. `logits` are those
    after the roots, over `vocab_size` ids, and `states` the hidden states there, for layers with an entry; `head_ids`
    the ids of a head over a reduced vocabulary. With `texts`, which are read first, logits and states are not known
    yet.
    """

    starts: Sequence[Start]
    slots: Sequence[int]
    positions: Sequence[int]
    vocab_size: int
    logits: Float[Tensor, "rows vocab"] | None
    states: Float[Tensor, "rows hidden"] | None
    head_ids: Int[Tensor, " head_vocab"] | None
    texts: UnreadTexts | None = None


# Drafts a chain for each start and reads all of its tokens but the last into the cache, which must have room. A chain
# ends where a sample is not certain. The tensor, if given, is float32 and receives the residual stream after every
# token that is read: [starts, depth, hidden]. Returns the tokens and, if starts have a `min_survival`, their survival.
ChainDrawer = Callable[[ChainStarts, PagedCache, Tensor | None], tuple[list[list[int]], list[list[float]] | None]]


@runtime_checkable
class Executor(Protocol):
    """Runs a decoder's layers and head on one backend; one pass at a time.

    `stream` is the dtype of the residual stream, `query_rule` how queries are grouped. `num_experts_read` are counters,
    updated by every pass: the experts read in each layer; empty for dense models.
    """

    stream: torch.dtype
    query_rule: QueryRule

    @property
    def num_experts_read(self) -> int: ...

    def run(
        self, layers: range, x: Stream, batch: TokenBatch, cache: PagedCache, read: AttentionInputs | None = None
    ) -> Stream:
        """Returns the residual stream `x` after these layers; `x` is not changed. Keys and values go to the cache.

        The first layer's attention reads `x`, normed, or `read` as it is.
        """
        ...

    def write_kv(self, read: AttentionInputs, batch: TokenBatch, cache: PagedCache) -> None:
        """Write to the cache the keys and values that every layer's attention computes from `read`, as it is."""
        ...

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """The logits in float32 of these rows of the residual stream."""
        ...

    def norm_rows(self, x: Stream, gain: Float[Tensor, " hidden"]) -> Stream:
        """These rows of the residual stream after an RMS norm, with the bits that `chain_drawer` gives."""
        ...

    def lower(self, num_layers: int) -> Executor:
        """The first layers with the same norm and head; they share the tensors."""
        ...

    def chain_drawer(self, draws: Draws, reads_states: bool) -> ChainDrawer | None:
        """The function that generates whole chains in one call; None if there is none for these draws."""
        ...


@runtime_checkable
class Backend(Protocol):
    """One way to compute on one device. `name` is shown to users: "AMX kernels", or "torch, AVX512".

    `arithmetic` lists what else the last bits of results depend on, beside name, versions and dtype.
    """

    @property
    def name(self) -> str: ...

    @property
    def arithmetic(self) -> str: ...

    def linear(self, weight: WeightMatrix, bias: Bias | None = None, quantize: Quantization | None = None) -> Linear:
        """A packed linear layer: quantized, or in the weight's dtype."""
        ...

    def grouped(self, weight: GroupedWeight, bias: Bias | None = None) -> Linear:
        """A linear layer of weights quantized in groups, as stored; inputs are rounded to 8 bits."""
        ...

    def stacked(self, experts: Sequence[GatedMlp], dtype: torch.dtype) -> StackedExperts | None:
        """All experts of a layer, for inputs of `dtype`; None if this backend runs experts one by one."""
        ...

    def capped(self, head: Linear, limit: float) -> Linear:
        """A layer with soft-capped outputs: `limit` * tanh(`head`(x) / `limit`), in float32."""
        ...

    def executor(self, parts: DecoderParts) -> Executor:
        """An Executor of these layers, over a cache in the dtype of their norms."""
        ...
