"""LayerTable: the tensors of a layer, with their names and shapes, and the linear layers that they form.

Checking, loading, the choice of kernels, widening and memory planning all read this table. All families share Llama's
names; those of experts are declared per family. `promised_tensors` adds embedding, final norm and head.
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
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"  # beside the layers
HEAD_NORM = "self_attn.{}_norm.weight"
ADDING = ("o_proj.weight", "down_proj.weight")  # name endings of matrices that write to the residual stream
Shapes = dict[str, tuple[int, ...]]
Fetch = Callable[[str, tuple[int, ...]], Tensor]  # a layer's tensor by its name inside the layer


@dataclass(frozen=True, slots=True)
class Stack:
    """The place of one expert in a tensor of all `count` experts; `transposed` as in ExpertNames."""

    count: int
    expert: int
    transposed: bool


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer: the concatenated outputs of several tensors, or one expert's part of a tensor of all experts.

    `sizes` are the outputs of each of `names`. A stack has one name and all sizes, and so has a fused tensor, in which
    the parts follow one another once, or `runs` times.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    inputs: int
    bias: bool
    stack: Stack | None = None
    runs: int = 1

    @property
    def outputs(self) -> int:
        """The number of outputs of all parts together."""
        return sum(self.sizes)

    def named_sizes(self) -> list[tuple[str, int]]:
        """The number of outputs of each tensor."""
        return [*zip(self.names, self.sizes if len(self.names) > 1 else (self.outputs,), strict=True)]

    def weights(self) -> Shapes:
        """Names and shapes of the tensors of the weight."""
        if self.stack is None:
            return {f"{name}.weight": (size, self.inputs) for name, size in self.named_sizes()}
        size = (self.inputs, self.outputs) if self.stack.transposed else (self.outputs, self.inputs)
        return {self.names[0]: (self.stack.count, *size)}

    def biases(self) -> Shapes:
        """Names and shapes of the tensors of the bias; empty without a bias."""
        if not self.bias:
            return {}
        if self.stack is None:
            return {f"{name}.bias": (size,) for name, size in self.named_sizes()}
        return {f"{self.names[0]}_bias": (self.stack.count, self.outputs)}

    def weight(self, fetch: Fetch) -> list[Float[Tensor, "part inputs"]]:
        """The parts of the weight, one for each of `sizes`."""
        tensors = [fetch(name, shape) for name, shape in self.weights().items()]
        if self.stack is not None:
            rows = tensors[0][self.stack.expert]
            tensors = [rows.T if self.stack.transposed else rows]
        return self.parts(tensors)

    def bias_of(self, fetch: Fetch) -> list[Float[Tensor, " part"]] | None:
        """The parts of the bias, one for each of `sizes`; None without a bias."""
        tensors = [fetch(name, shape) for name, shape in self.biases().items()]
        if self.stack is not None:
            tensors = [tensor[self.stack.expert] for tensor in tensors]
        return self.parts(tensors) or None

    def parts(self, tensors: Sequence[T]) -> list[T]:
        """The parts, from tensors of one part each or from one fused tensor, whose parts follow one another, repeat in
        runs, or (transposed stacks) alternate row by row."""
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
    """The projections of an MLP: gate and up (or only the activated one if it is not gated), and down."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class LayerTable:
    """All tensors of a layer: `vectors` are norms and sinks by name; `dense` is the MLP of all tokens.

    A dense layer has no router and no experts. Beside experts `dense` is the shared expert, and the router's last
    output is its gate.
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
        """All projections in the order of computation; with `num_experts`, those of so many experts only."""
        yield from (self.qkv, self.out)
        if self.router is not None:
            yield self.router
        for mlp in (self.dense, *self.experts[:num_experts]):
            if mlp is not None:
                yield from (mlp.gate_up, mlp.down)

    def tensors(self) -> Shapes:
        """Name and shape of every tensor: vectors, then weights, then biases."""
        shapes: Shapes = {name: (size,) for name, size in self.vectors.items()}
        for projection in self.projections():
            shapes |= projection.weights()
        for projection in self.projections():
            shapes |= projection.biases()
        return shapes


def gated(config: ModelConfig, prefix: str, neurons: int, bias: bool) -> GatedTable:
    """An MLP by Llama's names, or by those of a family whose MLPs gate nothing."""
    *names, last = config.plain_mlp or ("gate_proj", "up_proj", "down_proj")
    sizes, names = (neurons,) * len(names), ["gate_up_proj"] if config.fused_gate_up else names
    first = Projection(tuple(f"{prefix}.{name}" for name in names), sizes, config.hidden, bias)
    return GatedTable(first, Projection((f"{prefix}.{last}",), (config.hidden,), neurons, bias))


def expert(config: ModelConfig, experts: ExpertsConfig, number: int) -> GatedTable:
    """The MLP of one expert, by the names of its family."""
    names, neurons = experts.names, experts.intermediate
    stack = Stack(experts.count, number, names.transposed) if names.is_stacked else None
    gate_up = tuple(name.format(number) for name in names.gate_up)
    down = Projection((names.down.format(number),), (config.hidden,), neurons, experts.bias, stack)
    return GatedTable(Projection(gate_up, (neurons, neurons), config.hidden, experts.bias, stack), down)


def promised_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the model, lazily, since a bad configuration may promise any number."""
    yield EMBEDDING, (config.vocab_size, config.hidden)
    for layer in range(config.layers):
        yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in layer_tensors(config, layer).items())
    yield FINAL_NORM, (config.hidden,)
    if config.norm_bias:
        yield FINAL_NORM_BIAS, (config.hidden,)
    if not config.tied:
        yield HEAD, (config.vocab_size, config.hidden)


def layer_tensors(config: ModelConfig, layer: int) -> Shapes:
    """The tensors of one layer, by their names inside it."""
    return LayerTable.of(config, layer).tensors()


def tensor_shapes(config: ModelConfig) -> Shapes:
    """`promised_tensors` as a dictionary, in the order of computation."""
    return dict(promised_tensors(config))


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, with all experts; a tied head counts once."""
    return sum(math.prod(shape) for _, shape in promised_tensors(config))


def num_idle(config: ModelConfig) -> int:
    """Number of parameters in the experts that one token does not use."""
    if config.experts is None:
        return 0
    one = LayerTable.of(config, config.experts.layers[0]).experts[0]
    numbers = sum(p.outputs * (p.inputs + p.bias) for p in (one.gate_up, one.down))
    return numbers * (config.experts.count - config.experts.active) * len(config.experts.layers)


def products(config: ModelConfig) -> Mapping[tuple[int, int], int]:
    """The matrix products of one token, head included: (outputs, inputs) and how often. Of experts, the active ones."""
    counts, active = Counter[tuple[int, int]](), config.experts.active if config.experts else None
    for layer in range(config.layers):
        taken = LayerTable.of(config, layer).projections(active)
        counts.update((projection.outputs, projection.inputs) for projection in taken)
    if config.vocab_size:
        counts[config.vocab_size, config.hidden] += 1
    return counts
