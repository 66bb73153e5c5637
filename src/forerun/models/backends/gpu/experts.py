"""Experts in passes of fixed shape: how the kernels of triton_experts.py follow one another.

One launch multiplies all experts' rows, however many experts were chosen and by whom, so a captured pass serves every
choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.device import stages
from forerun.models.backends.gpu.tiles import FEW_ROWS, NARROW, SMALLEST, SOME_ROWS, Tile
from forerun.models.layer import Bias, GatedMlp, Linear, Mlp, Router, StackedExperts, WeightMatrix
from forerun.models.rows import power_of_two

SORTED = 8192  # comparisons of a step of the sort
ADDED = 1024  # numbers that a program adds up
MANY_ROWS = 48  # of an expert, on average, from which on larger tiles pay
BY_ROWS = {tile.rows: tile for tile in (FEW_ROWS, SOME_ROWS, NARROW)}


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of rows and experts that they chose, sorted by experts, and what tiles of products they make."""

    order: Int[Tensor, " pairs"]
    table: Int[Tensor, " numbers"]
    lanes: int
    num_tiles: int
    tile: Tile


@dataclass(frozen=True, slots=True)
class LibraryLinear:
    """The library's product in the format of the weight, whose last bits depend on the number of rows."""

    weight: WeightMatrix
    bias: Bias | None = None

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One linear layer of every expert: weights and biases, an expert's after another's."""

    weight: Float[Tensor, "experts outputs inputs"]
    bias: Float[Tensor, "experts outputs"] | None

    def of(self, expert: int) -> Linear:
        return LibraryLinear(self.weight[expert], None if self.bias is None else self.bias[expert])

    def tile_rows(self, average: float) -> int:
        return (NARROW if average >= MANY_ROWS else FEW_ROWS).rows

    def product(
        self, kernels: Any, x: Float[Tensor, "_ inputs"], pairs: Pairs, sharing: int
    ) -> Float[Tensor, "pairs outputs"]:
        """A sum is one chain over the inputs."""
        _, outputs, inputs = self.weight.shape
        tile, out = pairs.tile, x.new_empty(len(pairs.order), outputs)
        kernels.expert_gemm[pairs.num_tiles, -(-outputs // tile.outputs)](
            x, self.weight, self.weight if self.bias is None else self.bias, out, pairs.order, pairs.table, outputs,
            WIDTH=inputs, LANES=pairs.lanes, SHARING=sharing, BIASED=self.bias is not None, ROWS=tile.rows,
            OUTPUTS=tile.outputs, INPUTS=tile.inputs, num_warps=tile.warps, num_stages=stages(tile.stages),
            **kernels.OPTIONS,
        )  # fmt: skip
        return out


def run_experts(
    kernels: Any,
    x: Float[Tensor, "rows hidden"],
    logits: Float[Tensor, "rows count"],
    positions: Int[Tensor, " rows"],
    mlp: Mlp,
    every: Float[Tensor, "rows hidden"] | None,
    activate: Callable[[Tensor, GatedMlp], Tensor],
) -> Float[Tensor, "rows hidden"]:
    """What rows' experts add, and `every` by its gate beside them; rows without a position choose none."""
    assert mlp.router is not None, "what chooses experts"
    assert mlp.stacked is not None, "GPUs multiply experts as one"
    router, stacked, (rows, hidden) = mlp.router, mlp.stacked, x.shape
    shape = (rows, router.active)
    chosen, weights = x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)
    gates, gated = x.new_empty(rows, dtype=torch.float32), every is not None
    kernels.choose_experts[(rows,)](
        logits, positions, chosen, weights, gates, COUNT=router.count, LANES=power_of_two(router.count),
        ACTIVE=router.active, RANKS=power_of_two(router.active), NORMALISED=router.normalised, GATED=gated,
        num_warps=1, **kernels.OPTIONS,
    )  # fmt: skip
    pairs = sorted_pairs(kernels, chosen, router, stacked)
    inner = activate(stacked.gate_up.product(kernels, x, pairs, router.active), stacked.form)
    outputs = stacked.down.product(kernels, inner, pairs, 1)
    out = torch.empty_like(x)
    kernels.add_experts[rows, -(-hidden // ADDED)](
        outputs, chosen, weights, x if every is None else every, gates, out, WIDTH=hidden, COUNT=router.count,
        ACTIVE=router.active, GATED=gated, BLOCK=ADDED, **kernels.OPTIONS,
    )  # fmt: skip
    return out


def sorted_pairs(kernels: Any, chosen: Int[Tensor, "rows active"], router: Router, stacked: StackedExperts) -> Pairs:
    """The pairs by their experts: as many tiles as there can be, whoever was chosen."""
    num_pairs, count, lanes = chosen.numel(), router.count, power_of_two(router.count)
    tile = BY_ROWS[stacked.gate_up.tile_rows(num_pairs / count)] if stacked.tiled else SMALLEST
    order, table = chosen.new_empty(num_pairs), chosen.new_empty(3 * lanes)
    num_read, counted = (table, False) if stacked.num_read is None else (stacked.num_read, True)
    kernels.sort_by_expert[(1,)](
        chosen, order, table, num_read, num_pairs, COUNT=count, LANES=lanes,
        BLOCK=max(16, min(128, SORTED // lanes)), ROWS=tile.rows, COUNTED=counted, num_warps=8, **kernels.OPTIONS,
    )  # fmt: skip
    return Pairs(order, table, lanes, num_pairs // tile.rows + min(count, num_pairs), tile)
