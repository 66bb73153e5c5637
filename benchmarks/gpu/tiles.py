"""Every tile of a product, whether a rule chooses it or not: microseconds, and whether all have the same bits.

Kernels are compiled by several processes first, each of which would take seconds.
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
FEW_OUTPUTS, MANY_OUTPUTS = 1, 1 << 20  # of layers with most slices, and with fewest
BITS: dict[Quantization | None, float] = {None: 16, "int8": 8, "int4": 4.5}
COMPILERS = 12  # processes
Product = OneGemmLinear | GroupLinear


@dataclass(frozen=True, slots=True)
class Case:
    """One matrix of a layer, its weights' format, and the rows that it is multiplied with."""

    matrix: str
    shape: tuple[int, int]
    quantize: Quantization | None
    rows: int

    @property
    def tiles(self) -> Sequence[Tile | GroupTile]:
        """What could compute it: no tile that is mostly padding."""
        if self.quantize is None:
            found: Sequence[Tile | GroupTile] = TILES
        else:
            found = [*group_tiles(FEW_OUTPUTS, False), *group_tiles(MANY_OUTPUTS, False, self.quantize == "int8")]
        return [tile for tile in found if tile.rows <= self.rows]

    @property
    def chosen(self) -> Tile | GroupTile:
        """What does compute it."""
        outputs = self.shape[0]
        return (
            tile_for(self.rows, outputs)
            if self.quantize is None
            else group_tile_for(group_tiles(outputs, False, self.quantize == "int8"), self.rows)
        )

    def layers(self, setting: Setting, count: int) -> list[Product]:
        """The layer, several times."""
        noise = torch.Generator(setting.device).manual_seed(0)
        form = WeightFormat("", one_gemm=self.quantize is None, quantize=self.quantize)
        backend, made = GpuBackend(setting.placement(form, products=True)), []
        for _ in range(count):
            weight = torch.randn(*self.shape, generator=noise, device=setting.device, dtype=torch.bfloat16)
            made.append(backend.linear(weight, None, self.quantize))
        return made  # type: ignore[return-value]

    def inputs(self, setting: Setting) -> torch.Tensor:
        """Rows of random numbers."""
        noise = torch.Generator(setting.device).manual_seed(1)
        return torch.randn(self.rows, self.shape[1], generator=noise, device=setting.device, dtype=torch.bfloat16)


def cases(setting: Setting) -> Iterator[Case]:
    """The matrices of a layer in every format, by rows."""
    layer = [(name, shape) for name, shape in matrices(config_of(setting)).items() if name != "head"]
    for quantize in BITS:
        for name, shape in layer[: 1 if setting.dry else None]:
            yield from (Case(name, shape, quantize, rows) for rows in (ROWS[:1] if setting.dry else ROWS))


def every_tile(setting: Setting) -> None:
    """All tiles of all cases."""
    if not setting.dry:
        compile_all(setting)
    for (shape, quantize), alike in groupby(cases(setting), key=lambda case: (case.shape, case.quantize)):
        copies = 1 if setting.dry else copies_of(BITS[quantize] / 8 * shape[0] * shape[1])
        layers: list[Product] = []
        for case in alike:
            layers = layers or case.layers(setting, copies)
            measure(setting, case, layers)


def measure(setting: Setting, case: Case, layers: Sequence[Product]) -> None:
    """All tiles of one case; the first of those with equal slices says what the bits are."""
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
    """Every kernel into Triton's cache, by children that each use the GPU for a part of them."""
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
    """One child's tiles: a kernel depends on a matrix' inputs, not on its outputs or its rows."""
    tried = {(case.shape[1], case.quantize, tile): (case, tile) for case in cases(setting) for tile in case.tiles}
    for case, tile in [*tried.values()][share::COMPILERS]:
        case.layers(setting, 1)[0].product(case.inputs(setting), tile)  # type: ignore[arg-type]
    torch.cuda.synchronize(setting.device)
