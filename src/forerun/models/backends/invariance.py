"""Tests whether a kernel is batch-invariant: a row has the same bits alone and among any number of rows.

Libraries choose the order of summation by shape and processor, so every shape is tested on the machine at hand. With
ordinary inputs two orders differ in the last bit of a float32, and rounding to bfloat16 hides that in all but a few of
10,000 results. So the inputs here cancel: the exact result is zero, the computed result is the rounding error, and two
orders differ nearly everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.annotations import Float

RowBatch = Float[Tensor, "rows *width"]


def agreed_rows(kernel: Callable[[RowBatch], RowBatch], x: RowBatch, counts: Sequence[int], unit: int) -> int:
    """The largest of the ascending `counts` of rows up to which the bits equal those of `unit` rows at a time; or 0."""
    apart = torch.cat([kernel(part.contiguous()) for part in x.split(unit)])
    agreed = 0
    for count in counts:
        if not torch.equal(kernel(x[:count].contiguous()), apart[:count]):
            break
        agreed = count
    return agreed


def cancelling_product(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "outputs inputs"]]:
    """x and weight whose exact product is zero: each term of a sum also occurs negated, at a random place."""
    generator = torch.Generator().manual_seed(inputs)
    order = torch.randperm(inputs, generator=generator)
    x, weight = (torch.randn(n, inputs // 2, generator=generator) for n in (rows, outputs))
    return doubled(x, -1, order).to(dtype), doubled(weight, 1, order).to(dtype)


def cancelling_scores(
    rows: int, heads: int, kv_heads: int, head_dim: int, num_keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose exact scores are zero; their rounding errors are about 1."""
    generator = torch.Generator().manual_seed(head_dim)
    order = torch.randperm(head_dim, generator=generator)
    q = 1e3 * torch.randn(rows, heads, head_dim // 2, generator=generator)
    k = 3e3 * torch.randn(kv_heads, num_keys, head_dim // 2, generator=generator)
    v = torch.randn(kv_heads, num_keys, head_dim, generator=generator)
    return doubled(q, -1, order).to(dtype), doubled(k, 1, order).to(dtype), v.to(dtype)


def cancelling_values(
    rows: int, heads: int, kv_heads: int, head_dim: int, num_keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose exact outputs are zero: every value also occurs negated, with the same weight."""
    generator = torch.Generator().manual_seed(head_dim)
    order = torch.randperm(num_keys, generator=generator)
    q = 0.1 * torch.randn(rows, heads, head_dim, generator=generator)
    k, v = (torch.randn(kv_heads, head_dim, num_keys // 2, generator=generator) for _ in range(2))
    k, v = doubled(k, 1, order).transpose(1, 2), doubled(v, -1, order).transpose(1, 2)
    return q.to(dtype), k.to(dtype).contiguous(), v.to(dtype).contiguous()


def doubled(half: Float[Tensor, "*rows half"], sign: int, order: Tensor) -> Float[Tensor, "*rows width"]:
    """`half`, `sign * half` and zeros up to the length of `order`, permuted by `order`."""
    rest = half.new_zeros(*half.shape[:-1], len(order) - 2 * half.shape[-1])
    return torch.cat([half, sign * half, rest], dim=-1)[..., order]
