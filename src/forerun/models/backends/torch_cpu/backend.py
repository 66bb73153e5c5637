"""TorchBackend: a decoder's layers by torch's operators on a CPU, the reference for all other backends.

The bits of a row do not depend on other rows. Linear layers, attention and MLPs are in other files of this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.config import Quantization
from forerun.machine import order_of_sums
from forerun.models.backends.base import AttentionInputs, ChainDrawer, DecoderParts, Stream
from forerun.models.backends.torch_cpu.attention import attend, query_rule
from forerun.models.backends.torch_cpu.grouped import GroupedLinear, GroupedWeight
from forerun.models.backends.torch_cpu.linear import CappedLinear, make_linear
from forerun.models.backends.torch_cpu.mlp import run_mlp
from forerun.models.batch import QueryRule, TokenBatch
from forerun.models.layer import Attention, Bias, GatedMlp, Linear, StackedExperts, WeightMatrix
from forerun.models.rows import norm_heads, pad_rows, padded_rows, rms_norm, rotate
from forerun.sampling.draws import Draws


class TorchBackend:
    """The backend of torch's operators on CPUs."""

    @property
    def name(self) -> str:
        return f"torch, {torch.backends.cpu.get_cpu_capability()}"

    @property
    def arithmetic(self) -> str:
        """The instruction set, on which torch's elementwise functions depend, and the order of sums in its products."""
        return f"{torch.backends.cpu.get_cpu_capability()} {order_of_sums()}"

    def linear(self, weight: WeightMatrix, bias: Bias | None = None, quantize: Quantization | None = None) -> Linear:
        """The fastest layer that is batch-invariant on this machine."""
        return make_linear(weight, bias, quantize)

    def grouped(self, weight: GroupedWeight, bias: Bias | None = None) -> Linear:
        """A layer that computes the definition, slowly; the loader dequantizes such weights for this backend."""
        return GroupedLinear(weight, bias)

    def stacked(self, experts: Sequence[GatedMlp], dtype: torch.dtype) -> StackedExperts | None:
        return None

    def capped(self, head: Linear, limit: float) -> Linear:
        return CappedLinear(head, limit)

    def executor(self, parts: DecoderParts) -> TorchExecutor:
        """The executor of these parts, with the query rule for their shape."""
        c, dtype = parts.config, parts.embedding.dtype
        rule = query_rule(c.heads, c.kv_heads, c.head_dim, dtype, torch.get_num_threads(), c.score_cap)
        return TorchExecutor(parts, rule)


def normed(x: Float[Tensor, "rows hidden"], gain: Tensor | None, eps: float) -> Float[Tensor, "rows hidden"]:
    """The rows after an RMS norm; unchanged without a gain."""
    return x if gain is None else rms_norm(x, gain, eps)


class TorchExecutor:
    """Runs a decoder's layers with torch's operators, one after another."""

    def __init__(self, parts: DecoderParts, rule: QueryRule) -> None:
        self.parts = parts
        self.stream_dtype = parts.embedding.dtype
        self.query_rule = rule
        self.num_read = 0

    @property
    def num_experts_read(self) -> int:
        return self.num_read

    def norm_rows(self, x: Stream, gain: Float[Tensor, " hidden"]) -> Stream:
        return rms_norm(x, gain, self.parts.config.norm_eps)

    def run(
        self, layers: range, x: Stream, batch: TokenBatch, cache: PagedCache, read: AttentionInputs | None = None
    ) -> Stream:
        c, total, rope = self.parts.config, len(x), dict[int, tuple[Tensor, Tensor]]()
        x = pad_rows(x, padded_rows(total))
        inputs = None if read is None else pad_rows(read, len(x))
        for i in layers:
            attention, mlp = self.parts.layers[i].attention, self.parts.layers[i].mlp
            first, store = attention.rope_start, (cache.keys[i], cache.values[i])
            rope[first] = rope.get(first) or self.rotations(attention, batch.positions, len(x))
            inputs = normed(x, attention.norm, c.norm_eps) if inputs is None else inputs
            queries = self.queries(attention, inputs, batch, store, rope[first])
            mixed = attend(queries, *store, batch.paths, attention.window, attention.sinks, c.score_cap)
            added = attention.out(pad_rows(mixed.view(total, -1), len(x)))
            x = x + normed(added, attention.out_norm, c.norm_eps)
            added, num_read = run_mlp(mlp, inputs if mlp.parallel else normed(x, mlp.norm, c.norm_eps), total)
            x, inputs = x + normed(added, mlp.out_norm, c.norm_eps), None
            self.num_read += num_read
        return x[:total]

    def rotations(
        self, layer: Attention, positions: Int[Tensor, " total"], rows: int
    ) -> tuple[Float[Tensor, "rows turned head_dim"], Float[Tensor, "rows turned head_dim"]]:
        """Cosines and sines of these positions for a layer, padded to `rows`: for all heads together, or for each."""
        c, heads = self.parts.config, [(layer.rope_start, 1)]
        if layer.query_rope_start != layer.rope_start:
            heads = [(layer.query_rope_start, c.heads), (layer.rope_start, c.kv_heads)]

        def of(table: Tensor) -> Tensor:
            each = [table[positions + first][:, None].expand(-1, count, -1) for first, count in heads]
            return pad_rows(torch.cat(each, dim=1), rows)

        return of(self.parts.rope.cos), of(self.parts.rope.sin)

    def queries(
        self,
        layer: Attention,
        x: Float[Tensor, "rows inputs"],
        batch: TokenBatch,
        store: tuple[Tensor, Tensor],
        rope: tuple[Tensor, Tensor],
    ) -> Float[Tensor, "total heads head_dim"]:
        """The rotated queries of normed rows `x`; writes keys and values to `store`. `rope` are cosines and sines."""
        c, total, (keys, values) = self.parts.config, len(batch.tokens), store
        qkv = layer.qkv(x).view(len(x), -1, c.head_dim)
        rotated, value = qkv[:, : c.heads + c.kv_heads], qkv[:total, c.heads + c.kv_heads :]
        if layer.qk_norm is not None:
            rotated = norm_heads(rotated, layer.qk_norm, (c.heads, c.kv_heads), c.norm_eps, layer.joint_norm)
        rotated = rotate(rotated, *rope)
        keys.index_copy_(1, batch.slots, rotated[:total, c.heads :].transpose(0, 1))
        values.index_copy_(1, batch.slots, value.transpose(0, 1))
        return rotated[:total, : c.heads]

    def write_kv(self, read: AttentionInputs, batch: TokenBatch, cache: PagedCache) -> None:
        read = pad_rows(read, padded_rows(len(read)))
        for i, layer in enumerate(self.parts.layers):
            rope = self.rotations(layer.attention, batch.positions, len(read))
            self.queries(layer.attention, read, batch, (cache.keys[i], cache.values[i]), rope)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        rows = normed(pad_rows(hidden, padded_rows(len(hidden))), self.parts.norm, self.parts.config.norm_eps)
        return self.parts.head(rows)[: len(hidden)].float()

    def lower(self, num_layers: int) -> TorchExecutor:
        part = copy(self)
        part.parts = replace(self.parts, layers=self.parts.layers[:num_layers])
        return part

    def chain_drawer(self, draws: Draws, reads_states: bool) -> ChainDrawer | None:
        return None
