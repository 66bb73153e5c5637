"""Layer: the values that a decoder consists of, the same for every backend.

Here is what a layer holds; what is computed with it is each backend's (`backends/`), and how it is made of a
checkpoint's tensors is decided in `packing.py`.
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
    """What mixes tokens. `qk_norm` are the gains of query heads, then key heads; `window` None sees everything.

    `sinks` are each query head's score of nothing. What is read is normed where there is a `norm`, and what is added
    where there is an `out_norm`. `first_turn` is where this layer's table of rotations begins, `first_query_turn` where
    that of queries does, if it is another. With `joint_norm` all query heads are normed as one, and all key heads.
    """

    norm: Float[Tensor, " hidden"] | None
    qkv: Linear
    out: Linear
    qk_norm: Float[Tensor, "heads head_dim"] | None
    sinks: Float[Tensor, " heads"] | None
    window: int | None
    out_norm: Float[Tensor, " hidden"] | None = None
    first_turn: int = 0
    first_query_turn: int | None = None
    joint_norm: bool = False


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(activation(gate) * up)`; gate and up are one layer. Widths are padded with zeros to a multiple of LANES.

    The activation is SiLU, GELU by tanh where it is `gelu`, or bounded where there is a `clamp`. Where it is `plain`
    there is no up: all outputs of `gate_up` are activated.
    """

    gate_up: Linear
    down: Linear
    clamp: Clamp | None = None
    gelu: bool = False
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a token takes: the `active` of the largest logits, the lowest numbers among equals.

    A softmax over all `count` logits gives the weights or, where they are `normalised`, one over the chosen. A last
    output of the layer behind the experts' is the gate of the MLP that all tokens take.
    """

    linear: Linear
    count: int
    active: int
    normalised: bool


@runtime_checkable
class ExpertLayers(Protocol):
    """One linear layer of every expert, which a backend multiplies in one go."""

    def of(self, expert: int) -> Linear:
        """The layer of one expert."""
        ...

    def tile_rows(self, average: float) -> int:
        """The rows of a tile where so many choose an expert on average."""
        ...

    def product(
        self, kernels: Any, x: Float[Tensor, "_ inputs"], pairs: Any, sharing: int
    ) -> Float[Tensor, "pairs outputs"]:
        """Each pair's row of `x`, which `sharing` pairs have in common, by the expert that it chose."""
        ...


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """All experts of a layer as one, for a backend that multiplies them in one go.

    `form` is one of them: all activate alike. `tiled`: larger tiles for more rows give the same bits. `num_read`, where
    it is there, counts up in every pass the experts that rows chose, on the device.
    """

    gate_up: ExpertLayers
    down: ExpertLayers
    form: GatedMlp
    tiled: bool
    num_read: Int[Tensor, "1"] | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """What a layer adds behind its attention: `every` is taken by all tokens, experts by those that chose them.

    A dense layer has `every` alone, and no router. Norms are as those of Attention; what is `parallel` reads what
    attention reads. Where experts are `stacked` there are no `experts`.
    """

    norm: Float[Tensor, " hidden"] | None
    every: GatedMlp | None
    router: Router | None = None
    experts: tuple[GatedMlp, ...] = ()
    out_norm: Float[Tensor, " hidden"] | None = None
    parallel: bool = False
    stacked: StackedExperts | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, then a dense or sparse MLP, each added to the residual stream."""

    attention: Attention
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class StateEntry:
    """How layers let in a token beside the state before it, as EAGLE's and MTP modules do (`Entry` in chain.cpp).

    Token and state, each normed where there is a gain, are joined, the token first unless `state_first`. `map` makes
    the residual stream of them, which attention then reads: normed, or as it is (`reads_stream`). Without a map
    attention reads the two themselves, and the stream is the state: as it came, or normed (`normed_stream`). What the
    layers make of it, behind `output_norm`, is the state before the next token.
    """

    map: Linear | None
    token_norm: Float[Tensor, " hidden"] | None
    state_norm: Float[Tensor, " hidden"] | None
    output_norm: Float[Tensor, " hidden"] | None
    state_first: bool = False
    normed_stream: bool = False
    reads_stream: bool = False


def counters_of(layers: Sequence[Layer]) -> list[Int[Tensor, "1"]]:
    """What layers count on the device: experts that rows chose, where they are multiplied as one."""
    stacks = (layer.mlp.stacked for layer in layers)
    return [each.num_read for each in stacks if each is not None and each.num_read is not None]
