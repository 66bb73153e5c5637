"""Backend: the protocol of the code that computes a model: it packs weights into linear layers, and makes an
`Executor` that runs a decoder's layers. `choice.py` chooses the backend of a model when it is loaded.
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
from forerun.models.chains import ChainStart, UnreadTexts
from forerun.models.config import ModelConfig
from forerun.models.layer import Bias, GatedMlp, Layer, Linear, StackedExperts, StateEntry, WeightMatrix
from forerun.models.rope import RopeTables
from forerun.models.shards.ranks import RankGroup
from forerun.sampling.draws import Draws

Stream = Float[Tensor, "total hidden"]
AttentionInputs = Float[Tensor, "total inputs"]


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The parts of a decoder that an Executor computes; all linear layers were made by one backend.

    `norm` is the final norm; None if the head's inputs are normed already. With an `entry`, the layers read each token
    with a hidden state. With `ranks`, layers and head are this rank's shard, and `config` is the entire model's.
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
    """The inputs of a ChainDrawer, one item or row for each chain of `starts`.

    `slots` are the first cache slots of the sequences, and `positions` the positions of the first draft tokens.
    `logits` are those after the roots, over `vocab_size` ids, and `states` the hidden states there, for layers with a
    StateEntry. `head_ids` are the ids of the logits' columns if the head has a reduced vocabulary. With `texts`, which
    are read first, logits and states are None.
    """

    starts: Sequence[ChainStart]
    slots: Sequence[int]
    positions: Sequence[int]
    vocab_size: int
    logits: Float[Tensor, "rows vocab"] | None
    states: Float[Tensor, "rows hidden"] | None
    head_ids: Int[Tensor, " head_vocab"] | None
    texts: UnreadTexts | None = None


# Drafts a chain for each start, and reads all of its tokens but the last into the cache, which must have room. A chain
# ends early where the kernel's arithmetic cannot decide which token torch would sample. The tensor, if any, is float32
# [starts, depth, hidden], and receives the residual stream after each token that is read. Returns the draft tokens and,
# if a start has a `min_survival`, their survival.
ChainDrawer = Callable[[ChainStarts, PagedCache, Tensor | None], tuple[list[list[int]], list[list[float]] | None]]


@runtime_checkable
class Executor(Protocol):
    """Runs a decoder's layers and head on one backend; not thread-safe.

    `stream_dtype` is the dtype of the residual stream; `query_rule` is how passes must group queries.
    `num_experts_read` is the number of experts that all passes so far have read, summed over layers.
    """

    stream_dtype: torch.dtype
    query_rule: QueryRule

    @property
    def num_experts_read(self) -> int: ...

    def run(
        self, layers: range, x: Stream, batch: TokenBatch, cache: PagedCache, read: AttentionInputs | None = None
    ) -> Stream:
        """The residual stream after these layers, from `x`, which is not changed; writes keys and values to the cache.

        The attention of the first layer reads `x` after its norm or, if it is not None, `read` without a norm.
        """
        ...

    def write_kv(self, read: AttentionInputs, batch: TokenBatch, cache: PagedCache) -> None:
        """Write to the cache the keys and values that every layer's attention computes from `read`, without a norm."""
        ...

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """The logits, in float32, of these rows of the residual stream; the final norm is applied first."""
        ...

    def norm_rows(self, x: Stream, gain: Float[Tensor, " hidden"]) -> Stream:
        """These rows of the residual stream after an RMS norm, with the bits that a `chain_drawer` computes."""
        ...

    def lower(self, num_layers: int) -> Executor:
        """An executor of the first `num_layers` layers, with the same norm and head; it shares all tensors."""
        ...

    def chain_drawer(self, draws: Draws, reads_states: bool) -> ChainDrawer | None:
        """A function that drafts entire chains in one call; None if there is none for these draws. `reads_states`:
        whether the layers read hidden states with the tokens."""
        ...


@runtime_checkable
class Backend(Protocol):
    """One way to compute models on one device. `name` is shown to users, such as "AMX kernels" or "torch, AVX512".

    `arithmetic` tells what else the last bits of results depend on, for fingerprints: beyond name, versions and dtype.
    """

    @property
    def name(self) -> str: ...

    @property
    def arithmetic(self) -> str: ...

    def linear(self, weight: WeightMatrix, bias: Bias | None = None, quantize: Quantization | None = None) -> Linear:
        """A packed linear layer: quantized to this format, or in the weight's dtype."""
        ...

    def grouped(self, weight: GroupedWeight, bias: Bias | None = None) -> Linear:
        """A packed linear layer of weights that are stored quantized in groups; their numbers are not changed."""
        ...

    def stacked(self, experts: Sequence[GatedMlp], dtype: torch.dtype) -> StackedExperts | None:
        """All experts of a layer in one object, for inputs of `dtype`; None if this backend runs experts one by one."""
        ...

    def capped(self, head: Linear, limit: float) -> Linear:
        """A layer with soft-capped outputs, `limit * tanh(head(x) / limit)` in float32; `head` may be changed."""
        ...

    def executor(self, parts: DecoderParts) -> Executor:
        """An Executor of these parts; its KV cache has the dtype of the embedding."""
        ...
