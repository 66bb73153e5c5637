"""8-bit linear layers: weights are rounded per output and activations per row, so no row depends on another.

This file decides how numbers become whole numbers, and what the product is: the sums are over whole numbers and
therefore exact in any order, so every way to compute them gives the same bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int8

LARGEST_INT8 = 127
EXACT_TERMS = 2**24 // LARGEST_INT8**2  # products whose sum float32 holds exactly, in whatever order they are added
BLOCK_WEIGHTS = 1 << 19  # as many weights are float32 at a time: they stay in a cache, where the product finds them


class QuantizedLinear:
    """8-bit weights, one scale per output, times 8-bit activations, one scale per row; about a byte per weight.

    Row i gives `round(x[i] / s[i]) @ round(w[o] / t[o]) * t[o] * s[i] + bias[o]`, the sum over whole numbers, then in
    float32, in this order. Scales map the largest magnitude to 127. oneDNN multiplies where it can; otherwise float32
    does, over so few terms at a time that it is exact too, so the bits are the same.
    """

    def __init__(
        self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None, packed: bool = True
    ) -> None:
        whole, scales = quantize_rows(weight)
        self.scales = scales[:, 0].contiguous()
        self.bias = None if bias is None else bias.float()
        self.whole = torch.ops.onednn.qlinear_prepack(whole, None) if packed else in_short_sums(whole).contiguous()
        self.zero = torch.zeros(1, dtype=torch.int64)
        self.packed = packed

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        whole, scales = quantize_rows(x)
        result = self.multiply(whole) * scales
        return (result if self.bias is None else result + self.bias).to(x.dtype)

    def multiply(self, whole: Int8[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """The sums, times the outputs' scales, in float32."""
        if not self.packed:
            return exact_product(whole, self.whole) * self.scales
        result: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            whole, 1.0, 0, self.whole, self.scales, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return result


def quantize_rows(x: Float[Tensor, "rows width"]) -> tuple[Int8[Tensor, "rows width"], Float[Tensor, "rows 1"]]:
    """Whole numbers of at most LARGEST_INT8 and each row's scale in float32: their product is nearly x."""
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / LARGEST_INT8).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scales).round_().to(torch.int8), scales


def in_short_sums(whole: Int8[Tensor, "rows inputs"]) -> Int8[Tensor, "sums rows terms"]:
    """The columns in groups of at most EXACT_TERMS, all of one size; zeros are added where they do not divide."""
    inputs = whole.shape[1]
    terms = -(-inputs // -(-inputs // EXACT_TERMS))
    return functional.pad(whole, (0, -inputs % terms)).view(len(whole), -1, terms).transpose(0, 1)


def exact_product(
    x: Int8[Tensor, "rows inputs"], weight: Int8[Tensor, "sums outputs terms"]
) -> Float[Tensor, "rows outputs"]:
    """`x @ weight.T`, each sum exact and rounded once, to float32.

    Weights become float32 a block of outputs at a time. To turn the whole matrix into float64 in every pass took tens
    of times as long: it goes through memory at eight bytes a weight, twice.
    """
    terms, (num_sums, outputs, width) = in_short_sums(x).float(), weight.shape
    product = torch.empty(len(x), outputs)
    step = max(1, BLOCK_WEIGHTS // (num_sums * width))
    for first in range(0, outputs, step):
        sums = torch.bmm(terms, weight[:, first : first + step].float().transpose(1, 2))
        product[:, first : first + step] = sums[0] if num_sums == 1 else sums.double().sum(0)
    return product


@cache
def quantized_packing_is_exact() -> bool:
    """Whether oneDNN's 8-bit product is there and adds whole numbers exactly, at the largest sums that occur."""
    dice = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 4096, generator=dice)
    weight[0] = 1.0
    x = torch.randn(5, 4096, generator=dice)
    x[0] = 1.0
    whole, _ = quantize_rows(x)
    try:
        found = QuantizedLinear(weight, None).multiply(whole)
    except (RuntimeError, AttributeError):  # no such operator in this torch, or none for this instruction set
        return False
    return torch.equal(found, QuantizedLinear(weight, None, packed=False).multiply(whole))
