"""Which tile each product takes, by measured times: once for each matrix on a card, and kept.

Matrices of small models are not measured; rules choose for them (`tiles.py`), as for reads of few rows, for which there
is one tile. No bit depends on what is measured, so it may be lost, and copied from one machine to another.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.models.backends.gpu.clock import kernel_us
from forerun.store import cache_folder, replace_file

ROWS = (32, 64, 128)  # that are timed; a read takes the next larger one's tile, or the last one's
FEWEST_ROWS = 17
SMALL_BYTES = 64 << 20  # of alike matrices, which are not worth the time
MOST_LAYERS = 16  # of them in turn, so that weights come from memory as in a pass
RUNS = 5
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
            keep_tiles(kept)
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


def keep_tiles(kept: KeptTiles) -> None:
    """Replace the file as a whole; where that is not possible, they are measured again at every start."""
    try:
        path = tiles_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps(kept, indent=0).encode())
    except OSError as error:
        logger.warning(
            "The tiles of this card cannot be kept (%s), so every start measures them again, which takes seconds. Set "
            "XDG_CACHE_HOME to a folder of your own that you can write to.",
            error,
        )
