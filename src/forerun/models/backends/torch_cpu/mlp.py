"""The MLPs of a layer by torch's operators: dense ones, and experts, of which a router chooses some for each token.

This file decides the arithmetic and its order, so that a row's bits are its own in any company: each expert multiplies
its rows in one go, in a layer whose rows do not affect each other, and a token adds up what its experts gave in the
order of its choice, whoever else chose them.
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

SERIAL_ELEMENTS = 32_767  # torch splits larger functions over threads, at any element


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each token, by descending weight, their weights, and the gate of the shared expert."""

    experts: Int[Tensor, "tokens active"]
    weights: Float[Tensor, "tokens active"]
    dense_gate: Float[Tensor, "tokens 1"] | None


def run_mlp(mlp: Mlp, x: Float[Tensor, "rows hidden"], num_tokens: int) -> tuple[Float[Tensor, "rows hidden"], int]:
    """What is added to normed rows, of which the first are tokens; and how many experts were read."""
    if mlp.router is None:
        assert mlp.dense is not None, "a layer without a router has a dense MLP"
        return run_gated(mlp.dense, x), 0
    routes = choose_experts(mlp.router, x, num_tokens)
    outputs, num_read = run_experts(mlp.experts, x, routes.experts)
    total = outputs[:, 0].float() * routes.weights[:, :1]
    for rank in range(1, mlp.router.active):
        total = total + outputs[:, rank].float() * routes.weights[:, rank : rank + 1]
    if mlp.dense is not None and routes.dense_gate is not None:
        total = total + run_gated(mlp.dense, x)[:num_tokens].float() * routes.dense_gate
    return pad_rows(total.to(x.dtype), len(x)), num_read


def run_gated(mlp: GatedMlp, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
    """Rows in a number that `padded_rows` gives."""
    activation = gelu if mlp.gelu else functional.silu
    if mlp.plain:
        return mlp.down(by_rows(activation, mlp.gate_up(x)))
    gate, up = mlp.gate_up(x).chunk(2, dim=1)
    if mlp.clamp is None:
        return mlp.down(by_rows(activation, gate) * up)
    gate = gate.clamp(max=mlp.clamp.limit)
    turned = gate * by_rows(torch.sigmoid, gate * mlp.clamp.alpha)
    return mlp.down(turned * (up.clamp(-mlp.clamp.limit, mlp.clamp.limit) + 1))


def soft_capped(x: Float[Tensor, "rows width"], limit: float) -> Float[Tensor, "rows width"]:
    """Numbers of float32, softly bounded. Gemma 2, 2408.00118, section 2."""
    lanes = in_lanes(x / limit, 0.0)
    return by_rows(torch.tanh, lanes.view(-1, LANES)).view(lanes.shape)[:, : x.shape[1]] * limit


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), Phi by a tanh. Hendrycks and Gimpel 1606.08415, section 2."""
    return functional.gelu(x, approximate="tanh")


def choose_experts(router: Router, x: Float[Tensor, "rows hidden"], num_tokens: int) -> Routes:
    """The routes of the first rows; in float32."""
    return routes_of(router, router.linear(x)[:num_tokens].float())


def routes_of(router: Router, logits: Float[Tensor, "tokens outputs"]) -> Routes:
    """The routes by what the router's layer gave, in float32."""
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
    """What each token's experts give, each expert's rows multiplied in one go; and how many experts have rows."""
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
    """The rows, as wide as vector code wants them."""
    return functional.pad(x, (0, -x.shape[1] % LANES), value=value)


def sum_columns(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows 1"]:
    """Each row's sum, added up in the order of the columns."""
    total = x[:, :1]
    for column in range(1, x.shape[1]):
        total = total + x[:, column : column + 1]
    return total


def by_rows(function: Callable[[Tensor], Tensor], x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """An elementwise function whose bits are a row's own; the width is a multiple of LANES.

    Torch's vector code and its scalar tail round exp differently. Whole vectors per row and blocks too small to be
    split over threads keep every element in vector code (measured: at width 172, 4 % of elements differ otherwise). A
    GPU has no such tails.
    """
    rows, width = x.shape
    block = max(1, SERIAL_ELEMENTS // width)
    if rows <= block or not is_cpu(x.device):
        return function(x)
    return torch.cat([function(part) for part in x.split(block)])
