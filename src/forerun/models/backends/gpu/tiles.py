"""The tile sizes of the GPU backend's matrix products, and the choice of one for each product.

A tile decides the speed of a product, never its bits: all tiles sum the same numbers in the same order. Only the slices
of a product with group-quantized weights change the order, so they depend on the layer, not on the rows of a pass. The
rules come from measurements on an H100 and an H200: few programs leave a GPU's processors idle, and many small ones
read each weight repeatedly.

Products of large matrices are timed once for each matrix on a GPU, and the choice is stored. Rules choose for small
models, and for few rows, which have only one tile. No bits depend on the stored choice, so the file may be deleted, or
copied to another machine.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.models.backends.gpu.capture import CAPTURES
from forerun.store import cache_folder, keep_measured, read_measured

ROWS = (32, 64, 128)  # numbers of rows that are timed; a pass uses the tile of the next larger one, or of the last
FEWEST_ROWS = 17  # fewer rows have one tile
SMALL_BYTES = 64 << 20  # matrices of one kind that are smaller in total are not timed
MOST_LAYERS = 16  # layers timed one after another, so that weights come from memory as in a pass
RUNS, WARM_UPS = 5, 3
KeptTiles = dict[str, dict[str, list[int]]]  # the fields of a tile, by matrix and rows
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tile:
    """One program of a product: it computes `rows` x `outputs` in steps of `inputs`, with `warps` and pipeline
    `stages`."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int

    def num_programs(self, rows: int, outputs: int) -> int:
        return -(-rows // self.rows) * -(-outputs // self.outputs)


SMALLEST = Tile(16, 32, 128, warps=4, stages=4)
FEW_ROWS = Tile(16, 32, 128, warps=4, stages=6)  # more stages hide the latency of memory
SOME_ROWS = Tile(32, 32, 128, 4, 4)
SLENDER, SLIM, NARROW = Tile(64, 16, 128, 4, 4), Tile(64, 32, 64, 4, 6), Tile(64, 64, 64, 4, 5)
WIDE, LARGE = Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 8, 4)
TILES = (FEW_ROWS, SOME_ROWS, SLENDER, SLIM, NARROW, WIDE, LARGE)
# Larger tiles, each with the fewest rows and the fewest programs for which it is faster.
LARGER = ((LARGE, 65, 96), (WIDE, 33, 128), (NARROW, 33, 128), (SLIM, 33, 160), (SLENDER, 33, 64), (SOME_ROWS, 17, 64))


def tile_for(rows: int, outputs: int) -> Tile:
    """The tile for a product on tensor cores: the largest that gives enough programs."""
    for tile, least_rows, enough in LARGER:
        if rows >= least_rows and tile.num_programs(rows, outputs) >= enough:
            return tile
    return FEW_ROWS


@dataclass(frozen=True, slots=True)
class GroupTile:
    """One program of a product with group-quantized weights; `at_once` of its slices are summed at a time."""

    rows: int
    outputs: int
    slices: int
    at_once: int
    warps: int
    stages: int


FEW_PROGRAMS, GROUP_OUTPUTS = 160, 32  # up to FEW_PROGRAMS of GROUP_OUTPUTS, eight slices are faster than four
GROUP_TILES = {
    4: (GroupTile(16, 32, 4, 4, 4, 4), GroupTile(32, 32, 4, 4, 4, 4)),
    8: (GroupTile(16, 32, 8, 8, 8, 4), GroupTile(32, 32, 8, 8, 8, 3), GroupTile(32, 32, 8, 4, 4, 4)),
}
LARGE_INT8 = GroupTile(64, 32, 4, 4, 4, 3)  # converting other formats takes more registers than are left
WIDE_GROUPS = GroupTile(16, 16, 4, 4, 8, 4)  # for float32 inputs: both operands are in registers
AnyTile = TypeVar("AnyTile", Tile, GroupTile)


