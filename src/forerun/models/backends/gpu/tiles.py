"""How matrix products are cut into programs: every tile size of the GPU backend, and which product takes which.

A tile decides how fast a product is, never its bits: all tiles add up the same numbers in the same order. Only the
slices of a product with weights in groups do, so they depend on the layer alone, not on the rows of a pass. The rules
are of measurements on an H100 and an H200: with few programs a GPU's processors are idle, with many small ones each
weight is read again and again.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """One program of a product with weights in groups; with tensor cores a slice is one warp's."""

    rows: int
    outputs: int
    slices: int
    warps: int
    stages: int


GROUP_ROWS = (16, 32, 64)
GROUP_OUTPUTS = 32
FEW_PROGRAMS = 160  # up to so many, eight warps each are faster than four
STAGES = {4: {16: 4, 32: 4, 64: 3}, 8: {16: 4, 32: 3, 64: 2}}  # by slices and rows: what registers and memory hold


def group_tiles(outputs: int, wide: bool) -> tuple[GroupTile, ...]:
    """The tiles of a layer, by rows. `wide` inputs have 32 bits, and both factors are all in registers."""
    if wide:
        return (GroupTile(GROUP_ROWS[0], GROUP_OUTPUTS // 2, 4, 8, STAGES[4][16]),)
    slices = 8 if -(-outputs // GROUP_OUTPUTS) <= FEW_PROGRAMS else 4
    return tuple(GroupTile(rows, GROUP_OUTPUTS, slices, slices, STAGES[slices][rows]) for rows in GROUP_ROWS)


def group_tile_for(rows: int, outputs: int, wide: bool) -> GroupTile:
    """The smallest tile that holds so many rows, or the largest."""
    tiles = group_tiles(outputs, wide)
    return next((tile for tile in tiles if tile.rows >= rows), tiles[-1])
