"""Attention over the cache by torch, one root-to-leaf path at a time, with bits independent of the rest of the batch.

Keys are padded to a multiple of 512 and masked. Queries are padded to a multiple for which a check finds that torch's
attention kernel gives a query the same bits for any number of other queries: mostly 4; 8 or 16 for large heads in
float32 with AMX. If there is none, queries are computed in blocks of a fixed size. Sliding windows are masks: they
never shift the kernel's inputs.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.models.backends.invariance import agreed_rows, cancelling_scores, cancelling_values
from forerun.models.backends.torch_cpu.mlp import by_rows, soft_capped
from forerun.models.batch import KEY_PAD, AttentionPath, QueryRule

QUERY_PADS = (4, 8, 16)
BLOCK_QUERIES = 8
CHECK_QUERIES = 512
CHECK_KEYS = 600  # two blocks of 512 keys, of which the second is mostly padding


def attend(
    q: Float[Tensor, "total heads head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    paths: list[AttentionPath],
    window: int | None,
    sinks: Float[Tensor, " heads"] | None = None,
    cap: float | None = None,
) -> Float[Tensor, "total heads head_dim"]:
    """The attention output of each query; the keys and values of all queries must be in the cache.

    `sinks` are extra scores, one for each query head, which take weight but have no value. `cap` soft-caps the scores.
    The copies of paths change the cache, so the paths of a sequence are computed in their order.
    """
    out = torch.empty_like(q)
    for path in paths:
        if path.copy is not None:
            end = path.copy.first + len(path.copy.source)
            source = torch.tensor(path.copy.source)
            keys[:, path.copy.first : end] = keys[:, source]
            values[:, path.copy.first : end] = values[:, source]
        view = slice(path.first_slot, path.first_slot + path.num_keys)
        attended = attend_path(q[path.padded_queries], keys[:, view], values[:, view], path, window, sinks, cap)
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
    cap: float | None = None,
) -> Float[Tensor, "padded heads head_dim"]:
    """Attention of one path. Query heads that share a key head become rows, so that keys are read once; a sink becomes
    a key with value zero."""
    rows, heads, head_dim = q.shape
    kv_heads = len(keys)
    group = heads // kv_heads
    grouped = q.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * rows, head_dim)
    mask = path.mask(window, group, q.dtype)[None]
    if sinks is not None:
        keys, values = (functional.pad(t, (0, 0, 0, KEY_PAD)) for t in (keys, values))
        scores = sinks.to(q.dtype).view(kv_heads, group, 1).expand(-1, -1, rows).reshape(kv_heads, group * rows, 1)
        mask = torch.cat([mask.expand(kv_heads, -1, -1), functional.pad(scores, (0, KEY_PAD - 1), value=-math.inf)], 2)
    if cap is None:
        out = functional.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask[None])
    else:
        out = attend_capped(grouped[0], keys, values, mask, cap)
    return out.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


def attend_capped(
    q: Float[Tensor, "kv_heads rows head_dim"],
    keys: Float[Tensor, "kv_heads keys head_dim"],
    values: Float[Tensor, "kv_heads keys head_dim"],
    mask: Float[Tensor, "_ _ keys"],
    cap: float,
) -> Float[Tensor, "kv_heads rows head_dim"]:
    """Attention with soft-capped scores, which torch's kernel does not support.

    It is computed in float32, KEY_PAD keys at a time, so that additional keys do not change sums.
    """
    scale, shape = q.shape[2] ** -0.5, (*q.shape[:2], KEY_PAD)
    scores = [
        soft_capped((q.float() @ block.float().transpose(1, 2) * scale).flatten(0, 1), cap).view(shape) + masked
        for block, masked in zip(keys.split(KEY_PAD, 1), mask.float().split(KEY_PAD, 2), strict=True)
    ]
    top = torch.stack([block.amax(2, keepdim=True) for block in scores]).amax(0)
    out, total = torch.zeros_like(q, dtype=torch.float32), q.new_zeros(*q.shape[:2], 1, dtype=torch.float32)
    for block, value in zip(scores, values.split(KEY_PAD, 1), strict=True):
        weights = by_rows(torch.exp, (block - top).flatten(0, 1)).view(shape)
        out, total = out + weights @ value.float(), total + weights.sum(2, keepdim=True)
    return (out / total).to(q.dtype)


@cache
def query_rule(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, num_threads: int, cap: float | None = None
) -> QueryRule:
    """The cheapest rule under which queries of this shape are batch-invariant, tested once on this machine.

    `num_threads` is torch's setting, on which the result may depend.
    """
    for pad in QUERY_PADS:
        if all(
            queries_are_independent(pad, *probe(CHECK_QUERIES, heads, kv_heads, head_dim, CHECK_KEYS, dtype), cap)
            for probe in (cancelling_scores, cancelling_values)
        ):
            return QueryRule(pad)
    return QueryRule(BLOCK_QUERIES, BLOCK_QUERIES)


def queries_are_independent(
    pad: int,
    q: Float[Tensor, "total heads head_dim"],
    k: Float[Tensor, "kv_heads keys head_dim"],
    v: Float[Tensor, "kv_heads keys head_dim"],
    cap: float | None = None,
) -> bool:
    """Whether queries have the same bits as `pad` at a time, for all small numbers of queries and some larger ones."""
    counts = [*range(pad, 65, pad), 112, 208, CHECK_QUERIES]
    last = k.shape[1] - 1
    k, v = (functional.pad(t, (0, 0, 0, -t.shape[1] % KEY_PAD)) for t in (k, v))

    def kernel(rows: Tensor) -> Tensor:
        path = AttentionPath(list(range(len(rows))), [last] * len(rows), 0, pad)
        return attend_path(rows, k, v, path, None, cap=cap)

    return agreed_rows(kernel, q, counts, pad) == CHECK_QUERIES
