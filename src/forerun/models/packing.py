"""WeightLoader and LayerMaker: read, fuse and pack the weights of a model, layer by layer, for a backend.

Query, key and value projections become one linear layer, and so do gate and up.

A LayerNorm, which subtracts the mean, becomes an RMS norm: all outputs that are added to the residual stream are
centred (`Edit.centred`), so that the stream's mean is 0, and the norm's bias moves into the linear layer that reads the
norm. Both are identities in exact arithmetic.
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
from forerun.models.layer import LANES, Attention, Bias, GatedMlp, Layer, Linear, Mlp, Router, WeightMatrix
from forerun.models.projections import HEAD_NORM, Fetch, GatedTable, LayerTable, Projection
from forerun.models.shards.shard import Columns, Shard

T = TypeVar("T", Tensor, GroupedWeight)
Take = Callable[[str, tuple[int, ...]], Tensor]  # reads a tensor by its name and shape
TakeGroups = Callable[..., GroupedWeight | None]  # (name, shape, part=None); None if it is not stored in groups
MakeLinear = Callable[..., Linear]  # (weight, bias=None)


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """Where the weights of a model come from (`take`), and the backend, the dtype and the format that they get.

    `quantize` is the format of the linear layers of attention and MLPs; then the head has 8 bits. Weights that
    `take_groups` returns keep their stored numbers. Embedding, norms, KV cache and routers have `dtype`.
    """

    take: Take
    dtype: torch.dtype
    backend: Backend
    quantize: Quantization | None = None
    take_groups: TakeGroups | None = None

    def linear(self, weight: WeightMatrix, bias: Bias | None = None) -> Linear:
        """A packed layer in the format `quantize`."""
        return self.backend.linear(weight, bias, self.quantize)

    def head(self, weight: WeightMatrix, bias: Bias | None = None) -> Linear:
        """A packed output head, in 8 bits if the layers are quantized."""
        return self.backend.linear(weight, bias, "int8" if self.quantize else None)


@dataclass(frozen=True, slots=True)
class LayerMaker:
    """Makes layer `index` of a model from its weights.

    The layer has only the outputs and heads of the `shard`'s rank, except for the router, which every rank holds in
    full.
    """

    config: ModelConfig
    weights: WeightLoader
    shard: Shard
    index: int

    def layer(self) -> Layer:
        """Read, fuse and pack the layer. A stacked tensor of experts is held until the layer is packed."""
        table = LayerTable.of(self.config, self.index)
        return Layer(self.attention(table), self.mlp(table))

    def attention(self, table: LayerTable) -> Attention:
        c = self.config
        rope_start = 0 if not c.rotated or c.rotated[self.index] else c.max_positions
        shift = self.norm_bias(c.norms.attention)
        return Attention(
            norm=self.norm(c.norms.attention),
            qkv=self.project(table.qkv, Columns.HEADS, edits=self.head_edits(), shift=shift),
            out=self.project(table.out, Columns.HIDDEN, edits=self.residual_edits()),
            qk_norm=self.head_norms(table) if c.qk_norm else None,
            sinks=self.fetch("self_attn.sinks", (c.heads,))[self.shard.heads(c)] if c.sinks else None,
            window=c.windows[self.index],
            out_norm=self.norm(c.norms.attention_out),
            rope_start=rope_start,
            query_rope_start=c.num_rope_tables * c.max_positions if c.grows_queries else rope_start,
            joint_norm=c.joint_norm,
        )

    def mlp(self, table: LayerTable) -> Mlp:
        c, e, edits = self.config, self.config.experts, self.residual_edits()
        dense, router, experts, stacked = None, None, list[GatedMlp](), None
        if table.dense is not None:
            shift = self.norm_bias(c.norms.attention if c.parallel else c.norms.mlp)
            dense = gated(table.dense, self.project, edits, None, c.gelu, shift)
        if table.router is not None and e is not None:
            layer = linear(table.router, self.weights.backend.linear, self.fetch)
            router = Router(layer, e.count, e.active, e.normalised)
            fetch = cache(self.fetch) if e.names.is_stacked else self.fetch
            experts = [gated(expert, partial(self.project, fetch=fetch), edits, e.clamp) for expert in table.experts]
            stacked = self.weights.backend.stacked(experts, self.weights.dtype)
        singles, norms = () if stacked else tuple(experts), (self.norm(c.norms.mlp), self.norm(c.norms.mlp_out))
        return Mlp(norms[0], dense, router, singles, norms[1], c.parallel, stacked)

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this name inside the layer."""
        return self.weights.take(f"model.layers.{self.index}.{name}", shape).to(self.weights.dtype)

    def norm(self, name: str | None) -> Float[Tensor, " hidden"] | None:
        """The gains of this norm; None without a name."""
        c = self.config
        return None if name is None else gains(self.fetch(f"{name}.weight", (c.hidden,)), c.gains_minus_one)

    def norm_bias(self, name: str | None) -> Float[Tensor, " hidden"] | None:
        """The bias of this norm; None without a name, or if norms have no biases."""
        c = self.config
        return self.fetch(f"{name}.bias", (c.hidden,)) if name is not None and c.norm_bias else None

    def project(
        self,
        projection: Projection,
        what: Columns,
        fetch: Fetch | None = None,
        outputs: int = 0,
        inputs: int = 0,
        edits: Sequence[Edit] = (),
        shift: Tensor | None = None,
    ) -> Linear:
        """The packed linear layer of a projection, with arguments as in `linear`; in stored groups if possible."""
        fetch = fetch or self.fetch
        part = self.part([size + outputs for size in projection.sizes], what)
        changed = outputs or inputs or shift is not None or any(edit.centred for edit in edits)
        take_groups = None if changed else self.weights.take_groups
        weight = stored_groups(projection, f"model.layers.{self.index}.", take_groups, edits)
        if weight is None:
            return linear(projection, part(self.weights.linear), fetch, outputs, inputs, edits, shift)
        biases = projection.read_bias(fetch)
        return part(self.weights.backend.grouped)(weight, None if biases is None else torch.cat(edited(biases, edits)))

    def part(self, sizes: Sequence[int], what: Columns) -> Callable[[MakeLinear], MakeLinear]:
        """A wrapper that limits functions which make linear layers to this rank's outputs of parts of these sizes."""
        if self.shard.world == 1:
            return lambda make: make
        rows = self.shard.rows(what, sizes, self.config)
        return lambda make: lambda weight, bias=None: make(weight[rows], None if bias is None else bias[rows])

    def head_norms(self, table: LayerTable) -> Float[Tensor, "heads head_dim"]:
        """The norm gains of this rank's query heads, then key heads, one row per head."""
        c, order = self.config, rotary_order(self.config)
        names = (HEAD_NORM.format(each) for each in "qk")
        stored = (gains(self.fetch(name, (table.vectors[name],)), c.gains_minus_one) for name in names)
        q, k = (gain.view(-1, c.head_dim)[:, order] for gain in stored)
        queries, keys = (q * c.query_scale).expand(c.heads, -1), k.expand(c.kv_heads, -1)
        return torch.cat([queries[self.shard.heads(c)], keys[self.shard.kv_heads(c)]])

    def residual_edits(self) -> list[Edit]:
        """The edits of projections whose outputs are added to the residual stream."""
        return [Edit(self.config.residual_scale, centred=self.config.layer_norm)]

    def head_edits(self) -> list[Edit]:
        """The edits of the query and key projections; if queries are normed, the scale is in the norm's gains."""
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
    """A change to one part of a projection before packing: reorder its outputs (`rows`), centre them, scale them."""

    scale: float = 1.0
    rows: Int[Tensor, " outputs"] | None = None
    centred: bool = False


