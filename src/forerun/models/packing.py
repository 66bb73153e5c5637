"""LayerMaker: fetches, fuses and packs the weights of a layer.

Query, key and value projections become one linear layer, and so do gate and up.

LayerNorms, which subtract the mean, become RMS norms over a residual stream whose mean is 0: all that is added to it is
centred (`Edit.centred`), and the norms' biases move into the layers that read them. Both changes are exact identities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.config import Quantization
from forerun.models.backends.base import Backend
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from forerun.models.config import ModelConfig
from forerun.models.experts_config import Clamp
from forerun.models.layer import LANES, Attention, GatedMlp, Layer, Linear, Mlp, Router
from forerun.models.projections import HEAD_NORM, Fetch, GatedTable, LayerTable, Projection
from forerun.models.shards.shard import Columns, Shard

T = TypeVar("T", Tensor, GroupedWeight)
Take = Callable[[str, tuple[int, ...]], Tensor]
TakeGroups = Callable[..., GroupedWeight | None]  # (name, shape, part=None); None if it is not stored in groups
MakeLinear = Callable[..., Linear]  # (weight, bias=None)


@dataclass(frozen=True, slots=True)
class LayerMaker:
    """Makes layers of a backend in `dtype`; `quantize` applies to all linear layers but routers.

    With `take_groups`, weights stored in groups stay so. With a `shard`, layers have only the outputs and heads of its
    rank; routers are whole.
    """

    config: ModelConfig
    dtype: torch.dtype
    backend: Backend
    quantize: Quantization | None
    take_groups: TakeGroups | None
    shard: Shard

    def load(self, take: Take, index: int) -> Layer:
        """Fetch, fuse and pack one layer. A tensor of all experts is held until the layer is packed."""
        c, e, table = self.config, self.config.experts, LayerTable.of(self.config, index)

        def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
            return take(f"model.layers.{index}.{name}", shape).to(self.dtype)

        def vector(name: str) -> Tensor:
            return fetch(name, (table.vectors[name],))

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else gains(vector(f"{name}.weight"), c.from_one)

        def shift(name: str | None) -> Tensor | None:
            return None if name is None or not c.norm_bias else vector(f"{name}.bias")

        def project(
            p: Projection,
            what: Columns,
            own: Fetch = fetch,
            outputs: int = 0,
            inputs: int = 0,
            edits: Sequence[Edit] = (),
            shift: Tensor | None = None,
        ) -> Linear:
            part = self.part([size + outputs for size in p.sizes], what)
            changed = outputs or inputs or shift is not None or any(edit.centred for edit in edits)
            weight = None if changed else stored_groups(p, f"model.layers.{index}.", self.take_groups, edits)
            if weight is None:
                make = part(partial(self.backend.linear, quantize=self.quantize))
                return linear(p, make, own, outputs, inputs, edits, shift)
            biases = p.bias_of(own)
            return part(self.backend.grouped)(weight, None if biases is None else torch.cat(edited(biases, edits)))

        added = [Edit(c.added_scale, centred=c.centred)]
        qkv = project(table.qkv, Columns.HEADS, edits=self.head_edits(), shift=shift(c.norms.attention))
        router, experts, stacked = None, list[GatedMlp](), None
        if table.router is not None and e is not None:
            router = Router(linear(table.router, self.backend.linear, fetch), e.count, e.active, e.normalised)
            held = cache(fetch) if e.names.is_stacked else fetch
            experts = [gated(expert, partial(project, own=held), added, e.clamp) for expert in table.experts]
            stacked = self.backend.stacked(experts, self.dtype)
        attention = Attention(
            norm=norm(c.norms.attention),
            qkv=qkv,
            out=project(table.out, Columns.HIDDEN, edits=added),
            qk_norm=self.head_norms(vector) if c.qk_norm else None,
            sinks=vector("self_attn.sinks")[self.shard.heads(c)] if c.sinks else None,
            window=c.windows[index],
            out_norm=norm(c.norms.attention_out),
            rope_start=(start := 0 if not c.turned or c.turned[index] else c.max_positions),
            query_rope_start=c.num_turns * c.max_positions if c.queries_grow else start,
            joint_norm=c.joint_norm,
        )
        read = shift(c.norms.attention if c.parallel else c.norms.mlp)
        dense = None if table.dense is None else gated(table.dense, project, added, None, c.gelu, read)
        kept, norms = () if stacked else tuple(experts), (norm(c.norms.mlp), norm(c.norms.mlp_out))
        return Layer(attention, Mlp(norms[0], dense, router, kept, norms[1], c.parallel, stacked))

    def part(self, sizes: Sequence[int], what: Columns) -> Callable[[MakeLinear], MakeLinear]:
        """Wraps a maker of linear layers, so that it keeps only the outputs of this rank, from parts of these sizes."""
        if self.shard.world == 1:
            return lambda make: make
        rows = self.shard.rows(what, sizes, self.config)
        return lambda make: lambda weight, bias=None: make(weight[rows], None if bias is None else bias[rows])

    def head_norms(self, vector: Callable[[str], Tensor]) -> Float[Tensor, "heads head_dim"]:
        """The norm gains of query and key heads, one row per head."""
        c = self.config
        order = rotary_order(c)
        stored = (gains(vector(HEAD_NORM.format(name)), c.from_one) for name in "qk")
        q, k = (gain.view(-1, c.head_dim)[:, order] for gain in stored)
        queries, keys = (q * c.query_scale).expand(c.heads, -1), k.expand(c.kv_heads, -1)
        return torch.cat([queries[self.shard.heads(c)], keys[self.shard.kv_heads(c)]])

    def head_edits(self) -> list[Edit]:
        """The edits of the query and key projections; if queries are normed, the norm's gains have the scale."""
        c, order = self.config, rotary_order(self.config)
        scale = 1.0 if c.qk_norm else c.query_scale
        if not (c.interleaved or c.rotary_dim):
            return [Edit(scale)]
        queries, keys = (
            (torch.arange(heads)[:, None] * c.head_dim + order).flatten() for heads in (c.heads, c.kv_heads)
        )
        return [Edit(scale, queries), Edit(rows=keys)]


