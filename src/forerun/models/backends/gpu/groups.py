"""GroupLinear: a linear layer on a GPU with group-quantized weights, as checkpoints store them.

This file decides the memory layout of such weights: chunk after chunk of some bytes of every output, so that the
weights that a program reads are contiguous. Activations keep their dtype, so a result equals that of dequantized
weights up to rounding; weights are converted in registers, exactly (`group_kernels.py`).
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

CHUNK = {4: 32, 8: 64}  # most bytes of an output in a chunk, by bits of a weight
OUTPUTS = 32  # of a program that dequantizes
MOST_PARTS = 2  # small chunks of a slice that are read at once
FOUR_BITS = ("INT4", "UINT4", "E2M1")
LONG_READ = 96  # rows from which weights are dequantized first, if the bits may differ
FLOATS = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes of E2M1, the 4-bit floating-point format
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Group-quantized weights: `numbers` [chunks, outputs, bytes] in the format `kind`; `scales` and `least` (the
    lowest values, or None) [chunks, outputs, 1 or 2]. Stacked experts have one more axis in front.

    A chunk of 4-bit numbers holds two groups, of 8-bit numbers one. With a single scale, an output is one group.
    """

    numbers: Tensor
    scales: Tensor
    least: Tensor | None
    kind: str
    inputs: int

    @classmethod
    def of(cls, weight: GroupedWeight, device: torch.device) -> PackedGroups:
        """The weights on a device; scales of 4-bit numbers are stored in 16 bits if that is exact."""
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
        """Number of scales of an output."""
        return self.scales.shape[-3] * self.scales.shape[-1]

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time constants of every kernel that reads these weights."""
        return {
            "KIND": getattr(load_kernels("group_kernels"), self.kind).value,
            "BYTES": self.numbers.shape[-1],
            "SCALED": self.least is not None or self.num_groups > 1,
            "LEAST": self.least is not None,
            **load_kernels().OPTIONS,
        }

    def of_product(self, x: Float[Tensor, "rows inputs"], bias: Tensor | None, tile: GroupTile) -> dict[str, Any]:
        """The compile-time constants of a product with this tile."""
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
        """The tensors that kernels read: numbers, scales and lowest values (the scales again if there are none)."""
        return self.numbers, self.scales, self.scales if self.least is None else self.least

    def in_bytes(self) -> PackedGroups:
        """These weights, which must be E2M1, as INT8."""
        sizes = torch.tensor([*FLOATS, *(-size for size in FLOATS)], dtype=torch.int8, device=self.numbers.device)
        halves = torch.stack([self.numbers & 15, self.numbers >> 4], 1).flatten(0, 1)  # [groups, outputs, bytes]
        held = slice(-(-self.inputs // CHUNK[4]))  # without the padding group
        scales = 0.5 * self.scales.float().movedim(2, 1).flatten(0, 1)[held, :, None]
        return replace(self, numbers=sizes[halves[held].int()].view(torch.uint8), scales=scales, kind="INT8")

    def with_least(self) -> PackedGroups:
        """These weights with a lowest value for each group, equal up to rounding."""
        if self.least is not None:
            return self
        scales = self.scales.float()
        if self.kind == "INT4":
            return replace(self, least=-8 * scales, kind="UINT4")
        scales = scales.expand(len(self.numbers), -1, -1).contiguous() if self.num_groups == 1 else scales
        return replace(self, scales=scales, least=torch.zeros_like(scales))

    def unpacked(self, dtype: torch.dtype) -> Float[Tensor, "outputs inputs"]:
        """The dequantized weights, rounded to `dtype`."""
        chunks, outputs, _ = self.numbers.shape
        weight = torch.empty(outputs, self.inputs, dtype=dtype, device=self.numbers.device)
        with torch.cuda.device_of(weight):  # kernels are launched on the current one
            load_kernels("group_kernels").unpack_groups[chunks, -(-outputs // OUTPUTS)](
                *self.tensors, weight, outputs, self.inputs, OUTPUTS=OUTPUTS, **self.constants
            )
        return weight


def small_floats(numbers: Int8[Tensor, "outputs inputs"]) -> Int8[Tensor, "outputs inputs"] | None:
    """The E2M1 codes of half these numbers; None if some cannot be represented. Needs a few bytes for each number."""
    sizes = numbers.abs()
    codes, known = torch.zeros_like(numbers), torch.zeros_like(numbers)
    for below, size in pairwise(FLOATS):
        reached = sizes >= size
        codes.add_(reached)
        known.add_(reached, alpha=size - below)
    return codes.add_(numbers < 0, alpha=8) if torch.equal(known, sizes) else None


class GroupLinear:
    """`x @ weight.T + bias` with group-quantized weights; the bits of a row depend on that row alone.

    `unpacks`: for LONG_READ rows or more the weights are dequantized and multiplied by the library, which is faster but
    differs in the last bits.
    """

    def __init__(self, weight: PackedGroups, bias: Bias | None, unpacks: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.unpacks = unpacks
        self.tiles: dict[int, GroupTile] = {}
        self.shape, self.num_bytes = (weight.numbers.shape[1], weight.inputs), weight.numbers.nbytes
        scaled = "" if weight.least is None else ", with least values"  # a key of the stored tile times
        self.matrix = f"{weight.kind}{scaled}, {self.shape[0]} x {self.shape[1]}"

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        with torch.cuda.device_of(x):  # kernels are launched on the current one
            if self.unpacks and len(x) >= LONG_READ:
                return functional.linear(x, self.weight.unpacked(x.dtype), self.bias)
            return self.product(x, self.tile_for(len(x), x.dtype))

    def tile_for(self, rows: int, dtype: torch.dtype) -> GroupTile:
        """The tile for a product of this many rows."""
        return self.tiles.get(rows_measured(rows)) or group_tile_for(self.all_tiles(dtype), rows)

    def candidates(self, rows: int, dtype: torch.dtype) -> Sequence[GroupTile]:
        """As in TiledLinear; a single one if the weights are dequantized for so many rows."""
        tiles = fitting(self.all_tiles(dtype), rows)
        return tiles[:1] if self.unpacks and rows >= LONG_READ else tiles

    def all_tiles(self, dtype: torch.dtype) -> Sequence[GroupTile]:
        """All tiles for inputs of this dtype."""
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
    """One linear layer of all experts with group-quantized weights; same bits as GroupLinear of each expert."""

    weight: PackedGroups
    bias: Float[Tensor, "experts outputs"] | None

    @classmethod
    def of_layers(cls, layers: Sequence[GroupLinear]) -> PackedExperts | None:
        """The layers of all experts, stacked; None if their weights have no common format."""
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
        """Rows of the tile for this average number of rows: one of two that all formats have."""
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
    """The weights in a common format; None if they have none.

    The formats can differ between experts, since they are chosen by the values: E2M1 if all weights fit it.
    """
    if {part.kind for part in parts} == {"E2M1", "INT8"}:
        parts = [part.in_bytes() if part.kind == "E2M1" else part for part in parts]
    if any(part.least is not None for part in parts):
        parts = [part.with_least() for part in parts]
    forms = {(part.kind, part.numbers.shape, part.scales.shape, part.least is None) for part in parts}
    return parts if len(forms) == 1 else None
