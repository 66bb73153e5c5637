"""One decoder for all families.

This module decides the arithmetic of a forward pass over packed tokens: norms, rotations, projections, head. Families
differ by declared values of ModelConfig only. Elementwise work keeps each row's bits independent of the other rows;
linear layers, attention and MLPs keep it in files of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.config import Quantization
from forerun.models.attention import EACH_ALONE, AttentionPath, QueryRule, attend, query_rule
from forerun.models.config import ModelConfig
from forerun.models.layer import LayerMaker, MakeLinear, Take
from forerun.models.linear import Linear, make_linear, padded_rows
from forerun.models.mlp import pad_rows
from forerun.models.native import Kernels
from forerun.models.rope import rope_tables


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens to read in one pass, packed over sequences: prompt chunks, chains and trees side by side."""

    tokens: Int[Tensor, " total"]
    positions: Int[Tensor, " total"]
    slots: Int[Tensor, " total"]  # where their keys and values are stored
    paths: list[AttentionPath]

    def some(self, rows: Sequence[int]) -> TokenBatch:
        """Some of the tokens, in ascending order: these queries alone, over the same keys."""
        number, index = {row: i for i, row in enumerate(rows)}, torch.tensor(rows, dtype=torch.long)
        paths = []
        for path in self.paths:
            chosen = [(number[q], p) for q, p in zip(path.queries, path.positions, strict=True) if q in number]
            if chosen:
                queries, positions = zip(*chosen, strict=True)
                paths.append(replace(path, queries=queries, positions=positions, masks={}))
        return TokenBatch(self.tokens[index], self.positions[index], self.slots[index], paths)


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a pass leaves: the residual stream behind the last layer that ran, and the taps asked for."""

    last: Float[Tensor, "total hidden"]
    taps: Float[Tensor, "total taps hidden"] | None


class Decoder:
    """A decoder-only transformer over a PagedCache.

    `take(name, shape)` yields each checkpoint tensor once, layer by layer; what it returns is packed and dropped, so
    loading never holds more than the weights and the tensors of one layer. A tied head keeps a packed copy of the
    embedding. With `quantize` the layers are of so many bits and the head is of 8; embedding, norms, attention and what
    chooses experts are of `dtype`. `num_experts_read` counts up in every pass: the experts of each layer that a token
    chose; none in dense layers.
    `make` turns weight and bias into a layer on other devices than this CPU; it excludes `kernels`, and the caller then
    computes attention. Under a `host` these layers are read from its states: embedding and
    head are the host's own.
    """

    def __init__(
        self,
        config: ModelConfig,
        take: Take,
        dtype: torch.dtype,
        quantize: Quantization | None = None,
        kernels: Kernels | None = None,
        make: MakeLinear | None = None,
        host: Decoder | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.num_experts_read = 0
        plain = make or partial(make_linear, kernels=kernels)
        layers = LayerMaker(config, dtype, make or partial(plain, quantize=quantize), make_router=plain)
        self.query_rule = EACH_ALONE if kernels or make else self.ask_query_rule()
        table = (config.vocab_size, config.hidden)
        self.embedding: Tensor = host.embedding if host else take("model.embed_tokens.weight", table).to(dtype)
        self.layers = [layers.load(take, i) for i in range(config.layers)]
        self.norm = take("model.norm.weight", (config.hidden,)).to(dtype)
        of_8_bits = partial(make_linear, quantize="int8" if quantize else None, kernels=kernels)
        self.head: Linear = host.head if host else self.make_head(take, make or of_8_bits)
        self.rope = rope_tables(config).to(self.embedding.device)
        self.native = kernels.decoder(config, self.layers, self.norm, self.head) if kernels else None

    def make_head(self, take: Take, make: MakeLinear) -> Linear:
        """The head, the embedding's weights packed once more where the two are tied."""
        c = self.config
        weight = self.embedding if c.tied else take("lm_head.weight", (c.vocab_size, c.hidden))
        return make(weight.to(self.dtype))

    def lower(self, num_layers: int) -> Decoder:
        """The first layers under the same norm and head, as a decoder of its own: the same tensors, no copies.

        It computes what the whole decoder does up to there, to the bit, and reads and writes the first layers of the
        same caches.
        """
        part = copy(self)
        part.config = replace(self.config, layers=num_layers, windows=self.config.windows[:num_layers])
        part.layers = self.layers[:num_layers]
        part.native = None if self.native is None else self.native.lower(num_layers)
        return part

    def ask_query_rule(self) -> QueryRule:
        """The rule for queries of this shape in torch's attention, on this machine."""
        c = self.config
        return query_rule(c.heads, c.kv_heads, c.head_dim, self.dtype, torch.get_num_threads())

    def forward(
        self,
        batch: TokenBatch,
        cache: PagedCache,
        *,
        layers: range | None = None,
        inputs: Float[Tensor, "total hidden"] | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Read the batch through `layers` (all, unless told), from `inputs` (the embeddings, unless given).

        Keys and values land in `batch.slots`. Taps: i is the residual stream entering layer i, num_layers the one
        before the final norm, -1 the one behind it.
        """
        x = self.embedding[batch.tokens] if inputs is None else inputs
        if self.native is not None:
            x = x.to(torch.float32, copy=True)
        layers = range(len(self.layers)) if layers is None else layers
        kept: dict[int, Tensor] = {}
        cuts = sorted({layers.start, layers.stop, *(t for t in taps if t in layers)})
        for first, end in pairwise(cuts):
            kept[first] = x.clone() if self.native and first in taps else x
            x = self.run_layers(range(first, end), x, batch, cache)
        kept[layers.stop] = x
        if -1 in taps:
            kept[-1] = rms_norm(x, self.norm, self.config.norm_eps)
        return Hidden(x, torch.stack([kept[t] for t in taps], dim=1) if taps else None)

    def run_layers(
        self, layers: range, x: Float[Tensor, "total hidden"], batch: TokenBatch, cache: PagedCache
    ) -> Float[Tensor, "total hidden"]:
        """Some layers in a row: by the compiled kernels, in place, or by torch's operators."""
        if self.native is not None:
            self.num_experts_read += self.native.forward(x, batch, cache, self.rope, layers)
            return x
        total = len(x)
        cos, sin = self.rope.cos[batch.positions][:, None], self.rope.sin[batch.positions][:, None]
        x, cos, sin = (pad_rows(t, padded_rows(total)) for t in (x, cos, sin))
        for i in layers:
            x = self.run_layer(i, x, batch, cache, cos, sin)
        return x[:total]

    def run_layer(
        self, index: int, x: Tensor, batch: TokenBatch, cache: PagedCache, cos: Tensor, sin: Tensor
    ) -> Float[Tensor, "rows hidden"]:
        """Attention and MLP of one layer, each added to the residual stream."""
        normed = rms_norm(x, self.layers[index].attention.norm, self.config.norm_eps)
        return self.behind_attention(index, x + self.mix(index, normed, batch, cache, cos, sin), len(batch.tokens))

    def mix(
        self,
        index: int,
        x: Float[Tensor, "rows inputs"],
        batch: TokenBatch,
        cache: PagedCache,
        cos: Tensor,
        sin: Tensor,
    ) -> Float[Tensor, "rows hidden"]:
        """What attention adds; `x` is normed. Keys and values go to the cache."""
        c, total, layer = self.config, len(batch.tokens), self.layers[index].attention
        qkv = layer.qkv(x).view(len(x), -1, c.head_dim)
        rotated, value = qkv[:, : c.heads + c.kv_heads], qkv[:total, c.heads + c.kv_heads :]
        if layer.qk_norm is not None:
            rotated = rms_norm(rotated, layer.qk_norm, c.norm_eps)
        rotated = rotate(rotated, cos, sin)
        cache.keys[index].index_copy_(1, batch.slots, rotated[:total, c.heads :].transpose(0, 1))
        cache.values[index].index_copy_(1, batch.slots, value.transpose(0, 1))
        query = rotated[:total, : c.heads]
        mixed = attend(query, cache.keys[index], cache.values[index], batch.paths, layer.window, layer.sinks)
        return layer.out(pad_rows(mixed.view(total, -1), len(x)))

    def behind_attention(self, index: int, x: Float[Tensor, "rows hidden"], total: int) -> Float[Tensor, "rows hidden"]:
        """The stream with what the layer's MLP adds, of which `total` rows are tokens."""
        mlp = self.layers[index].mlp
        added, num_read = mlp(rms_norm(x, mlp.norm, self.config.norm_eps), total)
        self.num_experts_read += num_read
        return x + added

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Logits in float32 of the rows given: only those that are judged need be."""
        if self.native is not None:
            return self.native.logits(hidden)
        rows = pad_rows(hidden, padded_rows(len(hidden)))
        return self.head(rms_norm(rows, self.norm, self.config.norm_eps))[: len(hidden)].float()


def rms_norm(x: Float[Tensor, "*rows width"], gain: Tensor, eps: float) -> Float[Tensor, "*rows width"]:
    """Root-mean-square norm in float32, by hand: three times as fast as torch's own on a CPU."""
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype) * gain


def rotate(
    x: Float[Tensor, "rows heads head_dim"],
    cos: Float[Tensor, "rows 1 head_dim"],
    sin: Float[Tensor, "rows 1 head_dim"],
) -> Float[Tensor, "rows heads head_dim"]:
    """Rotary position embedding, halves rotated, in float32."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
