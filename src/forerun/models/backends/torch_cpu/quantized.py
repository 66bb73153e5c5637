"""Linear layers with 8-bit or 4-bit weights, quantized per output or group; activations are quantized per row.

With 8 bits the sums are over integers, exact in any order. With 4 bits a weight is an integer from -8 to 7, with a
scale for each group of 32 inputs of an output: 4.5 bits in total. The integer sum of a group has at most 15 significant
bits, and a scale, a bfloat16, has 8, so their product is exact in float32; only the addition of groups rounds, in a
fixed order. So every implementation gives the same bits, and a row's bits do not depend on other rows.
"""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int8
from forerun.models.layer import Bias, WeightMatrix

LARGEST_INT8 = 127
EXACT_TERMS = 2**24 // LARGEST_INT8**2  # a float32 sum of so many products is exact, in any order
BLOCK_WEIGHTS = 1 << 19  # weights converted to float32 at a time, so that they stay in a cache for the product
GROUP = 32
LOWEST, HIGHEST = -8, 7
# What a group's largest weight may be divided by to get the scale. On the bundled target -8 alone has 8 % more squared
# error than the best of these. Adding -9.0, -9.5 and 8.2 reduces it by 1 %, but not the held-out loss.
STEPS = (-8.0, 7.0, -7.5, -7.0, -8.6, -9.4)
LEAST_SCALE, MOST_SCALE = torch.finfo(torch.float32).tiny, 2.0**112  # between these, scale times sum is exact
BLOCK_GROUPS = 1 << 13  # groups quantized at a time on a CPU, so that temporaries stay in a cache


class QuantizedLinear:
    """8-bit weights with a scale per output, times 8-bit activations with a scale per row.

    Row i gives `round(x[i] / s[i]) @ round(w[o] / t[o]) * t[o] * s[i] + bias[o]`: a sum of integers, then in float32,
    in this order. Scales map the largest magnitude to 127. oneDNN computes the sums if `packed`; otherwise
    float32 sums of so few terms that they are exact give the same bits.
    """

    def __init__(self, weight: WeightMatrix, bias: Bias | None, packed: bool = True) -> None:
        integers, scales = quantize_rows(weight)
        self.scales = scales[:, 0].contiguous()
        self.bias = None if bias is None else bias.float()
        if packed:
            self.integers = torch.ops.onednn.qlinear_prepack(integers, None)
        else:
            self.integers = in_short_sums(integers).contiguous()
        self.zero = torch.zeros(1, dtype=torch.int64)
        self.packed = packed

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        integers, scales = quantize_rows(x)
        result = self.multiply(integers) * scales
        return (result if self.bias is None else result + self.bias).to(x.dtype)

    def multiply(self, integers: Int8[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """The integer sums times the outputs' scales, in float32."""
        if not self.packed:
            return exact_product(integers, self.integers) * self.scales
        result: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            integers, 1.0, 0, self.integers, self.scales, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return result


def quantize_rows(x: Float[Tensor, "rows width"]) -> tuple[Int8[Tensor, "rows width"], Float[Tensor, "rows 1"]]:
    """Integers of magnitude at most LARGEST_INT8, and a float32 scale for each row; their product approximates x."""
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / LARGEST_INT8).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide * scales.reciprocal()).round_().to(torch.int8), scales


