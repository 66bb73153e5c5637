"""GroupedWeight: group-quantized weights, as checkpoints store them, and the product that kernels compute with them.

A weight is an integer times its group's scale, in some formats plus the group's lowest value. Activations are rounded
to 8 bits in groups of 32 with a scale each, so that a large value costs precision only in its group. The integer sum of
a group is exact; it is rounded to float32, multiplied by the product of both scales and added to the sum of earlier
groups, and then the lowest value times the sum of the inputs is added. Both additions are fused with their
multiplication, that is, rounded once. So every implementation gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Shaped
from forerun.models.backends.torch_cpu.quantized import quantize_rows
from forerun.models.layer import Bias

ROW_GROUP = 32  # inputs of a row that share a scale
FORMS = ((4, 32), (8, 32), (8, 16))  # (bits, inputs of a group) that kernels support


class GroupForm(NamedTuple):
    """The form of group-quantized weights: bits of a number (0: only GPUs support them), inputs of a group, whether
    groups have a lowest value (`has_least`), whether scales need more bits than float16 has (`wide`), and the bits of a
    number on GPUs, if different."""

    bits: int
    size: int
    has_least: bool = False
    wide: bool = False
    gpu_bits: int = 0

    def num_bytes(self, on_gpu: bool = False) -> float:
        """Bytes of a weight; 0 if it cannot stay in groups. On GPUs, 8-bit numbers have float32 scales."""
        bits = self.gpu_bits or self.bits if on_gpu else self.bits
        factor_bits = 32 if self.wide or (on_gpu and bits == 8) else 16
        return (bits + factor_bits * (1 + self.has_least) / self.size) / 8 if bits else 0.0


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """`weight[o, i] = scales[o, i // size] * numbers[o, i] + least[o, i // size]`; `least` None: 0.

    Numbers of 4 bits are from -8 to 7 without `least`, and from 0 to 15 with it; numbers of 8 bits may be FP8.
    """

    numbers: Shaped[Tensor, "outputs inputs"]
    scales: Float[Tensor, "outputs groups"]
    least: Float[Tensor, "outputs groups"] | None
    bits: int
    size: int

    def __mul__(self, factor: float) -> GroupedWeight:
        """All weights times a factor."""
        least = None if self.least is None else self.least * factor
        return replace(self, scales=self.scales * factor, least=least)

    def __getitem__(self, rows: Tensor | slice) -> GroupedWeight:
        """The weights of these outputs, in this order."""
        least = None if self.least is None else self.least[rows]
        return replace(self, numbers=self.numbers[rows], scales=self.scales[rows], least=least)

    def in_form(self, bits: int, size: int, has_least: bool) -> GroupedWeight:
        """These weights in a form with more bits, smaller groups or lowest values."""
        repeats = self.size // size
        scales = self.scales.repeat_interleave(repeats, 1)
        least = None if self.least is None else self.least.repeat_interleave(repeats, 1)
        numbers = self.numbers
        if has_least and least is None:
            moved = 8 if bits == 4 else 0
            numbers, least = numbers + moved, -moved * scales
        return GroupedWeight(numbers, scales, least, bits, size)

    @classmethod
    def joined(cls, parts: Sequence[GroupedWeight]) -> GroupedWeight:
        """Several weights, concatenated along the outputs, in a form that can hold all of them."""
        bits, size = max(p.bits for p in parts), min(p.size for p in parts)
        bits, has_least = bits if (bits, size) in FORMS else 8, any(p.least is not None for p in parts)
        alike = [part.in_form(bits, size, has_least) for part in parts]
        least = torch.cat([p.least for p in alike if p.least is not None]) if has_least else None
        return cls(torch.cat([p.numbers for p in alike]), torch.cat([p.scales for p in alike]), least, bits, size)

    def dense(self) -> Float[Tensor, "outputs inputs"]:
        """The dequantized weights in float32."""
        weights: Tensor = self.numbers.float().unflatten(1, (-1, self.size)).mul_(self.scales[:, :, None])
        return (weights if self.least is None else weights.add_(self.least[:, :, None])).flatten(1)


class GroupedLinear:
    """The definition of the product with group-quantized weights; the compiled kernels give the same bits."""

    def __init__(self, weight: GroupedWeight, bias: Bias | None) -> None:
        self.weight = weight
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        w, (rows, width) = self.weight, x.shape
        integers, scales = quantize_rows(functional.pad(x, (0, -width % ROW_GROUP)).view(-1, ROW_GROUP))
        inputs = integers.view(rows, -1)[:, :width].double().unflatten(1, (-1, w.size)).transpose(0, 1)
        sums = torch.bmm(inputs, w.numbers.double().unflatten(1, (-1, w.size)).permute(1, 2, 0)).float()
        shares = scales.view(rows, -1).repeat_interleave(ROW_GROUP // w.size, 1).T  # [groups, rows]
        totals = shares * inputs.sum(2).float()
        product = torch.zeros(rows, len(w.numbers))
        for group, (of_group, share) in enumerate(zip(sums, shares, strict=False)):
            product = fused(of_group, w.scales[:, group] * share[:, None], product)
            if w.least is not None:
                product = fused(w.least[:, group], totals[group][:, None], product)
        return (product if self.bias is None else product + self.bias).to(x.dtype)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` of float32 tensors, rounded once, as processors compute it in one instruction.

    In float64 the product is exact. Its inexact sums are rounded to the neighbour whose last bit is 1 ("to odd"), since
    then the rounding to float32 gives what a single rounding would give (Boldo and Melquiond, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    added = total - product
    error = (product - (total - added)) + (addend - added)
    is_even = (total.view(torch.int64) & 1) == 0
    moved = torch.nextafter(total, torch.copysign(torch.full_like(total, torch.inf), error))
    return torch.where((error != 0) & error.isfinite() & is_even, moved, total).float()
