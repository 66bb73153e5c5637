"""Measures every tile of a matrix product, whether a rule would choose it or not, and compares the bits of results.

Several processes compile the kernels first, because each compilation takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import groupby

import torch
from benchmarks.gpu.kernels import FEWEST_LAUNCHES, RUNS, copies_of, matrices
from benchmarks.gpu.passes import config_of
from benchmarks.gpu.setting import Setting, WeightFormat

from forerun.config import Quantization
from forerun.models.backends.gpu.backend import GpuBackend, OneGemmLinear
from forerun.models.backends.gpu.groups import GroupLinear
from forerun.models.backends.gpu.tiles import TILES, GroupTile, Tile, group_tile_for, group_tiles, kernel_us, tile_for

ROWS = (16, 32, 64, 128)
FEW_OUTPUTS, MANY_OUTPUTS = 1, 1 << 20  # of the layers with the most and with the fewest slices
BITS: dict[Quantization | None, float] = {None: 16, "int8": 8, "int4": 4.5}
COMPILERS = 12  # processes
Product = OneGemmLinear | GroupLinear


@dataclass(frozen=True, slots=True)
class Case:
    """One matrix of a layer, the format of its weights, and the number of rows that are multiplied with it."""

    matrix: str
    shape: tuple[int, int]
    quantize: Quantization | None
    rows: int

    @property
    def tiles(self) -> Sequence[Tile | GroupTile]:
        """The tiles that could compute the product, without those of more rows than the product has."""
        if self.quantize is None:
            tiles: Sequence[Tile | GroupTile] = TILES
        else:
            tiles = [*group_tiles(FEW_OUTPUTS, False), *group_tiles(MANY_OUTPUTS, False, self.quantize == "int8")]
        return [tile for tile in tiles if tile.rows <= self.rows]

    @property
    def chosen(self) -> Tile | GroupTile:
        """The tile that the fixed rule chooses."""
        outputs = self.shape[0]
        return (
            tile_for(self.rows, outputs)
            if self.quantize is None
            else group_tile_for(group_tiles(outputs, False, self.quantize == "int8"), self.rows)
        )

    def layers(self, setting: Setting, count: int) -> list[Product]:
        """`count` layers of this shape with random weights."""
        noise = torch.Generator(setting.device).manual_seed(0)
        form = WeightFormat("", one_gemm=self.quantize is None, quantize=self.quantize)
        backend, made = GpuBackend(setting.placement(form, products=True)), []
        for _ in range(count):
            weight = torch.randn(*self.shape, generator=noise, device=setting.device, dtype=torch.bfloat16)
            made.append(backend.linear(weight, None, self.quantize))
        return made  # type: ignore[return-value]

    def inputs(self, setting: Setting) -> torch.Tensor:
        """A random matrix of `rows` inputs."""
        noise = torch.Generator(setting.device).manual_seed(1)
        return torch.randn(self.rows, self.shape[1], generator=noise, device=setting.device, dtype=torch.bfloat16)


def cases(setting: Setting) -> Iterator[Case]:
    """Every matrix of a layer in every format, with each number of rows."""
    layer = [(name, shape) for name, shape in matrices(config_of(setting)).items() if name != "head"]
    for quantize in BITS:
        for name, shape in layer[: 1 if setting.dry else None]:
            yield from (Case(name, shape, quantize, rows) for rows in (ROWS[:1] if setting.dry else ROWS))


def every_tile(setting: Setting) -> None:
    """Measure all tiles of all cases."""
    if not setting.dry:
        compile_all(setting)
    for (shape, quantize), alike in groupby(cases(setting), key=lambda case: (case.shape, case.quantize)):
        copies = 1 if setting.dry else copies_of(BITS[quantize] / 8 * shape[0] * shape[1])
        layers: list[Product] = []
        for case in alike:
            layers = layers or case.layers(setting, copies)
            measure(setting, case, layers)


def measure(setting: Setting, case: Case, layers: Sequence[Product]) -> None:
    """Measure all tiles of one case; results of tiles with equally many slices must equal that of the first."""
    x, first = case.inputs(setting), dict[int, torch.Tensor]()
    for tile in case.tiles:
        product = layers[0].product(x, tile)  # type: ignore[arg-type]
        same = torch.equal(product, first.setdefault(getattr(tile, "slices", 1), product))
        bodies = [partial(layer.product, x, tile) for layer in layers]  # type: ignore[arg-type]
        bodies *= 1 if setting.dry else -(-FEWEST_LAUNCHES // len(layers))
        setting.add("tiles", format=case.quantize or "one_gemm", matrix=case.matrix, rows=case.rows,
                    tile=" ".join(map(str, astuple(tile))), us=kernel_us(bodies, setting.device, RUNS),
                    same=same, chosen=tile == case.chosen)  # fmt: skip


def compile_all(setting: Setting) -> None:
    """Compile every kernel into Triton's cache, in child processes that each compile a part of them."""
    children = []
    for share in range(COMPILERS):
        child = os.fork()
        if child == 0:
            try:
                compile_share(setting, share)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def compile_share(setting: Setting, share: int) -> None:
    """Compile one child's tiles. A kernel depends on the inputs of a matrix, not on its outputs or rows."""
    tried = {(case.shape[1], case.quantize, tile): (case, tile) for case in cases(setting) for tile in case.tiles}
    for case, tile in [*tried.values()][share::COMPILERS]:
        case.layers(setting, 1)[0].product(case.inputs(setting), tile)  # type: ignore[arg-type]
    torch.cuda.synchronize(setting.device)