def rotary_order(config: ModelConfig) -> Int[Tensor, " head_dim"]:
    """The order in which kernels hold the elements of a head, as stored indices: the first elements of the rotary pairs
    in the first half and the second elements in the other half, each followed by elements that are not rotated."""
    c = config
    half, pairs = c.head_dim // 2, (c.rotary_dim or c.head_dim) // 2
    first = torch.arange(pairs) * (2 if c.interleaved else 1)
    second = first + 1 if c.interleaved else first + pairs
    unrotated = torch.arange(2 * pairs, c.head_dim).view(2, half - pairs)
    return torch.cat([first, unrotated[0], second, unrotated[1]])


def edited(parts: Sequence[T], edits: Sequence[Edit]) -> list[T]:
    """The parts of a projection, with edit i applied to part i; further parts are unchanged."""
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


def gains(stored: Tensor, minus_one: bool) -> Tensor:
    """A norm's gains; 1 is added to gains that are stored minus 1, in float32."""
    return stored.float() + 1 if minus_one else stored


def gated(
    table: GatedTable,
    project: Callable[..., Linear],
    added: Sequence[Edit],
    clamp: Clamp | None,
    gelu: bool = False,
    shift: Float[Tensor, " hidden"] | None = None,
) -> GatedMlp:
    """An MLP, zero-padded to a multiple of LANES neurons; this has no effect, since the activation of 0 is 0."""
    padding, read = -table.down.inputs % LANES, {} if shift is None else {"shift": shift}
    gate_up = project(table.gate_up, Columns.NEURONS, outputs=padding, **read)
    down = project(table.down, Columns.HIDDEN, inputs=padding, edits=added)
    return GatedMlp(gate_up, down, clamp, gelu, plain=len(table.gate_up.sizes) == 1)


def stored_groups(
    projection: Projection, prefix: str, take: TakeGroups | None, edits: Sequence[Edit]
) -> GroupedWeight | None:
    """A projection's group-quantized weight; None unless all its parts are stored in groups, in the same dtype."""
    if take is None:
        return None
    number = projection.stack.expert if projection.stack else None
    parts = [take(f"{prefix}{name}", shape, number) for name, shape in projection.weight_shapes().items()]
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
    weights, biases = projection.read_weight(fetch), projection.read_bias(fetch)
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
