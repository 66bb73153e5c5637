"""Rows and gains as the compiled kernels read them: in float32, with zeros up to a width without tails."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float

WIDTH = 64  # rows are padded to a multiple of this


def padded(size: int) -> int:
    """How wide a row of this size is to the kernels."""
    return -(-size // WIDTH) * WIDTH


def padded_to_width(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows padded"]:
    """Rows in float32, zeros behind each."""
    return functional.pad(x.float(), (0, padded(x.shape[1]) - x.shape[1])).contiguous()


def padded_gains(gain: Float[Tensor, " width"]) -> Float[Tensor, " padded"]:
    """A norm's gains in float32, zeros behind them."""
    return functional.pad(gain.float(), (0, padded(len(gain)) - len(gain)))
