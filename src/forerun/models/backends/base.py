"""Backend: what computes a model. The loader chooses one (choice.py); nothing outside asks which one it was.

A backend makes linear layers of weights, and an `Executor` of a decoder's layers, which computes them as a whole.
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
Entered = Float[Tensor, "total inputs"]


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Layers between a table of embeddings and a head; all linear layers are of one backend.

    `norm` is the head's, None where its inputs are normed already. With an `entry` states are read beside tokens. Where
    there are `ranks`, layers and head are this one's share, and the configuration is of all.
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
    """Where the chains of these `starts` begin and where in the cache they go.

    `slots` are the first slots of their sequences, `positions` where their first guesses stand. `logits` are those
    after the roots, over `vocab_size` ids, and `states` those behind the roots, for layers with an entry; `head_ids`
    the ids of a head over some of them. With `texts` that are read first, there are neither logits nor states yet.
    """

    starts: Sequence[Start]
    slots: Sequence[int]
    positions: Sequence[int]
    vocab_size: int
    logits: Float[Tensor, "rows vocab"] | None
    states: Float[Tensor, "rows hidden"] | None
    head_ids: Int[Tensor, " head_vocab"] | None
    texts: UnreadTexts | None = None


# Draws guesses of each start and reads them, all but a chain's last one, into the cache, which has room. A chain ends
# where its draw is not certain. The tensor, if there is one, is of float32 and gets the residual stream behind every
# guess that is read: [starts, depth, hidden]. Returns the guesses and, where starts have a minimum, their survival.
ChainDrawer = Callable[[ChainStarts, PagedCache, Tensor | None], tuple[list[list[int]], list[list[float]] | None]]


@runtime_checkable
class Executor(Protocol):
    """A decoder's layers and head as one backend computes them; one pass at a time.

    `stream` is the number format of the residual stream, `query_rule` how queries are grouped. `num_experts_read`
    counts up in every pass: the experts of each layer that a token chose; none in dense layers.
    """

    stream: torch.dtype
    query_rule: QueryRule

    @property
    def num_experts_read(self) -> int: ...

    def run(
        self, layers: range, x: Stream, batch: TokenBatch, cache: PagedCache, read: Entered | None = None
    ) -> Stream:
        """The stream behind these layers, of `x`, which stays as it is. Keys and values go to the cache.

        The first layer's attention reads `x`, normed, or `read` as it is.
        """
        ...

    def remember(self, read: Entered, batch: TokenBatch, cache: PagedCache) -> None:
        """Put into the cache the keys and values that the attention of every layer makes of `read`, as it is."""
        ...

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """The head's, in float32, of rows of the stream."""
        ...

    def norm_rows(self, x: Stream, gain: Float[Tensor, " hidden"]) -> Stream:
        """Rows of the stream behind an RMS norm, as chains that are drawn by this executor have them."""
        ...

    def lower(self, num_layers: int) -> Executor:
        """The first layers under the same norm and head; the same tensors, no copies."""
        ...

    def chain_drawer(self, draws: Draws, reads_states: bool) -> ChainDrawer | None:
        """What draws and reads whole chains in a call, with or without states; None where these draws have no such."""
        ...


@runtime_checkable
class Backend(Protocol):
    """One way to compute on one device. `name` says for a reader what computes: "AMX kernels", or "torch, AVX512".

    `arithmetic` is what the last bits of results depend on beside the name, versions and the number format.
    """

    @property
    def name(self) -> str: ...

    @property
    def arithmetic(self) -> str: ...

    def linear(self, weight: WeightMatrix, bias: Bias | None = None, quantize: Quantization | None = None) -> Linear:
        """A layer, packed: of so many bits, or in the weight's own format."""
        ...

    def grouped(self, weight: GroupedWeight, bias: Bias | None = None) -> Linear:
        """A layer of weights in groups, as they are; inputs are rounded to 8 bits."""
        ...

    def stacked(self, experts: Sequence[GatedMlp], dtype: torch.dtype) -> StackedExperts | None:
        """All experts of a layer as one, for rows of `dtype`, where this backend multiplies them so; None where it asks
        each of them."""
        ...

    def capped(self, head: Linear, limit: float) -> Linear:
        """A layer whose outputs are softly bounded: `limit` times the tanh of what `head` gives over it, in float32."""
        ...

    def executor(self, parts: DecoderParts) -> Executor:
        """These layers, as a whole, over a cache in their norms' format."""
        ...
