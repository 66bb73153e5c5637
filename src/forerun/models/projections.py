"""LayerTable: the names and shapes of a layer's tensors, and the linear layers that they form.

Loading, checking, the choice of a backend, widening and memory planning all read this table. Names are Llama's, except
those of experts, which each family declares. `expected_tensors` adds embedding, final norm and head.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.models.config import ModelConfig
from forerun.models.experts_config import ExpertsConfig

T = TypeVar("T", bound=Any)  # weights: tensors, or GroupedWeight
FINAL_NORM_BIAS = "model.norm.bias"
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
HEAD_NORM = "self_attn.{}_norm.weight"
ADDING = ("o_proj.weight", "down_proj.weight")  # name endings of matrices that write to the residual stream
Shapes = dict[str, tuple[int, ...]]
Fetch = Callable[[str, tuple[int, ...]], Tensor]  # reads a tensor by its name inside the layer, and its shape


@dataclass(frozen=True, slots=True)
class Stack:
    """Which expert of a stacked tensor of `count` experts a projection is; `transposed` as in ExpertNames."""

    count: int
    expert: int
    transposed: bool


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer, whose outputs are the concatenated *parts*, such as queries, keys and values.

    `sizes` are the outputs of the parts, stored in one tensor each, under `names`, or in one fused or stacked tensor.
    In a fused tensor the parts follow one another; with `runs`, it repeats a slice of each part so many times.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    inputs: int
    bias: bool
    stack: Stack | None = None
    runs: int = 1

    @property
    def outputs(self) -> int:
        """The total number of outputs."""
        return sum(self.sizes)

    def named_sizes(self) -> list[tuple[str, int]]:
        """Each tensor's name and number of outputs."""
        return [*zip(self.names, self.sizes if len(self.names) > 1 else (self.outputs,), strict=True)]

    def weight_shapes(self) -> Shapes:
        """Names and shapes of the tensors of the weight."""
        if self.stack is None:
            return {f"{name}.weight": (size, self.inputs) for name, size in self.named_sizes()}
        size = (self.inputs, self.outputs) if self.stack.transposed else (self.outputs, self.inputs)
        return {self.names[0]: (self.stack.count, *size)}

    def bias_shapes(self) -> Shapes:
        """Names and shapes of the tensors of the bias; empty without a bias."""
        if not self.bias:
            return {}
        if self.stack is None:
            return {f"{name}.bias": (size,) for name, size in self.named_sizes()}
        return {f"{self.names[0]}_bias": (self.stack.count, self.outputs)}

    def read_weight(self, fetch: Fetch) -> list[Float[Tensor, "part inputs"]]:
        """The parts of the weight, one for each of `sizes`."""
        tensors = [fetch(name, shape) for name, shape in self.weight_shapes().items()]
        if self.stack is not None:
            rows = tensors[0][self.stack.expert]
            tensors = [rows.T if self.stack.transposed else rows]
        return self.parts(tensors)

    def read_bias(self, fetch: Fetch) -> list[Float[Tensor, " part"]] | None:
        """The parts of the bias, one for each of `sizes`; None without a bias."""
        tensors = [fetch(name, shape) for name, shape in self.bias_shapes().items()]
        if self.stack is not None:
            tensors = [tensor[self.stack.expert] for tensor in tensors]
        return self.parts(tensors) or None

    def parts(self, tensors: Sequence[T]) -> list[T]:
        """The parts, from tensors of one part each, or from a fused or stacked tensor. Parts of a transposed stack
        alternate row by row."""
        if len(tensors) == len(self.sizes) or not tensors:
            return list(tensors)
        if self.stack is not None and self.stack.transposed:
            return [tensors[0][i :: len(self.sizes)] for i in range(len(self.sizes))]
        if self.runs > 1:
            rows = torch.arange(self.outputs).view(self.runs, -1).split([size // self.runs for size in self.sizes], 1)
            return [tensors[0][each.flatten()] for each in rows]
        ends = list(accumulate(self.sizes))
        return [tensors[0][end - size : end] for end, size in zip(ends, self.sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class GatedTable:
    """The projections of an MLP: gate and up (only the activated one if the MLP is not gated), and down."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class LayerTable:
    """All tensors of a layer. `vectors` are the sizes of norms and sinks, by name.

    Without a router, `dense` is the MLP. In a mixture of experts it is the shared expert (None: there is none), and the
    router's last output is its gate.
    """

    vectors: Mapping[str, int]
    qkv: Projection
    out: Projection
    dense: GatedTable | None
    router: Projection | None = None
    experts: tuple[GatedTable, ...] = ()

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> LayerTable:
        c = config
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        norms = (c.norms.attention, c.norms.attention_out, c.norms.mlp, c.norms.mlp_out)
        parts = ("weight", "bias") if c.norm_bias else ("weight",)
        vectors = {f"{name}.{part}": c.hidden for part in parts for name in norms if name is not None}
        if c.qk_norm:
            sizes = (queries, keys) if c.joint_norm else (c.head_dim, c.head_dim)
            vectors |= {HEAD_NORM.format(name): size for name, size in zip("qk", sizes, strict=True)}
        if c.sinks:
            vectors["self_attn.sinks"] = c.heads
        names = ("self_attn.qkv_proj",) if c.fused_qkv else tuple(f"self_attn.{x}_proj" for x in "qkv")
        qkv = Projection(names, (queries, keys, keys), c.hidden, c.qkv_bias, runs=c.kv_heads if c.by_key_head else 1)
        out = Projection(("self_attn.o_proj",), (c.hidden,), queries, c.out_bias)
        if c.experts is None or layer not in c.experts.layers:
            return cls(vectors, qkv, out, gated(c, "mlp", c.intermediate, c.mlp_bias))
        e = c.experts
        dense = gated(c, "mlp.shared_expert", e.shared, False) if e.shared else None
        routers = (e.names.router, "mlp.shared_expert_gate") if e.shared else (e.names.router,)
        router = Projection(routers, (e.count, 1)[: len(routers)], c.hidden, e.bias)
        return cls(vectors, qkv, out, dense, router, tuple(expert(c, e, i) for i in range(e.count)))

    def projections(self, num_experts: int | None = None) -> Iterator[Projection]:
        """All projections in the order of computation, with only the first `num_experts` experts (None: all)."""
        yield from (self.qkv, self.out)
        if self.router is not None:
            yield self.router
        for mlp in (self.dense, *self.experts[:num_experts]):
            if mlp is not None:
                yield from (mlp.gate_up, mlp.down)

    def tensors(self) -> Shapes:
        """The shapes of all tensors by name: vectors, then weights, then biases."""
        shapes: Shapes = {name: (size,) for name, size in self.vectors.items()}
        for projection in self.projections():
            shapes |= projection.weight_shapes()
        for projection in self.projections():
            shapes |= projection.bias_shapes()
        return shapes


def gated(config: ModelConfig, prefix: str, neurons: int, bias: bool) -> GatedTable:
    """The MLP of this prefix, with Llama's names, or those of a family whose MLPs are not gated."""
    *names, last = config.plain_mlp or ("gate_proj", "up_proj", "down_proj")
    sizes, names = (neurons,) * len(names), ["gate_up_proj"] if config.fused_gate_up else names
    first = Projection(tuple(f"{prefix}.{name}" for name in names), sizes, config.hidden, bias)
    return GatedTable(first, Projection((f"{prefix}.{last}",), (config.hidden,), neurons, bias))


def expert(config: ModelConfig, experts: ExpertsConfig, number: int) -> GatedTable:
    """The MLP of expert `number`, with the names of its family."""
    names, neurons = experts.names, experts.intermediate
    stack = Stack(experts.count, number, names.transposed) if names.is_stacked else None
    gate_up = tuple(name.format(number) for name in names.gate_up)
    down = Projection((names.down.format(number),), (config.hidden,), neurons, experts.bias, stack)
    return GatedTable(Projection(gate_up, (neurons, neurons), config.hidden, experts.bias, stack), down)


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor of the model; lazily, since a damaged config.json may ask for any number."""
    yield EMBEDDING, (config.vocab_size, config.hidden)
    for layer in range(config.layers):
        yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in layer_tensors(config, layer).items())
    yield FINAL_NORM, (config.hidden,)
    if config.norm_bias:
        yield FINAL_NORM_BIAS, (config.hidden,)
    if not config.tied:
        yield HEAD, (config.vocab_size, config.hidden)


def layer_tensors(config: ModelConfig, layer: int) -> Shapes:
    """The shapes of a layer's tensors, by their names inside the layer."""
    return LayerTable.of(config, layer).tensors()


def tensor_shapes(config: ModelConfig) -> Shapes:
    """`expected_tensors` as a dictionary."""
    return dict(expected_tensors(config))


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters, with all experts; a tied head is not counted."""
    return sum(math.prod(shape) for _, shape in expected_tensors(config))


def num_inactive(config: ModelConfig) -> int:
    """The number of parameters in experts that a token does not use, over all layers."""
    if config.experts is None:
        return 0
    one = LayerTable.of(config, config.experts.layers[0]).experts[0]
    numbers = sum(p.outputs * (p.inputs + p.bias) for p in (one.gate_up, one.down))
    return numbers * (config.experts.count - config.experts.active) * len(config.experts.layers)


def products(config: ModelConfig) -> Mapping[tuple[int, int], int]:
    """The number of matrix products by (outputs, inputs) for one token, with the head and the active experts."""
    counts, active = Counter[tuple[int, int]](), config.experts.active if config.experts else None
    for layer in range(config.layers):
        projections = LayerTable.of(config, layer).projections(active)
        counts.update((projection.outputs, projection.inputs) for projection in projections)
    if config.vocab_size:
        counts[config.vocab_size, config.hidden] += 1
    return counts
