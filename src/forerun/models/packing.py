"""LayerMaker: how one layer's weights are fetched, fused and packed.

This file decides in which form the tensors of the table (projections.py) are held: query, key and value projections are
one linear layer, and so are gate and up. What makes a linear layer of a weight is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from forerun.models.config import Clamp, ModelConfig
from forerun.models.layer import LANES, Attention, GatedMlp, Layer, Linear, Mlp, Router
from forerun.models.projections import Fetch, GatedTable, LayerTable, Projection

Take = Callable[[str, tuple[int, ...]], Tensor]
TakeGroups = Callable[[str, tuple[int, ...]], GroupedWeight | None]  # None where it is not stored in groups
MakeLinear = Callable[..., Linear]  # (weight, bias=None)


@dataclass(frozen=True, slots=True)
class LayerMaker:
    """Makes layers of tensors in `dtype`: with `make` linear layers, with `make_router` those that choose experts.

    With `take_groups` linear layers whose weights are stored in groups stay so, made with `make_grouped`.
    """

    config: ModelConfig
    dtype: torch.dtype
    make: MakeLinear
    make_router: MakeLinear
    make_grouped: MakeLinear | None = None
    take_groups: TakeGroups | None = None

    def load(self, take: Take, index: int) -> Layer:
        """Fetch, fuse and pack one layer. A tensor of all experts is held until the layer is packed."""
        c, e, table = self.config, self.config.experts, LayerTable.of(self.config, index)

        def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
            return take(f"model.layers.{index}.{name}", shape).to(self.dtype)

        def vector(name: str) -> Tensor:
            return fetch(name, (table.vectors[name],))

        def groups(name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
            return self.take_groups(f"model.layers.{index}.{name}", shape) if self.take_groups else None

        def project(p: Projection, own: Fetch = fetch, outputs: int = 0, inputs: int = 0) -> Linear:
            weight = None if outputs or inputs else stored_groups(p, groups)
            if weight is None or self.make_grouped is None:
                return linear(p, self.make, own, outputs, inputs)
            biases = p.bias_of(own)
            return self.make_grouped(weight, None if biases is None else torch.cat(biases))

        qkv, out = project(table.qkv), project(table.out)
        router, experts = None, list[GatedMlp]()
        if table.router is not None and e is not None:
            router = Router(linear(table.router, self.make_router, fetch), e.count, e.active, e.normalised)
            held = cache(fetch) if e.names.is_stacked else fetch
            experts = [gated(expert, partial(project, own=held), e.clamp) for expert in table.experts]
        attention = Attention(
            norm=vector("input_layernorm.weight"),
            qkv=qkv,
            out=out,
            qk_norm=self.head_norms(vector) if c.qk_norm else None,
            sinks=vector("self_attn.sinks") if c.sinks else None,
            window=c.windows[index],
        )
        norm = vector("post_attention_layernorm.weight")
        every = None if table.every is None else gated(table.every, project, None)
        return Layer(attention, Mlp(norm, every, router, tuple(experts)))

    def head_norms(self, vector: Callable[[str], Tensor]) -> Float[Tensor, "heads head_dim"]:
        """The norm gains of query and key heads, one row per head."""
        c = self.config
        q = vector("self_attn.q_norm.weight").expand(c.heads, -1)
        k = vector("self_attn.k_norm.weight").expand(c.kv_heads, -1)
        return torch.cat([q, k])


def gated(table: GatedTable, project: Callable[..., Linear], clamp: Clamp | None) -> GatedMlp:
    """An MLP whose neurons are padded to a multiple of LANES: the activation of zeros is zero."""
    padding = -table.down.inputs % LANES
    return GatedMlp(project(table.gate_up, outputs=padding), project(table.down, inputs=padding), clamp)


def stored_groups(projection: Projection, groups: TakeGroups) -> GroupedWeight | None:
    """A projection's weight in groups, if all its parts are stored so."""
    parts = [] if projection.stack else [groups(name, shape) for name, shape in projection.weights().items()]
    found = [part for part in parts if part is not None]
    return GroupedWeight.joined(found) if parts and len(found) == len(parts) else None


def linear(projection: Projection, make: MakeLinear, fetch: Fetch, outputs: int = 0, inputs: int = 0) -> Linear:
    """A projection's layer, with so many outputs of zeros behind each of its parts and inputs behind all."""
    weight = torch.cat([functional.pad(part, (0, inputs, 0, outputs)) for part in projection.weight(fetch)])
    biases = projection.bias_of(fetch)
    return make(weight, torch.cat([functional.pad(part, (0, outputs)) for part in biases]) if biases else None)