def group_tiles(outputs: int, wide: bool, int8: bool = False) -> tuple[GroupTile, ...]:
    """The tiles of a layer in ascending order of rows, all with the same slices. `wide`: float32 inputs."""
    if wide:
        return (WIDE_GROUPS,)
    if -(-outputs // GROUP_OUTPUTS) <= FEW_PROGRAMS:
        return GROUP_TILES[8]
    return (*GROUP_TILES[4], LARGE_INT8) if int8 else GROUP_TILES[4]


def group_tile_for(tiles: Sequence[GroupTile], rows: int) -> GroupTile:
    """The smallest of these tiles that holds `rows` rows, or the largest."""
    return next((tile for tile in tiles if tile.rows >= rows), tiles[-1])


def fitting(tiles: Sequence[AnyTile], rows: int) -> list[AnyTile]:
    """The tiles that `rows` rows fill at least to a quarter and at most four times; the first if there is none."""
    return [tile for tile in tiles if rows <= 4 * tile.rows <= 4 * rows] or [tiles[0]]


@runtime_checkable
class TiledLinear(Protocol):
    """A linear layer with a choice of tiles; `tiles` are the chosen ones, by the numbers in ROWS.

    `matrix` names all that times depend on besides the GPU: formats, and the outputs and inputs of its `shape`.
    """

    tiles: dict[int, Any]
    matrix: str
    shape: tuple[int, int]
    num_bytes: int  # of the weights

    def candidates(self, rows: int, dtype: torch.dtype) -> Sequence[Any]:
        """The tiles that may be fastest for this many rows; all give the same bits."""
        ...

    def product(self, x: Float[Tensor, "rows inputs"], tile: Any) -> Float[Tensor, "rows outputs"]: ...


def choose_tiles(layers: Iterable[object], device: torch.device, dtype: torch.dtype) -> None:
    """Set the fastest tiles for inputs of this dtype; measure matrices for which no choice is stored."""
    alike: dict[str, list[TiledLinear]] = {}
    for layer in layers:
        if isinstance(layer, TiledLinear):
            alike.setdefault(layer.matrix, []).append(layer)
    kept = read_tiles()
    for matrix, same in alike.items():
        if sum(layer.num_bytes for layer in same) < SMALL_BYTES:
            continue
        key = f"{card(device)}: {dtype}, {matrix}"
        chosen = chosen_before(same[0], kept.get(key, {}), dtype)
        if chosen is None:
            logger.info("Measuring tiles of %s, once on this card.", matrix)
            chosen = {rows: fastest(same[:MOST_LAYERS], rows, device, dtype) for rows in ROWS}
            kept = read_tiles() | {key: {str(rows): list(astuple(tile)) for rows, tile in chosen.items()}}
            keep_measured(tiles_file, kept, "The tiles of this card")
        for layer in same:
            layer.tiles = chosen


def rows_measured(rows: int) -> int:
    """The number in ROWS whose tile a pass of this many rows uses; 0 if there is only one tile."""
    return 0 if rows < FEWEST_ROWS else next((each for each in ROWS if rows <= each), ROWS[-1])


def chosen_before(layer: TiledLinear, kept: dict[str, list[int]], dtype: torch.dtype) -> dict[int, Any] | None:
    """The stored tiles of a matrix; None if one is missing or no longer exists."""
    stored = {}
    for rows in ROWS:
        tiles = [tile for tile in layer.candidates(rows, dtype) if list(astuple(tile)) == kept.get(str(rows))]
        if not tiles:
            return None
        stored[rows] = tiles[0]
    return stored


def fastest(layers: Sequence[TiledLinear], rows: int, device: torch.device, dtype: torch.dtype) -> Any:
    """The candidate tile with the lowest median time."""
    tiles = layers[0].candidates(rows, dtype)
    if len(tiles) == 1:
        return tiles[0]
    x = torch.randn(rows, layers[0].shape[1], device=device, dtype=dtype)
    with torch.cuda.device_of(x):
        times = [kernel_us([partial(layer.product, x, tile) for layer in layers], device, RUNS) for tile in tiles]
    return tiles[times.index(min(times))]


@cache
def card(device: torch.device) -> str:
    """The GPU, its driver, and the versions that compile kernels for it."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    driver = Path("/proc/driver/nvidia/version")
    version = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else torch.version.cuda
    return f"{name}, {version}, torch {torch.__version__}, triton {triton.__version__}"


def tiles_file() -> Path:
    """The file of stored tiles. Raises OSError if there is no home folder."""
    return cache_folder("times") / "tiles.json"


def read_tiles() -> KeptTiles:
    """All stored tiles of all GPUs; none if the file cannot be read or has another content."""
    return {key: value for key, value in read_measured(tiles_file).items() if isinstance(value, dict)}


def device_ms(body: Callable[[], object], device: torch.device, runs: int) -> float:
    """Median milliseconds of `body` between two events on the device; on a CPU the time of a single call."""
    if device.type == "cpu":
        started = time.perf_counter()
        body()
        return (time.perf_counter() - started) * 1e3
    times: list[float] = []
    for _ in range(runs + WARM_UPS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        body()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times[WARM_UPS:])


def kernel_us(bodies: Sequence[Callable[[], object]], device: torch.device, runs: int) -> float:
    """Median microseconds of one of these bodies, which run one after another in a captured graph, without launches.

    Bodies that read different memory evict each other's from the device's cache.
    """

    def all_in_turn() -> None:
        for body in bodies:
            body()

    if device.type == "cpu":
        return device_ms(all_in_turn, device, runs) / len(bodies) * 1e3
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_in_turn()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    with CAPTURES, torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another engine may be at work
        all_in_turn()
    return device_ms(graph.replay, device, runs) / len(bodies) * 1e3
