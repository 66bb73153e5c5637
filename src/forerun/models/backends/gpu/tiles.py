"""How matrix products are cut into programs: every tile size of the GPU backend, and which product takes which.

A tile decides how fast a product is, never its bits: all tiles add up the same numbers in the same order. Only the
slices of a product with weights in groups do, so they depend on the layer alone, not on the rows of a pass. The rules
are of measurements on an H100 and an H200: with few programs a GPU's processors are idle, with many small ones each
weight is read again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes, `rows` x `outputs` in steps of `inputs`, and what it takes: warps, and stages of
    loads under way."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int

    def num_programs(self, rows: int, outputs: int) -> int:
        """How many programs a product takes."""
        return -(-rows // self.rows) * -(-outputs // self.outputs)


SMALLEST = Tile(16, 32, 128, warps=4, stages=4)
FEW_ROWS = Tile(16, 32, 128, warps=4, stages=6)  # hides the latency of memory, which is all that matters there
SOME_ROWS = Tile(32, 32, 128, 4, 4)
SLENDER, SLIM, NARROW = Tile(64, 16, 128, 4, 4), Tile(64, 32, 64, 4, 6), Tile(64, 64, 64, 4, 5)
WIDE, LARGE = Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 8, 4)
TILES = (FEW_ROWS, SOME_ROWS, SLENDER, SLIM, NARROW, WIDE, LARGE)
# Each with the fewest rows and the fewest programs that pay.
LARGER = ((LARGE, 65, 96), (WIDE, 33, 128), (NARROW, 33, 128), (SLIM, 33, 160), (SLENDER, 33, 64), (SOME_ROWS, 17, 64))


def tile_for(rows: int, outputs: int) -> Tile:
    """The tile for a product of tensor cores: the largest of which there are enough."""
    for tile, least_rows, enough in LARGER:
        if rows >= least_rows and tile.num_programs(rows, outputs) >= enough:
            return tile
    return FEW_ROWS


@dataclass(frozen=True, slots=True)
class GroupTile:
    """One program of a product with weights in groups. Of its slices so many `at_once` are summed, each by a warp."""

    rows: int
    outputs: int
    slices: int
    at_once: int
    warps: int
    stages: int


FEW_PROGRAMS, GROUP_OUTPUTS = 160, 32  # up to so many of so many outputs, eight slices are faster than four
GROUP_TILES = {
    4: (GroupTile(16, 32, 4, 4, 4, 4), GroupTile(32, 32, 4, 4, 4, 4)),
    8: (GroupTile(16, 32, 8, 8, 8, 4), GroupTile(32, 32, 8, 8, 8, 3), GroupTile(32, 32, 8, 4, 4, 4)),
}
LARGE_INT8 = GroupTile(64, 32, 4, 4, 4, 3)  # other numbers take more registers to widen than are left
WIDE_GROUPS = GroupTile(16, 16, 4, 4, 8, 4)  # for inputs of 32 bits: both factors are all in registers
AnyTile = TypeVar("AnyTile", Tile, GroupTile)


def group_tiles(outputs: int, wide: bool, int8: bool = False) -> tuple[GroupTile, ...]:
    """The tiles that a layer may have, by rows; all have its slices. `wide` inputs have 32 bits."""
    if wide:
        return (WIDE_GROUPS,)
    if -(-outputs // GROUP_OUTPUTS) <= FEW_PROGRAMS:
        return GROUP_TILES[8]
    return (*GROUP_TILES[4], LARGE_INT8) if int8 else GROUP_TILES[4]


def group_tile_for(tiles: Sequence[GroupTile], rows: int) -> GroupTile:
    """The smallest of a layer's tiles that holds so many rows, or the largest."""
    return next((tile for tile in tiles if tile.rows >= rows), tiles[-1])


def fitting(tiles: Sequence[AnyTile], rows: int) -> list[AnyTile]:
    """Those that so many rows fill at most four times over; the first where there is none."""
    return [tile for tile in tiles if rows <= 4 * tile.rows <= 4 * rows] or [tiles[0]]
