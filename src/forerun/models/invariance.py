"""Whether a kernel gives every row bits of its own: the same alone, in company, and in any number.

Decides with what inputs kernels are asked, and how many rows at a time can be trusted. Libraries choose the order of
a sum by shape and by processor, so this is asked of every shape on the machine at hand. Ordinary inputs would hardly
tell: two orders differ in the last bit of a float32, which a rounding to bfloat16 hides in all but a few of 10,000
results. So the inputs are made to cancel. The exact result is zero, what comes out is the rounding itself, and two
orders differ nearly everywhere. Knows nothing of what the kernels are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Rows = Float[Tensor, "rows *width"]


def agreed_rows(kernel: Callable[[Rows], Rows], x: Rows, counts: Sequence[int], unit: int) -> int:
    """The last of the ascending `counts` up to which all give the bits that `unit` rows at a time give; 0 for none."""
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
    """x and weight whose product is exactly zero, in pairs of terms that lie far from each other."""
    dice = torch.Generator().manual_seed(inputs)
    half, order = inputs // 2, torch.randperm(inputs, generator=dice)
    x, weight = (torch.randn(n, half, generator=dice) for n in (rows, outputs))
    rest = inputs - 2 * half
    x = torch.cat([x, -x, torch.zeros(rows, rest)], dim=1)[:, order]
    weight = torch.cat([weight, weight, torch.zeros(outputs, rest)], dim=1)[:, order]
    return x.to(dtype).contiguous(), weight.to(dtype).contiguous()


def cancelling_scores(
    rows: int, heads: int, kv_heads: int, head_dim: int, num_keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose scores are zero but for rounding, which is scaled up to be of size 1."""
    dice = torch.Generator().manual_seed(head_dim)
    half, order = head_dim // 2, torch.randperm(head_dim, generator=dice)
    q = 1e3 * torch.randn(rows, heads, half, generator=dice)
    k = 3e3 * torch.randn(kv_heads, num_keys, half, generator=dice)
    rest = head_dim - 2 * half
    q = torch.cat([q, -q, torch.zeros(rows, heads, rest)], dim=2)[:, :, order]
    k = torch.cat([k, k, torch.zeros(kv_heads, num_keys, rest)], dim=2)[:, :, order]
    return q.to(dtype), k.to(dtype), torch.randn(kv_heads, num_keys, head_dim, generator=dice).to(dtype)


def cancelling_values(
    rows: int, heads: int, kv_heads: int, head_dim: int, num_keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of which every value is weighted like its negative elsewhere. `num_keys` is even."""
    dice = torch.Generator().manual_seed(head_dim)
    order = torch.randperm(num_keys, generator=dice)
    q = 0.1 * torch.randn(rows, heads, head_dim, generator=dice)
    k, v = (torch.randn(kv_heads, num_keys // 2, head_dim, generator=dice) for _ in range(2))
    return q.to(dtype), torch.cat([k, k], 1)[:, order].to(dtype), torch.cat([v, -v], 1)[:, order].to(dtype)
