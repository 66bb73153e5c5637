"""Batch-invariant linear layers by torch's operators.

A layer must meet two conditions: (1) a pass over several tokens costs about as much as one token, and (2) a row's
result depends neither on the other rows nor on their number, so that a token has the same bits alone, in a batch, in a
draft and in a prompt chunk.

oneDNN's prepacked weights meet both from two rows up to a number that depends on shape, format and processor (with AMX,
bfloat16 sums of more than 512 terms have another order beyond 32 rows); more rows are multiplied in pieces. If packing
is missing, wrong or refused (bfloat16 on AVX2 raises; Arm and macOS have none), rows are multiplied in fixed-size
blocks, which is batch-invariant by construction. A check tests every number of rows that is used on this machine, and
chooses between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.config import Quantization
from forerun.models.backends.invariance import agreed_rows, cancelling_product
from forerun.models.backends.torch_cpu.mlp import soft_capped
from forerun.models.backends.torch_cpu.quantized import Quantized4Linear, QuantizedLinear, quantized_packing_pays
from forerun.models.layer import Bias, Linear, WeightMatrix
from forerun.models.rows import BLOCK_ROWS, EXACT_ROWS, MAX_ROWS, MIN_ROWS, padded_rows

COUNTS = sorted({padded_rows(rows) for rows in range(1, MAX_ROWS + 1)})


class PackedLinear:
    """A weight prepacked by oneDNN, for two rows or more, at most `max_rows` at a time."""

    def __init__(self, weight: WeightMatrix, bias: Bias | None, max_rows: int = MAX_ROWS) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK_ROWS)
        self.bias = bias
        self.max_rows = max_rows
        self.apply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        assert len(x) >= MIN_ROWS, "for a single row oneDNN uses another kernel, with other bits"
        if len(x) <= self.max_rows:
            return self.multiply(x)
        return torch.cat([self.multiply(piece) for piece in x.split(self.max_rows)])

    def multiply(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """One call of the kernel."""
        result: Tensor = self.apply(x, self.packed, self.bias, "none", [], "")
        return result


class BlockedLinear:
    """Every product has BLOCK_ROWS rows; the last block is padded with zeros."""

    def __init__(self, weight: WeightMatrix, bias: Bias | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        padding = -len(x) % BLOCK_ROWS
        padded = functional.pad(x, (0, 0, 0, padding)) if padding else x
        blocks = [functional.linear(block, self.weight, self.bias) for block in padded.split(BLOCK_ROWS)]
        return torch.cat(blocks)[: len(x)]


@dataclass(frozen=True, slots=True)
class CappedLinear:
    """A layer whose outputs are soft-capped to `limit`, in float32."""

    linear: Linear
    limit: float

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        return soft_capped(self.linear(x).float(), self.limit)


def make_linear(weight: WeightMatrix, bias: Bias | None = None, quantize: Quantization | None = None) -> Linear:
    """The fastest layer for this weight that is batch-invariant on this machine."""
    if quantize == "int4":
        return Quantized4Linear(weight, bias)
    if quantize == "int8":
        return QuantizedLinear(weight, bias, packed=quantized_packing_pays())
    if not packing_available(weight):
        return BlockedLinear(weight, bias)
    max_rows = trusted_rows(*weight.shape, weight.dtype, bias is not None, torch.get_num_threads())
    return PackedLinear(weight, bias, max_rows) if max_rows else BlockedLinear(weight, bias)


def packing_available(weight: Tensor) -> bool:
    """Whether torch can prepack this weight on this machine."""
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and weight.dtype in (torch.float32, torch.bfloat16)
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


@cache
def trusted_rows(outputs: int, inputs: int, dtype: torch.dtype, biased: bool, num_threads: int) -> int:
    """The most rows, in multiples of BLOCK_ROWS, for which a packed layer of this shape is batch-invariant; 0: none.

    Fewer than EXACT_ROWS count as 0, since the last piece could be a single row. `num_threads` is torch's setting, on
    which the result may depend.
    """
    x, weight = cancelling_product(MAX_ROWS, outputs, inputs, dtype)
    try:
        packed = PackedLinear(weight, weight.new_zeros(outputs) if biased else None)
        agreed = agreed_rows(packed.multiply, x, COUNTS, MIN_ROWS)
    except RuntimeError:  # oneDNN has no kernel for this type on this instruction set
        return 0
    return agreed // BLOCK_ROWS * BLOCK_ROWS if agreed >= EXACT_ROWS else 0
