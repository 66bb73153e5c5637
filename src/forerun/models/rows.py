"""Row-wise arithmetic of decoders, heads and backends: norms, rotations, padding. The bits of a row never depend on
other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float

MIN_ROWS = 2  # for a single row, libraries use another kernel (gemv), with other bits
BLOCK_ROWS = 8
EXACT_ROWS = 16  # up to this number rows are not padded
WIDTH = 64  # rows of the compiled kernels are zero-padded to a multiple of this, so that no loop has a tail
MAX_ROWS = 256  # more rows are multiplied in blocks, so that every number of rows can be checked


def padded_rows(rows: int) -> int:
    """The number of rows to compute for `rows` tokens: the same up to EXACT_ROWS, then one of a few sizes.

    For every number of rows and shape of a layer, oneDNN compiles and keeps a kernel of about half a megabyte; without
    padding, a server would need hundreds.
    """
    step = 1 if rows <= EXACT_ROWS else BLOCK_ROWS if rows <= 64 else 32 if rows <= MAX_ROWS else 64
    return max(MIN_ROWS, -(-rows // step) * step)


def pad_rows(x: Float[Tensor, "rows ..."], rows: int) -> Float[Tensor, "padded ..."]:
    """`x` with rows of zeros appended, up to this number of rows."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def product(linear: Callable[[Tensor], Tensor], x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
    """The outputs of a linear layer, computed for a padded number of rows."""
    return linear(pad_rows(x, padded_rows(len(x))))[: len(x)]


def rms_norm(x: Float[Tensor, "*rows width"], gain: Tensor, eps: float) -> Float[Tensor, "*rows width"]:
    """RMS norm, computed in float32; on a CPU it is three times as fast as torch's.

    A float32 gain is applied before the result is rounded to the dtype of `x`, other gains after that.
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
    """RMS norm of each head or, with `joint`, of all heads of a part as one vector; `sizes` are heads by part."""
    if not joint:
        return rms_norm(x, gains, eps)
    parts = zip(x.split(sizes, 1), gains.split(sizes), strict=True)
    return torch.cat([rms_norm(part.flatten(1), gain.flatten(), eps).view_as(part) for part, gain in parts], dim=1)


def rotate(
    x: Float[Tensor, "rows heads head_dim"],
    cos: Float[Tensor, "rows turned head_dim"],
    sin: Float[Tensor, "rows turned head_dim"],
) -> Float[Tensor, "rows heads head_dim"]:
    """Rotary position embedding of pairs (i, i + head_dim/2), computed in float32."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def padded(size: int) -> int:
    """The padded width, in the compiled kernels, of a row of this size."""
    return -(-size // WIDTH) * WIDTH


def padded_to_width(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows padded"]:
    """The rows in float32, each zero-padded to a multiple of WIDTH."""
    return functional.pad(x.float(), (0, padded(x.shape[1]) - x.shape[1])).contiguous()


def padded_gains(gain: Float[Tensor, " width"]) -> Float[Tensor, " padded"]:
    """A norm's gains in float32, zero-padded to a multiple of WIDTH."""
    return functional.pad(gain.float(), (0, padded(len(gain)) - len(gain)))


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def few_rows(rows: int) -> int:
    """The padded rows of a large pass: a multiple of 64 up to 512, then of an eighth of the next power of two."""
    step = max(64, power_of_two(rows) // 8)
    return -(-rows // step) * step


def half_step(size: int) -> int:
    """The smallest power of two, or midpoint between two of them, that is at least `size`."""
    top = power_of_two(size)
    return top * 3 // 4 if size <= top * 3 // 4 else top