def in_short_sums(integers: Int8[Tensor, "rows inputs"]) -> Int8[Tensor, "sums rows terms"]:
    """The columns in groups of equal size, at most EXACT_TERMS; the last group is zero-padded."""
    inputs = integers.shape[1]
    terms = -(-inputs // -(-inputs // EXACT_TERMS))
    return functional.pad(integers, (0, -inputs % terms)).view(len(integers), -1, terms).transpose(0, 1)


def exact_product(
    x: Int8[Tensor, "rows inputs"], weight: Int8[Tensor, "sums outputs terms"]
) -> Float[Tensor, "rows outputs"]:
    """`x @ weight.T`, each sum exact and rounded once, to float32.

    Weights are converted to float32 a block of outputs at a time. Converting the entire matrix to float64 in every pass
    took tens of times as long, since it moves eight bytes for each weight through memory, twice.
    """
    terms, (num_sums, outputs, width) = in_short_sums(x).float(), weight.shape
    product = torch.empty(len(x), outputs)
    step = max(1, BLOCK_WEIGHTS // (num_sums * width))
    for first in range(0, outputs, step):
        sums = torch.bmm(terms, weight[:, first : first + step].float().transpose(1, 2))
        product[:, first : first + step] = sums[0] if num_sums == 1 else sums.double().sum(0)
    return product


@cache
def quantized_packing_pays() -> bool:
    """Whether oneDNN's 8-bit product exists, sums integers exactly, and takes no longer than short sums.

    Tested with the largest sums that occur. For some processors oneDNN has a reference implementation only, which takes
    up to 300 times as long as short sums (a Xeon with AVX-512 whose AMX is hidden). The bits are the same.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 4096, generator=generator)
    weight[0] = 1.0
    x = torch.randn(5, 4096, generator=generator)
    x[0] = 1.0
    integers, _ = quantize_rows(x)
    try:
        layers = [QuantizedLinear(weight, None, packed) for packed in (True, False)]
        products = [layer.multiply(integers) for layer in layers]
    except (RuntimeError, AttributeError):  # no such operator in this torch, or none for this instruction set
        return False
    times_s = [min(seconds_of(layer, integers) for _ in range(3)) for layer in layers]
    return torch.equal(*products) and times_s[0] <= times_s[1]


def seconds_of(layer: QuantizedLinear, integers: Int8[Tensor, "rows inputs"]) -> float:
    """The time of one product."""
    begin_s = time.perf_counter()
    layer.multiply(integers)
    return time.perf_counter() - begin_s


class Quantized4Linear(QuantizedLinear):
    """4-bit weights with a scale per group, times 8-bit activations with a scale per row.

    Row i gives `sum over groups g of (round(x[i] / s[i])[g] @ w[o, g]) * t[o, g]`, summed in float32 in ascending
    order, then `* s[i] + bias[o]`. This is the definition, whose bits the compiled kernels also give.
    """

    def __init__(self, weight: WeightMatrix, bias: Bias | None) -> None:
        integers, scales = quantize_groups(weight)
        groups = functional.pad(integers, (0, -integers.shape[1] % GROUP)).view(len(integers), -1, GROUP)
        low, high = (groups - LOWEST).to(torch.uint8).chunk(2, dim=2)
        self.halves = (low | high << 4).transpose(0, 1).contiguous()  # [groups, outputs, GROUP / 2]
        self.scales = scales.T.contiguous()  # [groups, outputs]
        self.bias = None if bias is None else bias.float()

    def multiply(self, integers: Int8[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """The sum over groups; weights are converted to float32 a block of outputs at a time."""
        num_groups, outputs, _ = self.halves.shape
        padded = functional.pad(integers, (0, num_groups * GROUP - integers.shape[1]))
        x = padded.view(len(integers), num_groups, GROUP).transpose(0, 1).float()
        product = torch.zeros(len(integers), outputs)
        step = max(1, BLOCK_WEIGHTS // (num_groups * GROUP))
        for first in range(0, outputs, step):
            part, block = product[:, first : first + step], self.halves[:, first : first + step]
            weights = torch.cat([block & 15, block >> 4], dim=2).float().add_(LOWEST)
            scales = self.scales[:, first : first + step].float()
            for sums, scale in zip(torch.bmm(x, weights.transpose(1, 2)), scales, strict=True):
                part += sums * scale
        return product


def quantize_groups(
    weight: Float[Tensor, "outputs inputs"],
) -> tuple[Int8[Tensor, "outputs inputs"], Float[Tensor, "outputs groups"]]:
    """Integers from LOWEST to HIGHEST, and a scale for each group, which may be negative; their product approximates
    the weight.

    Of the scales by STEPS, a group gets the one with the smallest sum of squared errors, the first among equals. A
    group with non-finite values gets a NaN scale. The result does not depend on the machine.
    """
    outputs, inputs = weight.shape
    groups = functional.pad(weight.float(), (0, -inputs % GROUP)).view(-1, GROUP)
    parts = [round_groups(part.T.contiguous()) for part in groups.split(BLOCK_GROUPS if weight.is_cpu else len(groups))]
    integers = torch.cat([integers.T for integers, _ in parts]).view(outputs, -1)[:, :inputs]
    return integers.contiguous(), torch.cat([scales for _, scales in parts]).view(outputs, -1)


def round_groups(x: Float[Tensor, "within groups"]) -> tuple[Int8[Tensor, "within groups"], Float[Tensor, " groups"]]:
    """The integers and scales of `quantize_groups`, for groups in columns, so that sums add entire rows."""
    high, low = x.amax(0), x.amin(0)
    largest = torch.where(high >= -low, high, low)
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for step in STEPS:
        scales = usable_scales(largest / step)
        errors = torch.div(x, scales).round_().clamp_(LOWEST, HIGHEST).mul_(scales).sub_(x).square_()
        while len(errors) > 1:  # in one order on every machine
            errors = errors[: len(errors) // 2].add_(errors[len(errors) // 2 :])
        better = errors[0] < least
        best, least = torch.where(better, scales, best), torch.where(better, errors[0], least)
    best = torch.where(least.isfinite(), best, usable_scales(largest / STEPS[0]))
    integers = torch.div(x, best).round_().clamp_(LOWEST, HIGHEST)
    return integers.nan_to_num_(0.0).to(torch.int8), best.bfloat16()


def usable_scales(scales: Float[Tensor, " groups"]) -> Float[Tensor, " groups"]:
    """The nearest scales in bfloat16 whose products with sums are exact; NaN for scales that are not finite."""
    bounded = scales.abs().bfloat16().float().clamp(LEAST_SCALE, MOST_SCALE).copysign(scales)
    return bounded.where(scales.isfinite(), torch.nan)
