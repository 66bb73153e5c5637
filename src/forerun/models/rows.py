"""Arithmetic of single rows that decoders, heads and backends share: norms, rotations, padding.

All of it keeps each row's bits independent of the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float

MIN_ROWS = 2  # a single row takes another kernel (gemv), with other bits
BLOCK_ROWS = 8
EXACT_ROWS = 16  # up to here no row is computed in vain
WIDTH = 64  # compiled kernels read rows with zeros behind them, up to a multiple of this: a width without tails
MAX_ROWS = 256  # more are multiplied in pieces, so that every number of rows can be checked


def padded_rows(rows: int) -> int:
    """Rows to compute for so many tokens: exact while small, then of few sizes.

    oneDNN compiles and keeps a kernel of about half a megabyte for every number of rows it meets, in every layer
    shape; a server would meet hundreds.
    """
    step = 1 if rows <= EXACT_ROWS else BLOCK_ROWS if rows <= 64 else 32 if rows <= MAX_ROWS else 64
    return max(MIN_ROWS, -(-rows // step) * step)


def pad_rows(x: Float[Tensor, "rows ..."], rows: int) -> Float[Tensor, "padded ..."]:
    """The rows with rows of zeros behind them, which do not affect the others."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def product(linear: Callable[[Tensor], Tensor], x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
    """A linear layer's outputs, of any number of rows."""
    return linear(pad_rows(x, padded_rows(len(x))))[: len(x)]


def rms_norm(x: Float[Tensor, "*rows width"], gain: Tensor, eps: float) -> Float[Tensor, "*rows width"]:
    """Root-mean-square norm in float32, by hand: three times as fast as torch's own on a CPU.

    Gains of float32 multiply before the result is rounded to the format of `x`, others behind it.
    """
    wide = x.float()
    normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * gain if gain.dtype == x.dtype else (normed * gain).to(x.dtype)


def norm_heads(
    x: Float[Tensor, "rows heads head_dim"],
    gains: Float[Tensor, "heads head_dim"],
    sizes: Sequence[int],
    eps: float,
    joint: bool,
) -> Float[Tensor, "rows heads head_dim"]:
    """Each head normed by itself; with `joint` all heads of each part as one, of which there are so many."""
    if not joint:
        return rms_norm(x, gains, eps)
    parts = zip(x.split(sizes, 1), gains.split(sizes), strict=True)
    return torch.cat([rms_norm(part.flatten(1), gain.flatten(), eps).view_as(part) for part, gain in parts], dim=1)


def rotate(
    x: Float[Tensor, "rows heads head_dim"],
    cos: Float[Tensor, "rows turned head_dim"],
    sin: Float[Tensor, "rows turned head_dim"],
) -> Float[Tensor, "rows heads head_dim"]:
    """Rotary position embedding, halves rotated, in float32."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def padded(size: int) -> int:
    """How wide a row of this size is to compiled kernels."""
    return -(-size // WIDTH) * WIDTH


def padded_to_width(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows padded"]:
    """Rows in float32, zeros behind each."""
    return functional.pad(x.float(), (0, padded(x.shape[1]) - x.shape[1])).contiguous()


def padded_gains(gain: Float[Tensor, " width"]) -> Float[Tensor, " padded"]:
    """A norm's gains in float32, zeros behind them."""
    return functional.pad(gain.float(), (0, padded(len(gain)) - len(gain)))


def power_of_two(size: int) -> int:
    """The smallest one that is not less."""
    return 1 << max(0, size - 1).bit_length()


def few_rows(rows: int) -> int:
    """The size of a larger pass: a multiple of 64 up to 512 rows, then of an eighth of the next power of two."""
    step = max(64, power_of_two(rows) // 8)
    return -(-rows // step) * step


def half_step(size: int) -> int:
    """The smallest power of two, or number half between two of them, that is not less."""
    top = power_of_two(size)
    return top * 3 // 4 if size <= top * 3 // 4 else top