@dataclass(frozen=True, slots=True)
class Edit:
    """A change to a part of a projection before packing: scale its outputs, reorder them (`rows`), center them."""

    scale: float = 1.0
    rows: Int[Tensor, " outputs"] | None = None
    centred: bool = False


def rotary_order(config: ModelConfig) -> Int[Tensor, " head_dim"]:
    """The stored index of each element of a head, in the order of kernels: the first and second elements of all rotated
    pairs in one half each, followed there by elements that are not rotated."""
    c = config
    half, turning = c.head_dim // 2, (c.rotary_dim or c.head_dim) // 2
    first = torch.arange(turning) * (2 if c.interleaved else 1)
    second = first + 1 if c.interleaved else first + turning
    idle = torch.arange(2 * turning, c.head_dim).view(2, half - turning)
    return torch.cat([first, idle[0], second, idle[1]])


def edited(parts: Sequence[T], edits: Sequence[Edit]) -> list[T]:
    """The parts of a projection with the edits applied to the first ones."""
    edited_parts = list(parts)
    for i, edit in enumerate(edits):
        part: Any = edited_parts[i] if edit.rows is None else edited_parts[i][edit.rows]
        part = centred(part, 0) if edit.centred else part
        edited_parts[i] = part if edit.scale == 1.0 else part * edit.scale
    return edited_parts


def centred(numbers: Tensor, dim: int) -> Tensor:
    """The numbers minus their mean along `dim`."""
    wide = numbers.float()
    return (wide - wide.mean(dim, keepdim=True)).to(numbers.dtype)


def gains(stored: Tensor, from_one: bool) -> Tensor:
    """A norm's gains; in float32 if they are stored minus 1 (`from_one`)."""
    return stored.float() + 1 if from_one else stored


def gated(
    table: GatedTable,
    project: Callable[..., Linear],
    added: Sequence[Edit],
    clamp: Clamp | None,
    gelu: bool = False,
    shift: Float[Tensor, " hidden"] | None = None,
) -> GatedMlp:
    """An MLP with neurons zero-padded to a multiple of LANES, which has no effect: the activation of 0 is 0."""
    padding, read = -table.down.inputs % LANES, {} if shift is None else {"shift": shift}
    gate_up = project(table.gate_up, Columns.NEURONS, outputs=padding, **read)
    down = project(table.down, Columns.HIDDEN, inputs=padding, edits=added)
    return GatedMlp(gate_up, down, clamp, gelu, plain=len(table.gate_up.sizes) == 1)


def stored_groups(
    projection: Projection, prefix: str, take: TakeGroups | None, edits: Sequence[Edit]
) -> GroupedWeight | None:
    """A projection's weight in groups; None unless all its parts are stored in groups of the same dtype."""
    if take is None:
        return None
    number = projection.stack.expert if projection.stack else None
    parts = [take(f"{prefix}{name}", shape, number) for name, shape in projection.weights().items()]
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len({part.numbers.dtype for part in present}) > 1:
        return None
    return GroupedWeight.joined(edited(projection.parts(present), edits))


def linear(
    projection: Projection,
    make: MakeLinear,
    fetch: Fetch,
    outputs: int = 0,
    inputs: int = 0,
    edits: Sequence[Edit] = (),
    shift: Float[Tensor, " inputs"] | None = None,
) -> Linear:
    """The linear layer of a projection, with `outputs` zero outputs after each part and `inputs` zero inputs at the
    end; its input is `x + shift`."""
    weights, biases = projection.weight(fetch), projection.bias_of(fetch)
    if shift is not None:
        both = zip(weights, biases or (None,) * len(weights), strict=True)
        biases = [shifted(weight, bias, shift) for weight, bias in both]
    weight = torch.cat([functional.pad(part, (0, inputs, 0, outputs)) for part in edited(weights, edits)])
    biases = None if biases is None else edited(biases, edits)
    return make(weight, torch.cat([functional.pad(part, (0, outputs)) for part in biases]) if biases else None)


def shifted(
    weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None, shift: Float[Tensor, " inputs"]
) -> Float[Tensor, " outputs"]:
    """The bias of a layer whose input is `x + shift`."""
    shifts = weight.float() @ shift.float()
    return (shifts if bias is None else shifts + bias).to(weight.dtype)
