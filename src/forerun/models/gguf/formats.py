"""The number formats of GGUF: how the blocks of each are unpacked, and which groups its weights form.

Layouts are those of ggml's block structures (ggml-org/ggml, src/ggml-common.h). Tests compare dequantized values with
those of the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.models.backends.torch_cpu.grouped import GroupedWeight, GroupForm

Bytes = NDArray[np.uint8]  # [blocks, bytes]
Floats = NDArray[np.float32]  # [blocks, groups of a block]
MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the values
Unpacked = tuple[NDArray[np.int8], Floats, Floats | None]  # numbers [blocks, inputs of a block], scales, lowest values


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def halves(packed: Bytes) -> Bytes:
    """The lower four bits of all bytes, then the upper four bits."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def fifth_bits(packed: Bytes) -> Bytes:
    """The fifth bits of 32 numbers: 16 where the bit is set, else 0."""
    bits: Bytes = np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)
    return bits


def q8_0(b: Bytes) -> Unpacked:
    return b[:, 2:].view(np.int8), half(b, 0), None


def q4_0(b: Bytes) -> Unpacked:
    return halves(b[:, 2:]).view(np.int8) - np.int8(8), half(b, 0), None


def q4_1(b: Bytes) -> Unpacked:
    return halves(b[:, 4:]).view(np.int8), half(b, 0), half(b, 2)


def q5_0(b: Bytes) -> Unpacked:
    numbers = halves(b[:, 6:]) | fifth_bits(b[:, 2:6])
    return numbers.view(np.int8) - np.int8(16), half(b, 0), None


def q5_1(b: Bytes) -> Unpacked:
    return (halves(b[:, 8:]) | fifth_bits(b[:, 4:8])).view(np.int8), half(b, 0), half(b, 2)


def scales_and_least(b: Bytes) -> tuple[Floats, Floats]:
    """Scales and lowest values of the eight groups of a Q4_K or Q5_K block: 6 bits each, times two shared factors.

    Four bytes hold the first four scales and the upper two bits of the other four; the next four bytes hold the same of
    the lowest values; and the last four bytes hold the lower four bits of the other four scales and lowest values.
    """
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return half(b, 0) * scales, -half(b, 2) * minima


def pairs_of_groups(packed: Bytes) -> Bytes:
    """The numbers in four runs of 32 bytes, each of which holds two groups of 32 numbers in its half bytes."""
    return np.concatenate([halves(part) for part in np.split(packed, 4, axis=1)], axis=1)


def q4_k(b: Bytes) -> Unpacked:
    return pairs_of_groups(b[:, 16:]).view(np.int8), *scales_and_least(b)


def q5_k(b: Bytes) -> Unpacked:
    bits = [(b[:, 16:48] >> group & 1) << 4 for group in range(8)]
    return (pairs_of_groups(b[:, 48:]) | np.concatenate(bits, axis=1)).view(np.int8), *scales_and_least(b)


def q6_k(b: Bytes) -> Unpacked:
    parts = []
    for half_block in range(2):
        low, high = b[:, 64 * half_block :][:, :64], b[:, 128 + 32 * half_block :][:, :32]
        four = [low[:, :32] & 15, low[:, 32:] & 15, low[:, :32] >> 4, low[:, 32:] >> 4]
        parts += [bits | (high >> 2 * i & 3) << 4 for i, bits in enumerate(four)]
    numbers = np.concatenate(parts, axis=1).view(np.int8) - np.int8(32)
    return numbers, half(b, 208) * b[:, 192:208].view(np.int8), None


def mxfp4(b: Bytes) -> Unpacked:
    numbers = MXFP4[halves(b[:, 1:])]
    return numbers, np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128) * numbers.any(1, keepdims=True), None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A number format: its code in files, the numbers and bytes of a block, and how blocks are unpacked.

    `form` is the form of its weights in groups. A format that is not quantized has only a dtype, `plain`.
    """

    code: int
    numbers: int
    num_bytes: int
    unpack: Callable[[Bytes], Unpacked] | None = None
    form: GroupForm | None = None
    plain: torch.dtype | None = None

    def grouped(self, rows: Bytes) -> GroupedWeight:
        """Rows of blocks as a weight in groups."""
        assert self.unpack is not None and self.form is not None, "a format that is not quantized has no groups"  # noqa: PT018
        numbers, scales, least = self.unpack(np.ascontiguousarray(rows).reshape(-1, self.num_bytes))

        def tensor(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).reshape(len(rows), -1)

        return GroupedWeight(tensor(numbers), tensor(scales), None if least is None else tensor(least), *self.form[:2])

    def dense(self, rows: Bytes) -> Tensor:
        """The numbers of these rows, exactly."""
        return self.grouped(rows).dense() if self.plain is None else torch.from_numpy(rows.copy()).view(self.plain)


FORMATS = {
    "F32": BlockFormat(0, 1, 4, plain=torch.float32),
    "F16": BlockFormat(1, 1, 2, plain=torch.float16),
    "BF16": BlockFormat(30, 1, 2, plain=torch.bfloat16),
    "Q8_0": BlockFormat(8, 32, 34, q8_0, GroupForm(8, 32)),
    "Q4_0": BlockFormat(2, 32, 18, q4_0, GroupForm(4, 32)),
    "Q4_1": BlockFormat(3, 32, 20, q4_1, GroupForm(4, 32, has_least=True)),
    "Q5_0": BlockFormat(6, 32, 22, q5_0, GroupForm(8, 32)),
    "Q5_1": BlockFormat(7, 32, 24, q5_1, GroupForm(8, 32, has_least=True)),
    "Q4_K": BlockFormat(12, 256, 144, q4_k, GroupForm(4, 32, has_least=True, wide=True)),
    "Q5_K": BlockFormat(13, 256, 176, q5_k, GroupForm(8, 32, has_least=True, wide=True)),
    "Q6_K": BlockFormat(14, 256, 210, q6_k, GroupForm(8, 16, wide=True)),
    "MXFP4": BlockFormat(39, 32, 17, mxfp4, GroupForm(8, 32, gpu_bits=4)),
    "I32": BlockFormat(26, 1, 4, plain=torch.int32),  # for tables of token ids
    "I64": BlockFormat(27, 1, 8, plain=torch.int64),
}
READABLE = tuple(name for name in FORMATS if not name.startswith("I"))  # formats of weights
UNREADABLE = {  # unsupported formats by code
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 28: "F64", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0"},
}
