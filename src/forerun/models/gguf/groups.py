"""The quantized block formats of GGUF as weights in groups: the same integers, scales and lowest values, unpacked.

Layouts are those of ggml's block structures (ggml-org/ggml, src/ggml-common.h). Tests compare the values with those of
the package `gguf`, which dequantizes to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.models.backends.torch_cpu.grouped import GroupedWeight

Bytes = NDArray[np.uint8]  # [blocks, bytes]
Floats = NDArray[np.float32]  # [blocks, groups of a block]
MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the values
Unpacked = tuple[NDArray[np.int8], Floats, Floats | None]  # numbers [blocks, inputs of a block], scales, lowest values


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def halves(packed: Bytes) -> Bytes:
    """The lower halves of all bytes, then the upper halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def fifth_bits(packed: Bytes) -> Bytes:
    """The fifth bits of 32 numbers, shifted to the value 16."""
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

    Four bytes hold the first four scales and the upper bits of the last four, the next four bytes the same of the
    minima, and the last four bytes the lower halves of the last four of both.
    """
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return half(b, 0) * scales, -half(b, 2) * minima


def pairs_of_groups(packed: Bytes) -> Bytes:
    """The numbers of four runs of 32 bytes, each with two groups of 32 numbers in its halves."""
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


BLOCK_NUMBERS = {"Q4_K": 256, "Q5_K": 256, "Q6_K": 256}  # numbers in a block; 32 in all others
# By format: unpacking function, bits of a number, numbers of a group, and total bits for each number.
GROUPED: dict[str, tuple[Callable[[Bytes], Unpacked], int, int, float]] = {
    "Q8_0": (q8_0, 8, 32, 8.5),
    "Q4_0": (q4_0, 4, 32, 4.5),
    "Q4_1": (q4_1, 4, 32, 5),
    "Q5_0": (q5_0, 8, 32, 8.5),
    "Q5_1": (q5_1, 8, 32, 9),
    "Q4_K": (q4_k, 4, 32, 6),
    "Q5_K": (q5_k, 8, 32, 10),
    "Q6_K": (q6_k, 8, 16, 10),
    "MXFP4": (mxfp4, 8, 32, 8.5),
}
GPU_BITS = {"Q8_0": 9, "Q5_0": 9, "Q5_1": 10, "MXFP4": 4.5}  # total bits on GPUs, with float32 scales of 8-bit numbers


def grouped(rows: NDArray[np.uint8], number_format: str, shape: tuple[int, ...]) -> GroupedWeight:
    """A matrix of this shape as a weight in groups; `rows` are its blocks in this format."""
    unpack, bits, size, _ = GROUPED[number_format]
    num_blocks = shape[0] * shape[1] // BLOCK_NUMBERS.get(number_format, 32)
    numbers, scales, least = unpack(np.ascontiguousarray(rows).reshape(num_blocks, -1))

    def tensor(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).reshape(shape[0], -1)

    return GroupedWeight(tensor(numbers), tensor(scales), None if least is None else tensor(least), bits, size)
