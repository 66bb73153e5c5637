"""Mixture of experts in passes of fixed shape: the sequence of the kernels in triton_experts.py.

One launch multiplies the rows of all experts, whatever the routing, so a captured pass serves every routing.
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

SORTED = 8192  # comparisons in a step of the sort
ADDED = 1024  # columns that one program of `add_experts` computes
MANY_ROWS = 48  # average rows of an expert from which larger tiles are faster
BY_ROWS = {tile.rows: tile for tile in (FEW_ROWS, SOME_ROWS, NARROW)}


@dataclass(frozen=True, slots=True)
class Pairs:
    """The (row, expert) pairs of the routing, sorted by expert, and their tiles.

    `table` has three rows of `lanes` numbers by expert; see `sort_by_expert`.
    """

    order: Int[Tensor, " pairs"]
    table: Int[Tensor, " numbers"]
    lanes: int
    num_tiles: int
    tile: Tile


@dataclass(frozen=True, slots=True)
class LibraryLinear:
    """A linear layer by the library, in the dtype of the weight; its last bits depend on the number of rows."""

    weight: WeightMatrix
    bias: Bias | None = None

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One linear layer of all experts: their weights and biases, stacked."""

    weight: Float[Tensor, "experts outputs inputs"]
    bias: Float[Tensor, "experts outputs"] | None

    def of(self, expert: int) -> Linear:
        return LibraryLinear(self.weight[expert], None if self.bias is None else self.bias[expert])

    def tile_rows(self, average: float) -> int:
        return (NARROW if average >= MANY_ROWS else FEW_ROWS).rows

    def product(
        self, kernels: Any, x: Float[Tensor, "_ inputs"], pairs: Pairs, sharing: int
    ) -> Float[Tensor, "pairs outputs"]:
        """The product of each pair's row with its expert's weights; `sharing` pairs read the same row of `x`."""
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
    dense: Float[Tensor, "rows hidden"] | None,
    activate: Callable[[Tensor, GatedMlp], Tensor],
) -> Float[Tensor, "rows hidden"]:
    """The weighted sum of each row's experts, plus `dense`, the shared expert's output, times its gate.

    Rows without a position (padding) are routed to no expert.
    """
    assert mlp.router is not None, "the layer needs a router"
    assert mlp.stacked is not None, "the experts must be stacked"
    router, stacked, (rows, hidden) = mlp.router, mlp.stacked, x.shape
    shape = (rows, router.active)
    chosen, weights = x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)
    gates, gated = x.new_empty(rows, dtype=torch.float32), dense is not None
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
        outputs, chosen, weights, x if dense is None else dense, gates, out, WIDTH=hidden, COUNT=router.count,
        ACTIVE=router.active, GATED=gated, BLOCK=ADDED, **kernels.OPTIONS,
    )  # fmt: skip
    return out


def sorted_pairs(kernels: Any, chosen: Int[Tensor, "rows active"], router: Router, stacked: StackedExperts) -> Pairs:
    """The pairs sorted by expert, with as many tiles as any routing can need."""
    num_pairs, count, lanes = chosen.numel(), router.count, power_of_two(router.count)
    tile = BY_ROWS[stacked.gate_up.tile_rows(num_pairs / count)] if stacked.tiled else SMALLEST
    order, table = chosen.new_empty(num_pairs), chosen.new_empty(3 * lanes)
    num_read, counted = (table, False) if stacked.num_read is None else (stacked.num_read, True)
    kernels.sort_by_expert[(1,)](
        chosen, order, table, num_read, num_pairs, COUNT=count, LANES=lanes,
        BLOCK=max(16, min(128, SORTED // lanes)), ROWS=tile.rows, COUNTED=counted, num_warps=8, **kernels.OPTIONS,
    )  # fmt: skip
    return Pairs(order, table, lanes, num_pairs // tile.rows + min(count, num_pairs), tile)
