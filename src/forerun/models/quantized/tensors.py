"""QuantizedTensor: a quantized weight, stored in several tensors of a folder.

A weight stays quantized if its groups are multiples of those that kernels support; others are dequantized. layouts.py
combines the tensors of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, Int, Int8
from forerun.models.backends.torch_cpu.grouped import GroupedWeight, GroupForm

GROUP = 32  # inputs of a group in the kernels
BLOCK_NUMBERS = 1 << 22  # numbers dequantized at a time


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight of integers: `weight[o, i] = scales[o, g] * (numbers[o, i] - zeros[o, g])`, g the group of input i.

    g is `group_of[i]`; without `group_of`, groups are contiguous and of equal size. `zeros` None: all are 0.
    Numbers and zeros have `bits` bits and are signed: from -8 to 7, or from -128 to 127.
    """

    numbers: Int8[Tensor, "outputs inputs"]
    scales: Float[Tensor, "outputs groups"]
    zeros: Int8[Tensor, "outputs groups"] | None
    bits: int
    group_of: Int[Tensor, " inputs"] | None = None

    def dense_into(self, result: Tensor) -> Tensor:
        """Dequantize into `result`, computing in float32, some rows at a time."""
        step = max(1, BLOCK_NUMBERS // result.shape[1])
        for first in range(0, len(result), step):
            rows = slice(first, first + step)
            numbers = self.numbers[rows].float()
            if self.zeros is not None:
                numbers -= self.spread(self.zeros[rows].float(), 1)
            result[rows] = numbers.mul_(self.spread(self.scales[rows], 1))
        return result

    def grouped(self) -> GroupedWeight | None:
        """The weight in groups of GROUP inputs; None if a stored group ends inside one of these."""
        inputs, index = self.numbers.shape[1], self.group_of
        if inputs % GROUP or (index is None and inputs // self.scales.shape[1] % GROUP):
            return None
        if index is not None and not torch.equal(index, index[::GROUP].repeat_interleave(GROUP)):
            return None
        scales, numbers, least = self.spread(self.scales, GROUP).contiguous(), self.numbers, None
        if self.zeros is not None and self.zeros.any():
            lowest = 8 if self.bits == 4 else 0
            numbers, least = numbers + lowest, (self.spread(self.zeros, GROUP).float() + lowest).neg_().mul_(scales)
        return GroupedWeight(numbers, scales, least, self.bits, GROUP)

    def spread(self, values: Tensor, step: int) -> Tensor:
        """The values of the groups of every `step`-th input."""
        if self.group_of is not None:
            return values[:, self.group_of[::step]]
        times = self.numbers.shape[1] // values.shape[1] // step
        return values[:, :, None].expand(-1, -1, times).flatten(1)


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A quantized weight, whose tensors were checked by their headers; `file` contains the first.

    `format` is a name for users. `unpack` reads the weight. `form` is the form of a weight that can stay in groups;
    None: it is dequantized. `unpack_groups`, if given, reads it in groups, or one matrix of several (an expert's).
    """

    file: Path
    shape: tuple[int, ...]
    format: str
    unpack: Callable[[], IntegerWeight | Tensor]
    form: GroupForm | None = None
    unpack_groups: Callable[[int | None], GroupedWeight | None] | None = None

    readable: ClassVar[bool] = True

    def read(self) -> Tensor:
        """Read the dequantized weight in float32. Raises MissingWeights."""
        return self.read_into(torch.empty(self.shape))

    def read_into(self, result: Tensor) -> Tensor:
        """Read the weight into `result`, dequantized to its dtype. Raises MissingWeights."""
        numbers = self.unpack()
        return numbers.dense_into(result) if isinstance(numbers, IntegerWeight) else result.copy_(numbers)

    def groups(self, part: int | None = None) -> GroupedWeight | None:
        """The matrix, or matrix `part` of several, in groups; None if it cannot stay in groups."""
        if self.unpack_groups is not None:
            return self.unpack_groups(part)
        numbers = self.unpack() if part is None else None
        return numbers.grouped() if isinstance(numbers, IntegerWeight) else None


def group_form(
    bits: int, inputs: int, num_groups: int, scales: str, has_zeros: bool = False, scattered: bool = False
) -> GroupForm | None:
    """The form of a weight in groups of GROUP; None if stored groups are no multiples of GROUP or, with several groups,
    the inputs of a group are `scattered`.

    Zero points give groups a lowest value, which needs more bits than float16 has; then, or if `scales` have the format
    F32, both are in float32.
    """
    if inputs % num_groups or inputs // num_groups % GROUP or (scattered and num_groups > 1):
        return None
    return GroupForm(bits, GROUP, has_zeros, wide=has_zeros or scales == "F32")


def unpacked(words: Int[Tensor, "rows words"], bits: int) -> Int8[Tensor, "rows numbers"]:
    """The numbers in 32-bit words, the lowest bits first, minus half their range (8 or 128)."""
    parts = words.contiguous().view(torch.uint8)
    if bits == 4:
        parts = torch.stack([parts & 15, parts >> 4], -1).flatten(-2)
    return parts.sub_(8 if bits == 4 else 128).view(torch.int8)
