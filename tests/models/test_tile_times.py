"""Tiles are chosen by measurement: the fastest is stored per GPU and reused, unless the set of tiles has changed."""

import json
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch

from forerun.models.backends.gpu import tiles
from forerun.models.backends.gpu.tiles import (
    ROWS,
    SMALLEST,
    TILES,
    Tile,
    choose_tiles,
    fitting,
    rows_measured,
    tiles_file,
)

CPU = torch.device("cpu")


class Layer:
    """A linear layer of which nothing is computed."""

    matrix, shape, num_bytes = "8 x 4", (8, 4), 1 << 26

    def __init__(self) -> None:
        self.tiles: dict[int, Tile] = {}

    def candidates(self, rows: int, dtype: torch.dtype) -> list[Tile]:
        return fitting(TILES, rows)

    def product(self, x: torch.Tensor, tile: Tile) -> torch.Tensor:
        measured.append((len(x), tile))
        return x


measured: list[tuple[int, Tile]] = []


@pytest.fixture(autouse=True)
def clock(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card on which the last candidate is the fastest."""

    def last_is_fastest(bodies: list[Callable[[], object]], device: torch.device, runs: int) -> float:
        for body in bodies:
            body()
        return -len(measured)

    measured.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiles, "kernel_us", last_is_fastest)
    monkeypatch.setattr(tiles, "card", lambda device: "a card")


def chosen() -> dict[int, Tile]:
    layers = [Layer(), Layer()]
    choose_tiles(layers, CPU, torch.bfloat16)
    assert layers[0].tiles == layers[1].tiles
    return layers[0].tiles


def test_the_fastest_tile_is_measured_once_and_stored_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    best = {rows: fitting(TILES, rows)[-1] for rows in ROWS}
    assert chosen() == best
    assert {rows for rows, _ in measured} == set(ROWS)
    assert {tile for rows, tile in measured if rows == ROWS[0]} == set(fitting(TILES, ROWS[0]))
    measured.clear()
    assert chosen() == best
    assert not measured
    monkeypatch.setattr(tiles, "card", lambda device: "another card")
    assert chosen() == best
    assert measured


@pytest.mark.parametrize("damage", [
    lambda kept: "{", lambda kept: "[]", lambda kept: json.dumps({key: {} for key in kept}),
    lambda kept: json.dumps({key: tiles | {str(ROWS[1]): [64, 8, 8, 8, 8]} for key, tiles in kept.items()}),
    lambda kept: json.dumps({key: tiles | {str(ROWS[0]): list(astuple(TILES[-1]))} for key, tiles in kept.items()}),
])  # fmt: skip
def test_stored_times_of_other_tiles_and_damaged_files_are_measured_again(
    damage: Callable[[dict[str, Any]], str],
) -> None:
    best = chosen()
    tiles_file().write_text(damage(json.loads(tiles_file().read_text())))
    measured.clear()
    assert chosen() == best
    assert measured


def test_small_matrices_and_other_layers_are_left_alone() -> None:
    small = Layer()
    small.num_bytes = tiles.SMALL_BYTES - 1
    choose_tiles([small, torch.nn.functional.relu, torch.nn.Linear(2, 2)], CPU, torch.bfloat16)
    assert not measured
    assert not small.tiles


def test_where_there_is_one_tile_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "candidates", lambda layer, rows, dtype: [SMALLEST])
    assert chosen() == dict.fromkeys(ROWS, SMALLEST)
    assert not measured


def test_an_unwritable_folder_only_costs_another_measurement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert chosen()
    assert "cannot be saved" in caplog.text
    assert "every start measures them again" in caplog.text


def test_reads_take_the_tiles_of_the_next_number_of_rows() -> None:
    assert [rows_measured(rows) for rows in (1, 16, 17, 32, 33, 64, 65, 4096)] == [0, 0, 32, 32, 64, 64, 128, 128]
    for rows in ROWS:
        assert fitting(TILES, rows)
        assert all(tile.rows <= rows for tile in fitting(TILES, rows))
    assert fitting((SMALLEST,), 4096) == [SMALLEST]
