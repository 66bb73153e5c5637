"""The MLPs of a layer by torch's operators: dense ones and mixtures of experts.

The bits of a row do not depend on other rows: each expert multiplies its rows in one call of a batch-invariant linear
layer, and a token sums the outputs of its experts in the order of its own ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.device import is_cpu
from forerun.models.layer import LANES, GatedMlp, Mlp, Router
from forerun.models.rows import pad_rows, padded_rows

SERIAL_ELEMENTS = 32_767  # torch splits elementwise functions of more elements over threads, at any element


@dataclass(frozen=True, slots=True)
class Routes:
    """Each token's experts, by descending weight, their weights, and the weight of the shared expert (or None)."""

    experts: Int[Tensor, "tokens active"]
    weights: Float[Tensor, "tokens active"]
    dense_gate: Float[Tensor, "tokens 1"] | None


def run_mlp(mlp: Mlp, x: Float[Tensor, "rows hidden"], num_tokens: int) -> tuple[Float[Tensor, "rows hidden"], int]:
    """The MLP's output for normed rows, of which the first `num_tokens` are tokens; and the number of experts read."""
    if mlp.router is None:
        assert mlp.dense is not None, "a layer without a router has a dense MLP"
        return run_gated(mlp.dense, x), 0
    routes = routes_of(mlp.router, mlp.router.linear(x)[:num_tokens].float())
    outputs, num_read = run_experts(mlp.experts, x, routes.experts)
    total = outputs[:, 0].float() * routes.weights[:, :1]
    for rank in range(1, mlp.router.active):
        total = total + outputs[:, rank].float() * routes.weights[:, rank : rank + 1]
    if mlp.dense is not None and routes.dense_gate is not None:
        total = total + run_gated(mlp.dense, x)[:num_tokens].float() * routes.dense_gate
    return pad_rows(total.to(x.dtype), len(x)), num_read


def run_gated(mlp: GatedMlp, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
    """The output of one MLP; the number of rows must be a result of `padded_rows`."""
    activation = gelu if mlp.gelu else functional.silu
    if mlp.plain:
        return mlp.down(by_rows(activation, mlp.gate_up(x)))
    gate, up = mlp.gate_up(x).chunk(2, dim=1)
    if mlp.clamp is None:
        return mlp.down(by_rows(activation, gate) * up)
    gate = gate.clamp(max=mlp.clamp.limit)
    activated = gate * by_rows(torch.sigmoid, gate * mlp.clamp.alpha)
    return mlp.down(activated * (up.clamp(-mlp.clamp.limit, mlp.clamp.limit) + 1))


def soft_capped(x: Float[Tensor, "rows width"], limit: float) -> Float[Tensor, "rows width"]:
    """`limit * tanh(x / limit)` of float32 numbers. Gemma 2, 2408.00118, section 2."""
    lanes = in_lanes(x / limit, 0.0)
    return by_rows(torch.tanh, lanes.view(-1, LANES)).view(lanes.shape)[:, : x.shape[1]] * limit


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), with Phi approximated by a tanh. Hendrycks and Gimpel 1606.08415, section 2."""
    return functional.gelu(x, approximate="tanh")


def routes_of(router: Router, logits: Float[Tensor, "tokens outputs"]) -> Routes:
    """The routes for these outputs of the router's layer, computed in float32."""
    ranked = logits[:, : router.count].sort(dim=1, descending=True, stable=True)
    powers = by_rows(torch.exp, in_lanes(ranked.values - ranked.values[:, :1], -torch.inf))
    chosen = powers[:, : router.active]
    total = sum_columns(chosen if router.normalised else powers[:, : router.count])
    gate = logits[:, router.count :]
    dense_gate = by_rows(torch.sigmoid, in_lanes(gate, 0.0))[:, :1] if gate.shape[1] else None
    return Routes(ranked.indices[:, : router.active], chosen / total, dense_gate)


def run_experts(
    experts: Sequence[GatedMlp], x: Float[Tensor, "rows hidden"], chosen: Int[Tensor, "tokens active"]
) -> tuple[Float[Tensor, "tokens active hidden"], int]:
    """The outputs of each token's experts, computed expert by expert; and the number of experts that were read."""
    active = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()
    outputs = x.new_empty(len(order), x.shape[1])
    for expert, places in zip(experts, order.split(counts), strict=True):
        if len(places):
            rows = pad_rows(x[places // active], padded_rows(len(places)))
            outputs[places] = run_gated(expert, rows)[: len(places)]
    return outputs.view(-1, active, x.shape[1]), sum(count > 0 for count in counts)


def in_lanes(x: Float[Tensor, "rows width"], value: float) -> Float[Tensor, "rows padded"]:
    """The rows with columns of `value` appended, up to a multiple of LANES."""
    return functional.pad(x, (0, -x.shape[1] % LANES), value=value)


def sum_columns(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows 1"]:
    """Each row's sum, in the order of the columns."""
    total = x[:, :1]
    for column in range(1, x.shape[1]):
        total = total + x[:, column : column + 1]
    return total


def by_rows(function: Callable[[Tensor], Tensor], x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """Apply an elementwise function such that the bits of a row depend on that row alone; the width must be a multiple
    of LANES.

    torch's vector code and its scalar tail round exp differently: 4 % of elements differ at width 172. With entire
    vectors in each row, and in blocks too small to be split over threads, all elements are in vector code. A GPU has no
    such tails.
    """
    rows, width = x.shape
    block = max(1, SERIAL_ELEMENTS // width)
    if rows <= block or not is_cpu(x.device):
        return function(x)
    return torch.cat([function(part) for part in x.split(block)])
