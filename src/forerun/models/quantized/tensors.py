"""QuantizedTensor: a weight that lies in several tensors of a folder, as weights.py takes it from any file.

Weights of whole numbers, scales and zero points can stay as they are stored, if groups are whole multiples of those
that kernels multiply; all others are unpacked. Which tensors belong to a weight is decided in layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, Int, Int8
from forerun.models.backends.torch_cpu.grouped import GroupedWeight

GROUP = 32  # of the forms that kernels multiply the one for these weights
WIDE_BYTES = 1 + 4 / GROUP  # of a number of 8 bits and its share of a scale in float32
BLOCK_NUMBERS = 1 << 22  # are unpacked at a time


@dataclass(frozen=True, slots=True)
class WholeNumbers:
    """`weight[o, i] = scales[o, g] * (numbers[o, i] - zeros[o, g])`, `zeros` 0 where they are None; `g` is the group of
    input i: of `group_of`, or neighbours lie in groups of one size.

    Numbers and zeros have `bits` bits and are counted from the middle of their range: from -8 to 7, or -128 to 127.
    """

    numbers: Int8[Tensor, "outputs inputs"]
    scales: Float[Tensor, "outputs groups"]
    zeros: Int8[Tensor, "outputs groups"] | None
    bits: int
    group_of: Int[Tensor, " inputs"] | None = None

    def dense_into(self, result: Tensor) -> Tensor:
        """The weights in the memory of `result`, computed in float32 some rows at a time."""
        step = max(1, BLOCK_NUMBERS // result.shape[1])
        for first in range(0, len(result), step):
            rows = slice(first, first + step)
            numbers = self.numbers[rows].float()
            if self.zeros is not None:
                numbers -= self.spread(self.zeros[rows].float(), 1)
            result[rows] = numbers.mul_(self.spread(self.scales[rows], 1))
        return result

    def grouped(self) -> GroupedWeight | None:
        """The weights in groups of GROUP inputs; None where the inputs of some lie in several groups here."""
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
        """Of values for each group those of every `step`-th input."""
        if self.group_of is not None:
            return values[:, self.group_of[::step]]
        times = self.numbers.shape[1] // values.shape[1] // step
        return values[:, :, None].expand(-1, -1, times).flatten(1)


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight, judged by the headers of the tensors that it lies in. `unpack` reads them; `file` has the first.

    `format` is for a reader. `held_bytes` are those of a number where it stays as it is stored; None where it is
    unpacked. Of a weight of several matrices, such as those of all experts, `unpack_part` gives one. On GPUs a
    number takes `gpu_bytes`, if these are others, and `floats` gives those of FP8 as they are.
    """

    file: Path
    shape: tuple[int, ...]
    format: str
    unpack: Callable[[], WholeNumbers | Tensor]
    held_bytes: float | None = None
    unpack_part: Callable[[int], WholeNumbers] | None = None
    floats: Callable[[], GroupedWeight | None] | None = None
    gpu_bytes: float | None = None

    readable: ClassVar[bool] = True

    def read(self) -> Tensor:
        """The numbers, in float32. Raises MissingWeights."""
        return self.read_into(torch.empty(self.shape))

    def read_into(self, result: Tensor) -> Tensor:
        """The numbers, in the number format and the memory of `result`. Raises MissingWeights."""
        numbers = self.unpack()
        return numbers.dense_into(result) if isinstance(numbers, WholeNumbers) else result.copy_(numbers)

    def groups(self, part: int | None = None) -> GroupedWeight | None:
        """The matrix, or one of several, as it is stored, in groups; None where it is not held so."""
        if self.held_bytes is None:
            return None
        if self.floats is not None:
            return self.floats()
        numbers = self.unpack() if part is None else self.unpack_part(part) if self.unpack_part else None
        return numbers.grouped() if isinstance(numbers, WholeNumbers) else None

    def for_gpu(self) -> QuantizedTensor:
        """The weight for kernels of GPUs, where scales of 8-bit numbers are in float32."""
        held = self.held_bytes
        return replace(self, held_bytes=self.gpu_bytes or (max(held, WIDE_BYTES) if held and held > 1 else held))


def held_bytes(
    bits: int, inputs: int, num_groups: int, scales: str, has_zeros: bool = False, scattered: bool = False
) -> float | None:
    """What a number takes in groups of GROUP: its bits, a scale, and with zero points a least value.

    None where groups do not fit: they must be whole multiples, and if they are `scattered` there may be only one. A
    least value is a product of more bits than float16 has; then, or if `scales` are F32, both are in float32.
    """
    if inputs % num_groups or inputs // num_groups % GROUP or (scattered and num_groups > 1):
        return None
    return (bits + (32 if scales == "F32" or has_zeros else 16) * (1 + has_zeros) / GROUP) / 8


def unpacked(words: Int[Tensor, "rows words"], bits: int) -> Int8[Tensor, "rows numbers"]:
    """The numbers in words of 32 bits, the lowest bits first, less half their range."""
    parts = words.contiguous().view(torch.uint8)
    if bits == 4:
        parts = torch.stack([parts & 15, parts >> 4], -1).flatten(-2)
    return parts.sub_(8 if bits == 4 else 128).view(torch.int8)
