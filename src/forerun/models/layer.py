"""Layer: the weights and settings of a decoder layer, as a backend receives them.

`packing.py` makes layers from a checkpoint's tensors; the backends in `backends/` compute them.
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
LANES = 32  # the width of an MLP is padded to a multiple of this, so that vector code needs no scalar tail


@runtime_checkable
class Linear(Protocol):
    """A linear layer, `x @ weight.T + bias`; the bits of a row must not depend on the other rows."""

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]: ...


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention block of a layer.

    `norm` is the gain of the RMS norm before attention, `out_norm` of that after it; None: no such norm. `qkv` gives
    query heads, then key heads, then value heads. `qk_norm` are the RMS norm gains of query and key heads; with
    `joint_norm` all query heads are normed as one vector, and so are all key heads. `sinks` are extra scores, one per
    query head, without a value. `window` is the sliding window in tokens; None: full attention. `rope_start` is the row
    of position 0 in the rotary tables, `query_rope_start` that for queries.
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
    """A gated MLP, `down(activation(gate) * up)`; gate and up are one linear layer, in this order.

    The activation is SiLU, with `gelu` tanh-GELU, with `clamp` as in Clamp. `plain`: the MLP is not gated, and
    `gate_up` has no up part. The number of neurons is zero-padded to a multiple of LANES.
    """

    gate_up: Linear
    down: Linear
    clamp: Clamp | None = None
    gelu: bool = False
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """Top-k routing: a token uses the `active` experts with the largest logits (the lowest index first among equals).

    Their weights are a softmax over all `count` logits or, if `normalised`, over the chosen ones. If there is a shared
    expert, `linear` has one more output, whose sigmoid is the weight of that expert.
    """

    linear: Linear
    count: int
    active: int
    normalised: bool


@runtime_checkable
class ExpertLayers(Protocol):
    """One linear layer of all experts (gate and up, or down), which the backend multiplies in one call."""

    def of(self, expert: int) -> Linear:
        """The linear layer of this expert alone."""
        ...

    def tile_rows(self, average: float) -> int:
        """The rows of a tile if an expert has `average` rows on average."""
        ...

    def product(
        self, kernels: Any, x: Float[Tensor, "_ inputs"], pairs: Any, sharing: int
    ) -> Float[Tensor, "pairs outputs"]:
        """The outputs of each (row, expert) pair; `sharing` consecutive pairs read the same row of `x`."""
        ...


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """All experts of a layer, for a backend that multiplies them in one call.

    `form` is one expert, whose activation all share. `tiled`: whether tiles of any size give the same bits, so that
    passes of more rows may use larger ones. `num_read` counts, on the device, the experts that passes read.
    """

    gate_up: ExpertLayers
    down: ExpertLayers
    form: GatedMlp
    tiled: bool
    num_read: Int[Tensor, "1"] | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """The MLP block of a layer: a dense MLP, or a mixture of experts.

    Without a router, `dense` is the MLP. With one, tokens are routed to `experts` or, if the backend has them in one
    object, to those in `stacked`; `dense` is then the shared expert, if there is one. Norms are as in Attention; with
    `parallel`, the input is the normed input of attention.
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
    """A decoder layer: the outputs of attention and then of the MLP are added to the residual stream."""

    attention: Attention
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class StateEntry:
    """How a token and the hidden state at its parent become the input of layers, in EAGLE and MTP modules.

    Token embedding and state, each after its norm (None: no norm), are concatenated: the token first, unless
    `state_first`. `map` projects the concatenation to the residual stream; the first attention reads the stream after
    the layer's norm or, with `reads_stream`, without it. If `map` is None, attention reads the concatenation, and the
    stream is the state, with `normed_stream` after its norm. The layers' output, after `output_norm`, is the state for
    the next token. `Entry` in chain.cpp is the same for the compiled kernels.
    """

    map: Linear | None
    token_norm: Float[Tensor, " hidden"] | None
    state_norm: Float[Tensor, " hidden"] | None
    output_norm: Float[Tensor, " hidden"] | None
    state_first: bool = False
    normed_stream: bool = False
    reads_stream: bool = False


def counters_of(layers: Sequence[Layer]) -> list[Int[Tensor, "1"]]:
    """The device counters of experts read (`StackedExperts.num_read`) of all layers that have one."""
    stacks = (layer.mlp.stacked for layer in layers)
    return [each.num_read for each in stacks if each is not None and each.num_read is not None]
