"""GroupLinear: a layer on a GPU whose weights stay in groups of few bits, as files have them.

This file decides how such weights lie in memory: in chunks of bytes of every output, chunk after chunk, so that the
outputs of a program are one piece of memory. Inputs keep their format, so a result is that of the unpacked weights up
to rounding; weights are widened in registers, to the bit (`group_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int8
from forerun.device import stages
from forerun.models.backends.gpu.experts import Pairs
from forerun.models.backends.gpu.ops import load_kernels
from forerun.models.backends.gpu.tiles import (
    FEW_ROWS,
    SOME_ROWS,
    GroupTile,
    fitting,
    group_tile_for,
    group_tiles,
    rows_measured,
)
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from forerun.models.layer import Bias, Linear

CHUNK = {4: 32, 8: 64}  # bytes of an output at most, by bits of a number
OUTPUTS = 32  # of a program that unpacks
MOST_PARTS = 2  # chunks of a slice that are read at once, where they are small
FOUR_BITS = ("INT4", "UINT4", "E2M1")
LONG_READ = 96  # rows for which weights are unpacked first, where no bits are promised
FLOATS = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers of 4 bits with a point
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Weights in memory: `numbers` [chunks, outputs, bytes] of a kind; `scales` and `least` values
    [chunks, outputs, 1 or 2]. Those of experts, one after another, have one more axis in front.

    A chunk of numbers of 4 bits is two groups, others are one. With a single scale an output is one group.
    """

    numbers: Tensor
    scales: Tensor
    least: Tensor | None
    kind: str
    inputs: int

    @classmethod
    def of(cls, weight: GroupedWeight, device: torch.device) -> PackedGroups:
        """The weights on a device; scales of 4-bit numbers are held in 16 bits where that loses nothing."""
        inputs, numbers, scales = weight.numbers.shape[1], weight.numbers.to(device), weight.scales.to(device)
        least = None if weight.least is None else weight.least.to(device)
        if weight.bits == 4:
            kind, codes = ("INT4", numbers + 8) if least is None else ("UINT4", numbers)
        elif numbers.dtype == torch.float8_e4m3fn:
            kind, codes = "E4M3", numbers
        elif least is None and weight.size == CHUNK[4] and (floats := small_floats(numbers)) is not None:
            kind, codes, scales = "E2M1", floats, 2 * scales
        else:
            kind, codes = "INT8", numbers
        halves = 2 if kind in FOUR_BITS else 1
        whole = scales.shape[1] == 1 and halves == 1
        size = CHUNK[8] if whole else min(weight.size, CHUNK[8 // halves])
        codes = functional.pad(codes.view(torch.uint8), (0, -inputs % (size * halves)))
        chunks = codes.unflatten(1, (-1, halves, size)).permute(2, 1, 0, 3)  # [halves, chunks, outputs, size]
        packed = chunks[0] if halves == 1 else chunks[0] | chunks[1] << 4

        def in_groups(values: Tensor) -> Tensor:
            repeated = values if whole else values.repeat_interleave(weight.size // size, 1)
            repeated = repeated.expand(-1, len(packed)) if whole and least is not None else repeated
            padded = repeated if whole else functional.pad(repeated, (0, len(packed) * halves - repeated.shape[1]))
            groups: Tensor = padded.unflatten(1, (-1, halves)).transpose(0, 1).contiguous()
            shorter = HALVES if halves == 2 else ()
            return next((short for half in shorter if torch.equal((short := groups.to(half)).float(), groups)), groups)

        return cls(packed.contiguous(), in_groups(scales), None if least is None else in_groups(least), kind, inputs)

    @property
    def num_groups(self) -> int:
        """The scales of an output."""
        return self.scales.shape[-3] * self.scales.shape[-1]

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {
            "KIND": getattr(load_kernels("group_kernels"), self.kind).value,
            "BYTES": self.numbers.shape[-1],
            "SCALED": self.least is not None or self.num_groups > 1,
            "LEAST": self.least is not None,
            **load_kernels().OPTIONS,
        }

    def of_product(self, x: Float[Tensor, "rows inputs"], bias: Tensor | None, tile: GroupTile) -> dict[str, Any]:
        """What products are compiled for, by such programs."""
        (chunks, _, size), under_way = self.numbers.shape[-3:], stages(tile.stages)
        return {
            "WIDTH": self.inputs, "CHUNKS": chunks, "BIASED": bias is not None, "ROWS": tile.rows,
            "PARTS": 1 if self.kind in FOUR_BITS else min(MOST_PARTS, CHUNK[8] // size),
            "OUTPUTS": tile.outputs, "SLICES": tile.slices, "AT_ONCE": tile.at_once, "STAGES": under_way,
            "PTX": not x.is_cpu and x.dtype == torch.bfloat16 and not torch.version.hip,
            "num_warps": tile.warps, "num_stages": under_way, **self.constants,
        }  # fmt: skip

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What kernels read: numbers, scales and least values, of which there may be none."""
        return self.numbers, self.scales, self.scales if self.least is None else self.least

    def in_bytes(self) -> PackedGroups:
        """Equal weights of kind INT8, of those of E2M1."""
        sizes = torch.tensor([*FLOATS, *(-size for size in FLOATS)], dtype=torch.int8, device=self.numbers.device)
        halves = torch.stack([self.numbers & 15, self.numbers >> 4], 1).flatten(0, 1)  # [groups, outputs, bytes]
        held = slice(-(-self.inputs // CHUNK[4]))
        scales = 0.5 * self.scales.float().movedim(2, 1).flatten(0, 1)[held, :, None]
        return replace(self, numbers=sizes[halves[held].int()].view(torch.uint8), scales=scales, kind="INT8")

    def with_least(self) -> PackedGroups:
        """Equal weights up to rounding, with a least value for each group."""
        if self.least is not None:
            return self
        scales = self.scales.float()
        if self.kind == "INT4":
            return replace(self, least=-8 * scales, kind="UINT4")
        scales = scales.expand(len(self.numbers), -1, -1).contiguous() if self.num_groups == 1 else scales
        return replace(self, scales=scales, least=torch.zeros_like(scales))

    def unpacked(self, dtype: torch.dtype) -> Float[Tensor, "outputs inputs"]:
        """The weights, rounded to a format."""
        chunks, outputs, _ = self.numbers.shape
        weight = torch.empty(outputs, self.inputs, dtype=dtype, device=self.numbers.device)
        with torch.cuda.device_of(weight):  # kernels are launched on the current one
            load_kernels("group_kernels").unpack_groups[chunks, -(-outputs // OUTPUTS)](
                *self.tensors, weight, outputs, self.inputs, OUTPUTS=OUTPUTS, **self.constants
            )
        return weight


def small_floats(numbers: Int8[Tensor, "outputs inputs"]) -> Int8[Tensor, "outputs inputs"] | None:
    """The codes of E2M1 of half these numbers; None where there are others. Takes a few bytes a number for a while."""
    sizes = numbers.abs()
    codes, known = torch.zeros_like(numbers), torch.zeros_like(numbers)
    for below, size in pairwise(FLOATS):
        reached = sizes >= size
        codes.add_(reached)
        known.add_(reached, alpha=size - below)
    return codes.add_(numbers < 0, alpha=8) if torch.equal(known, sizes) else None


class GroupLinear:
    """`x @ weight.T + bias`, a row's bits depending on the row alone.

    `unpacks`: LONG_READ rows or more are multiplied by the library with unpacked weights, which is faster, and whose
    last bits differ.
    """

    def __init__(self, weight: PackedGroups, bias: Bias | None, unpacks: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.unpacks = unpacks
        self.tiles: dict[int, GroupTile] = {}
        self.shape, self.num_bytes = (weight.numbers.shape[1], weight.inputs), weight.numbers.nbytes
        scaled = "" if weight.least is None else ", with least values"
        self.matrix = f"{weight.kind}{scaled}, {self.shape[0]} x {self.shape[1]}"

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        with torch.cuda.device_of(x):  # kernels are launched on the current one
            if self.unpacks and len(x) >= LONG_READ:
                return functional.linear(x, self.weight.unpacked(x.dtype), self.bias)
            return self.product(x, self.tile_for(len(x), x.dtype))

    def tile_for(self, rows: int, dtype: torch.dtype) -> GroupTile:
        """The tile that so many rows are multiplied by."""
        return self.tiles.get(rows_measured(rows)) or group_tile_for(self.all_tiles(dtype), rows)

    def candidates(self, rows: int, dtype: torch.dtype) -> Sequence[GroupTile]:
        """As in every TiledLinear; one for rows that unpacked weights are multiplied with."""
        tiles = fitting(self.all_tiles(dtype), rows)
        return tiles[:1] if self.unpacks and rows >= LONG_READ else tiles

    def all_tiles(self, dtype: torch.dtype) -> Sequence[GroupTile]:
        """All of inputs of this format."""
        return group_tiles(self.shape[0], dtype == torch.float32, self.weight.kind == "INT8")

    def product(self, x: Float[Tensor, "rows inputs"], tile: GroupTile) -> Float[Tensor, "rows outputs"]:
        x, outputs = x.contiguous(), self.weight.numbers.shape[1]
        out = x.new_empty(len(x), outputs)
        load_kernels("group_kernels").group_gemm[-(-len(x) // tile.rows), -(-outputs // tile.outputs)](
            x, *self.weight.tensors, x if self.bias is None else self.bias, out, len(x), outputs,
            **self.weight.of_product(x, self.bias, tile),
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One linear layer of every expert, in groups. A pair has the bits of its row times its expert's GroupLinear."""

    weight: PackedGroups
    bias: Float[Tensor, "experts outputs"] | None

    @classmethod
    def of_layers(cls, layers: Sequence[GroupLinear]) -> PackedExperts | None:
        """These, which are one expert's each; None where their weights have no form in common."""
        parts = in_one_form([layer.weight for layer in layers])
        if parts is None:
            return None

        def stack(tensors: Sequence[Tensor]) -> Tensor:
            alike = len({tensor.dtype for tensor in tensors}) == 1
            return torch.stack([tensor if alike else tensor.float() for tensor in tensors])

        lows = [part.least for part in parts if part.least is not None]
        numbers, scales = stack([part.numbers for part in parts]), stack([part.scales for part in parts])
        weight = replace(parts[0], numbers=numbers, scales=scales, least=stack(lows) if lows else None)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return cls(weight, torch.stack(biases) if biases else None)

    def of(self, expert: int) -> Linear:
        w, bias = self.weight, None if self.bias is None else self.bias[expert]
        least = None if w.least is None else w.least[expert]
        part = replace(w, numbers=w.numbers[expert], scales=w.scales[expert], least=least)
        return GroupLinear(part, bias, unpacks=False)

    def tile_rows(self, average: float) -> int:
        """Of two tiles, which weights of every kind have."""
        return (FEW_ROWS if average <= FEW_ROWS.rows else SOME_ROWS).rows

    def product(
        self, kernels: Any, x: Float[Tensor, "_ inputs"], pairs: Pairs, sharing: int
    ) -> Float[Tensor, "pairs outputs"]:
        outputs = self.weight.numbers.shape[2]
        tile = group_tile_for(group_tiles(outputs, x.dtype == torch.float32), pairs.tile.rows)
        assert tile.rows == pairs.tile.rows, "pairs are sorted into tiles of so many rows"
        out = x.new_empty(len(pairs.order), outputs)
        kernels.group_expert_gemm[pairs.num_tiles, -(-outputs // tile.outputs)](
            x, *self.weight.tensors, x if self.bias is None else self.bias, out, pairs.order, pairs.table, outputs,
            LANES=pairs.lanes, SHARING=sharing, **self.weight.of_product(x, self.bias, tile),
        )  # fmt: skip
        return out


def in_one_form(parts: Sequence[PackedGroups]) -> Sequence[PackedGroups] | None:
    """The weights in one form; None where they have none in common.

    One expert's may be another than the others', if its numbers are few, or all zeros.
    """
    if {part.kind for part in parts} == {"E2M1", "INT8"}:
        parts = [part.in_bytes() if part.kind == "E2M1" else part for part in parts]
    if any(part.least is not None for part in parts):
        parts = [part.with_least() for part in parts]
    forms = {(part.kind, part.numbers.shape, part.scales.shape, part.least is None) for part in parts}
    return parts if len(forms) == 1 else None
