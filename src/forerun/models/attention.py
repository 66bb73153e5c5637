"""Attention over the cache, one root-to-leaf path at a time, with bits that do not depend on the rest of the batch.

This file decides how queries are multiplied with the cached keys on a CPU. A prompt chunk and a chain are one path; a
tree is one path per leaf. Before a path attends, the keys and values of its guesses are copied into the slots that a
chain would use, so every path sees exactly what plain decoding would see. Keys are padded to a multiple of 512
(masked), and queries to a multiple of a number that a check at load finds: then torch's attention kernel gives a query
the same bits for any number of other queries. The number depends on head size, number format and processor (mostly 4; 8
or 16 for large heads in float32 with AMX). Where no number works, queries are read in blocks of a fixed size. Sliding
windows are masks; they never shift what the kernel sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.models.invariance import agreed_rows, cancelling_scores, cancelling_values

KEY_PAD = 512
QUERY_PADS = (4, 8, 16)
BLOCK_QUERIES = 8
CHECK_QUERIES = 512
CHECK_KEYS = 600  # two blocks of keys, the second one mostly padding


@dataclass(frozen=True, slots=True)
class QueryRule:
    """How the queries of a path meet the kernel: padded to a multiple of `pad`, and at most `block` at a time."""

    pad: int
    block: int = 1 << 30


EACH_ALONE = QueryRule(1)  # the compiled kernels' rule: they read every query by itself


@dataclass(frozen=True, slots=True)
class Copy:
    """Guesses to lay out as a chain: cache slots `source`, in order, to the slots from `first` on."""

    source: Sequence[int]
    first: int


@dataclass(frozen=True)
class AttentionPath:
    """The queries of one path of one sequence, packed token numbers at ascending positions, and where their keys lie.

    Keys are the slots from `first_slot` on; query i sees those up to its own position.
    """

    queries: Sequence[int]
    positions: Sequence[int]
    first_slot: int
    pad: int = 1  # what the number of queries is padded to a multiple of, by repeating the last one
    copy: Copy | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def num_keys(self) -> int:
        """Keys up to the last query's, padded."""
        return -(-(self.positions[-1] + 1) // KEY_PAD) * KEY_PAD

    def holds(self, key: int, num_slots: int) -> bool:
        """Whether this key lies in one of the cache's slots."""
        if self.copy is None or self.first_slot + key < self.copy.first:
            return self.first_slot + key < num_slots
        return self.first_slot + key < self.copy.first + len(self.copy.source)

    @cached_property
    def padded_queries(self) -> Int[Tensor, " padded"]:
        return self.padded(self.queries)

    def padded(self, values: Sequence[int]) -> Int[Tensor, " padded"]:
        return torch.tensor([*values, *[values[-1]] * (-len(values) % self.pad)])

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Float[Tensor, "rows keys"]:
        """0 where a query sees a key, -inf elsewhere; one row per query of each head of a group. Made once a pass."""
        if window not in self.masks:
            key = torch.arange(self.num_keys)
            positions = self.padded(self.positions)[:, None]
            seen = key <= positions
            if window is not None:
                seen &= key > positions - window
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
            self.masks[window] = mask.repeat(group, 1)
        return self.masks[window]


def make_paths(
    queries: list[int], positions: list[int], first_slot: int, rule: QueryRule, copy: Copy | None = None
) -> list[AttentionPath]:
    """A path from its packed token numbers and their positions, ascending; as many as the rule wants it cut into."""
    cuts = range(0, len(queries), rule.block)
    parts = [(queries[i : i + rule.block], positions[i : i + rule.block]) for i in cuts]
    return [AttentionPath(*part, first_slot, rule.pad, None if i else copy) for i, part in enumerate(parts)]


def attend(
    q: Float[Tensor, "total heads head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    paths: list[AttentionPath],
    window: int | None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "total heads head_dim"]:
    """Each query's weighted sum of the values it sees; keys and values of all queries are in the cache already.

    `sinks` are scores of nothing, one of each query head: they take their share of the weights and add no value.

    Writes the copies that paths ask for into the cache, so the paths of a sequence must be in order.
    """
    out = torch.empty_like(q)
    for path in paths:
        if path.copy is not None:
            end = path.copy.first + len(path.copy.source)
            source = torch.tensor(path.copy.source)
            keys[:, path.copy.first : end] = keys[:, source]
            values[:, path.copy.first : end] = values[:, source]
        view = slice(path.first_slot, path.first_slot + path.num_keys)
        attended = attend_path(q[path.padded_queries], keys[:, view], values[:, view], path, window, sinks)
        num_queries = len(path.queries)
        out[path.padded_queries[:num_queries]] = attended[:num_queries]
    return out


def attend_path(
    q: Float[Tensor, "padded heads head_dim"],
    keys: Float[Tensor, "kv_heads keys head_dim"],
    values: Float[Tensor, "kv_heads keys head_dim"],
    path: AttentionPath,
    window: int | None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "padded heads head_dim"]:
    """One path: the query heads that share a key head are laid out as further rows, so keys are read once.

    A sink is the score of one more key, whose value is zero.
    """
    rows, heads, head_dim = q.shape
    kv_heads = len(keys)
    group = heads // kv_heads
    grouped = q.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * rows, head_dim)
    mask = path.mask(window, group, q.dtype)[None]
    if sinks is not None:
        keys, values = (functional.pad(t, (0, 0, 0, KEY_PAD)) for t in (keys, values))
        scores = sinks.to(q.dtype).view(kv_heads, group, 1).expand(-1, -1, rows).reshape(kv_heads, group * rows, 1)
        mask = torch.cat([mask.expand(kv_heads, -1, -1), functional.pad(scores, (0, KEY_PAD - 1), value=-math.inf)], 2)
    out = functional.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask[None])
    return out.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


@cache
def query_rule(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, num_threads: int) -> QueryRule:
    """The cheapest rule under which queries of this shape keep their bits, found out on this machine once.

    `num_threads` is torch's setting: it is part of the question.
    """
    for pad in QUERY_PADS:
        if all(
            queries_are_independent(pad, *probe(CHECK_QUERIES, heads, kv_heads, head_dim, CHECK_KEYS, dtype))
            for probe in (cancelling_scores, cancelling_values)
        ):
            return QueryRule(pad)
    return QueryRule(BLOCK_QUERIES, BLOCK_QUERIES)


def queries_are_independent(
    pad: int,
    q: Float[Tensor, "total heads head_dim"],
    k: Float[Tensor, "kv_heads keys head_dim"],
    v: Float[Tensor, "kv_heads keys head_dim"],
) -> bool:
    """Compare queries in company with the same queries, `pad` at a time: in all small numbers and some larger ones."""
    counts = [*range(pad, 65, pad), 112, 208, CHECK_QUERIES]
    last = k.shape[1] - 1
    k, v = (functional.pad(t, (0, 0, 0, -t.shape[1] % KEY_PAD)) for t in (k, v))

    def kernel(rows: Tensor) -> Tensor:
        path = AttentionPath(list(range(len(rows))), [last] * len(rows), 0, pad)
        return attend_path(rows, k, v, path, None)

    return agreed_rows(kernel, q, counts, pad) == CHECK_QUERIES
