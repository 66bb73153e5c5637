"""Layer: the weights and settings of a decoder layer, the same for every backend.

The backends (`backends/`) compute it; `packing.py` makes it from a checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from forerun.annotations import Float, Int
from forerun.models.experts_config import Clamp

WeightMatrix = Float[Tensor, "outputs inputs"]
Bias = Float[Tensor, " outputs"]
LANES = 32  # widths of MLPs are padded to a multiple of this, so that vector code covers whole rows


@runtime_checkable
class Linear(Protocol):
    """`x @ weight.T + bias`, each row on its own."""

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]: ...


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention block. `qk_norm` are the RMS norm gains of query heads, then key heads; `window` None: full
    attention.

    `sinks` is an extra attention logit per query head, without a value. `norm` is applied to the input and `out_norm`
    to the output, where present. `rope_start` is the start of this layer's rotary table, `query_rope_start` that of its
    queries. With `joint_norm` all query heads are normed as one vector, and all key heads.
    """

    norm: Float[Tensor, " hidden"] | None
    qkv: Linear
    out: Linear
    qk_norm: Float[Tensor, "heads head_dim"] | None
    sinks: Float[Tensor, " heads"] | None
    window: int | None
    out_norm: Float[Tensor, " hidden"] | None = None
    rope_start: int = 0
    query_rope_start: int = 0
    joint_norm: bool = False


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(activation(gate) * up)`; gate and up are one linear layer. Widths are zero-padded to a multiple of LANES.

    The activation is SiLU, with `gelu` tanh-GELU, with `clamp` clamped SiLU. `plain`: no up projection.
    """

    gate_up: Linear
    down: Linear
    clamp: Clamp | None = None
    gelu: bool = False
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """Top-k routing: the `active` experts with the largest logits, lower indices first among equals.

    Their weights are a softmax over all `count` logits or, if `normalised`, over the chosen ones. An additional last
    output of `linear` is the gate of the shared expert.
    """

    linear: Linear
    count: int
    active: int
    normalised: bool


@runtime_checkable
class ExpertLayers(Protocol):
    """One linear layer of each expert, multiplied by the backend in one call."""

    def of(self, expert: int) -> Linear:
        """The layer of one expert."""
        ...

    def tile_rows(self, average: float) -> int:
        """Rows per tile if an expert has `average` rows on average."""
        ...

    def product(
        self, kernels: Any, x: Float[Tensor, "_ inputs"], pairs: Any, sharing: int
    ) -> Float[Tensor, "pairs outputs"]:
        """The outputs of each (row, expert) pair; `sharing` consecutive pairs use the same row of `x`."""
        ...


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """All experts of a layer, for a backend that multiplies them in one call.

    `form` is one expert, whose activation all share. `tiled`: larger tiles for more rows give the same bits.
    `num_read`, if present, accumulates the number of experts that were read, on the device.
    """

    gate_up: ExpertLayers
    down: ExpertLayers
    form: GatedMlp
    tiled: bool
    num_read: Int[Tensor, "1"] | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """The MLP of a layer: `dense` is applied to all tokens, experts to the tokens that are routed to them.

    A dense layer has only `dense`, and no router. Norms are as in Attention; with `parallel` the input is that of
    attention. If experts are `stacked`, `experts` is empty.
    """

    norm: Float[Tensor, " hidden"] | None
    dense: GatedMlp | None
    router: Router | None = None
    experts: tuple[GatedMlp, ...] = ()
    out_norm: Float[Tensor, " hidden"] | None = None
    parallel: bool = False
    stacked: StackedExperts | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, then a dense or mixture-of-experts MLP, each added to the residual stream."""

    attention: Attention
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class StateEntry:
    """How a token and the hidden state before it become the input of layers, as in EAGLE and MTP (`Entry` in
    chain.cpp).

    Token embedding and state, each normed if there is a gain, are concatenated, the token first unless `state_first`.
    `map` projects them to the residual stream, which attention reads normed, or as it is (`reads_stream`). Without a
    map attention reads the concatenation, and the residual stream is the state, unchanged or normed (`normed_stream`).
    The layers' output after `output_norm` is the state for the next token.
    """

    map: Linear | None
    token_norm: Float[Tensor, " hidden"] | None
    state_norm: Float[Tensor, " hidden"] | None
    output_norm: Float[Tensor, " hidden"] | None
    state_first: bool = False
    normed_stream: bool = False
    reads_stream: bool = False


def counters_of(layers: Sequence[Layer]) -> list[Int[Tensor, "1"]]:
    """The layers' on-device counters of experts that were read."""
    stacks = (layer.mlp.stacked for layer in layers)
    return [each.num_read for each in stacks if each is not None and each.num_read is not None]
