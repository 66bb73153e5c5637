"""Linear layers whose rows do not know each other.

Decides how a weight matrix is laid out and multiplied so that (1) a pass over several tokens costs what one token
costs, and (2) a row's result depends neither on the other rows nor on how many there are: the same token gives the
same bits alone, in a batch, in a draft and in a prompt chunk. Knows nothing of what the layer is for.

Two forms keep both: oneDNN's prepacked weights, which do so from two rows up, and, where those are missing, wrong
or refused (bfloat16 on AVX2 raises; Arm and macOS have none), blocks of a fixed number of rows, invariant by
construction. A check at load compares rows alone and in company on this machine and chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

MIN_ROWS = 2  # a single row takes another kernel (gemv), with other bits
BLOCK_ROWS = 8
CHECK_ROWS = 37
CHECK_COUNTS = (2, 3, 4, 5, 8, 16, 31)


def padded_rows(rows: int) -> int:
    """Rows to compute for so many tokens: exact while small, then of few sizes.

    oneDNN compiles and keeps a kernel of about half a megabyte for every number of rows it meets, in every layer
    shape; a server would meet hundreds.
    """
    step = 1 if rows <= 16 else 8 if rows <= 64 else 32 if rows <= 256 else 64
    return max(MIN_ROWS, -(-rows // step) * step)


@runtime_checkable
class Linear(Protocol):
    """`x @ weight.T + bias`, each row on its own."""

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]: ...


class PackedLinear:
    """A weight prepacked by oneDNN; at least two rows at a time. The plain copy of the weight is not kept."""

    def __init__(self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK_ROWS)
        self.bias = bias
        self.apply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        assert len(x) >= MIN_ROWS, "a single row would take another kernel and get other bits"
        result: Tensor = self.apply(x, self.packed, self.bias, "none", [], "")
        return result


class BlockedLinear:
    """Every product has exactly BLOCK_ROWS rows, the last block padded with zeros."""

    def __init__(self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        padding = -len(x) % BLOCK_ROWS
        padded = functional.pad(x, (0, 0, 0, padding)) if padding else x
        blocks = [functional.linear(block, self.weight, self.bias) for block in padded.split(BLOCK_ROWS)]
        return torch.cat(blocks)[: len(x)]


class LinearFactory:
    """Makes one model's linear layers, each shape checked once on this machine."""

    def __init__(self) -> None:
        self.trusted: dict[tuple[int, int, torch.dtype, int], bool] = {}

    def __call__(
        self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None = None
    ) -> Linear:
        """The fastest layer for this weight whose rows are independent."""
        shape = (weight.shape[0], weight.shape[1], weight.dtype, torch.get_num_threads())
        if self.trusted.get(shape, True) and packing_available(weight):
            try:
                packed = PackedLinear(weight, bias)
                if shape not in self.trusted:
                    self.trusted[shape] = rows_are_independent(packed, weight)
            except RuntimeError:  # oneDNN has no kernel for this type on this instruction set
                self.trusted[shape] = False
            if self.trusted[shape]:
                return packed
        return BlockedLinear(weight, bias)


def packing_available(weight: Tensor) -> bool:
    """Whether torch can prepack this weight here at all."""
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and weight.dtype in (torch.float32, torch.bfloat16)
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def rows_are_independent(linear: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    """Compare rows in company with the same rows in smaller company, bit for bit."""
    generator = torch.Generator().manual_seed(len(weight))
    x = torch.randn(CHECK_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    together = linear(x)
    return all(
        torch.equal(linear(x[start : start + count].contiguous()), together[start : start + count])
        for count in CHECK_COUNTS
        for start in (0, CHECK_ROWS - count)
    )
