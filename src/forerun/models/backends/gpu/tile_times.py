"""Which tile each product takes, by measured times: once for each matrix on a card, and kept.

Matrices of small models are not measured; rules choose for them (`tiles.py`), as for reads of few rows, for which there
is one tile. No bit depends on what is measured, so it may be lost, and copied from one machine to another.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.models.backends.gpu.capture import CAPTURES
from forerun.store import cache_folder, keep_measured

ROWS = (32, 64, 128)  # that are timed; a read takes the next larger one's tile, or the last one's
FEWEST_ROWS = 17
SMALL_BYTES = 64 << 20  # of alike matrices, which are not worth the time
MOST_LAYERS = 16  # of them in turn, so that weights come from memory as in a pass
RUNS, WARM_UPS = 5, 3
KeptTiles = dict[str, dict[str, list[int]]]  # by matrix and rows, what a tile is made of
logger = logging.getLogger(__name__)


@runtime_checkable
class TiledLinear(Protocol):
    """A linear layer whose product may be cut in several ways: `tiles` are the chosen ones, by ROWS."""

    tiles: dict[int, Any]

    @property
    def matrix(self) -> str:
        """All that times depend on beside the card: number formats, outputs and inputs."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """How many outputs and inputs."""
        ...

    @property
    def num_bytes(self) -> int:
        """What the weights take."""
        ...

    def candidates(self, rows: int, dtype: torch.dtype) -> Sequence[Any]:
        """The tiles that may be fastest for so many rows; all give the same bits."""
        ...

    def product(self, x: Float[Tensor, "rows inputs"], tile: Any) -> Float[Tensor, "rows outputs"]: ...


def choose_tiles(layers: Iterable[object], device: torch.device, dtype: torch.dtype) -> None:
    """Set the fastest tiles for inputs of this format; measure those of which none are kept."""
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
    """The number of ROWS whose tile a read of so many takes; 0 where there is no choice."""
    return 0 if rows < FEWEST_ROWS else next((each for each in ROWS if rows <= each), ROWS[-1])


def chosen_before(layer: TiledLinear, kept: dict[str, list[int]], dtype: torch.dtype) -> dict[int, Any] | None:
    """The tiles that are kept; None where one is missing, or is not among those that there are now."""
    found = {}
    for rows in ROWS:
        tiles = [tile for tile in layer.candidates(rows, dtype) if list(astuple(tile)) == kept.get(str(rows))]
        if not tiles:
            return None
        found[rows] = tiles[0]
    return found


def fastest(layers: Sequence[TiledLinear], rows: int, device: torch.device, dtype: torch.dtype) -> Any:
    """The fastest tile of all candidates, by median times."""
    tiles = layers[0].candidates(rows, dtype)
    if len(tiles) == 1:
        return tiles[0]
    x = torch.randn(rows, layers[0].shape[1], device=device, dtype=dtype)
    with torch.cuda.device_of(x):
        times = [kernel_us([partial(layer.product, x, tile) for layer in layers], device, RUNS) for tile in tiles]
    return tiles[times.index(min(times))]


@cache
def card(device: torch.device) -> str:
    """The GPU, its driver, and what compiles kernels for it."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    driver = Path("/proc/driver/nvidia/version")
    version = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else torch.version.cuda
    return f"{name}, {version}, torch {torch.__version__}, triton {triton.__version__}"


def tiles_file() -> Path:
    """Where tiles are kept. Raises OSError where there is no home folder."""
    return cache_folder("times") / "tiles.json"


def read_tiles() -> KeptTiles:
    """All tiles that are kept, of any card; a file that cannot be read, or is no such file, has none."""
    with suppress(OSError, TypeError, ValueError, RecursionError):
        stored = json.loads(tiles_file().read_text(encoding="utf-8"))
        return {key: value for key, value in dict(stored).items() if isinstance(value, dict)}
    return {}


def device_ms(body: Callable[[], object], device: torch.device, runs: int) -> float:
    """Median time of `body` between two events on the device; on a CPU, which is not measured, one call's."""
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
    """Median microseconds of one of these bodies, all in turn, from one captured graph: no launch is waited for.

    Bodies that read other memory keep it out of the device's cache for each other.
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
