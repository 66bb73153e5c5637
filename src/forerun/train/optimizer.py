"""The optimizers: Muon for the matrices of layers, AdamW for embeddings, norms and biases.

Gradients are clipped to norm 1. torch's Muon multiplies in bfloat16, which is dozens of times slower than float32 on
processors without bfloat16 instructions: there `Float32Muon` is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.models.choice import has_bfloat16_linears

MUON_RATE = 20 / 3  # times AdamW's
TABLES = ("embed", "lm_head", "markov_w", "codebook")  # matrices with a row per token


class Float32Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al., 2024), with the same options and state, that multiplies in float32."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update the weights that have gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                mean = state.setdefault("momentum_buffer", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                direction = weight.grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean
                update = orthogonal(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, len(weight) / weight.shape[1])))


def orthogonal(
    matrix: Float[Tensor, "rows columns"], coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Float[Tensor, "rows columns"]:
    """A matrix with the same singular vectors and all singular values near 1, by Newton-Schulz iterations."""
    a, b, c = coefficients
    wide = matrix.T if len(matrix) > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(num_steps):
        square = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide.T if len(matrix) > matrix.shape[1] else wide


def build_optimizers(
    weights: Mapping[str, Tensor], rate: float, muon_rate: float | None = None
) -> list[torch.optim.Optimizer]:
    """Muon and AdamW with these full learning rates; only one if the other would have no weights."""
    muon_rate = MUON_RATE * rate if muon_rate is None else muon_rate
    matrices = [t for name, t in weights.items() if t.dim() == 2 and not any(table in name for table in TABLES)]
    chosen = set(map(id, matrices))
    others = [tensor for tensor in weights.values() if id(tensor) not in chosen]
    built: list[torch.optim.Optimizer] = []
    if matrices:
        on_host = matrices[0].device.type == "cpu"
        muon = Float32Muon if on_host and not has_bfloat16_linears() else torch.optim.Muon
        built.append(muon(matrices, lr=muon_rate, momentum=0.95, weight_decay=0.01))
    if others:
        built.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
    for optimizer in built:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return built


def step_optimizers(weights: Iterable[Tensor], optimizers: Sequence[torch.optim.Optimizer], share: float) -> None:
    """Update the weights at this share of the full learning rates, and clear the gradients."""
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["full_rate"] * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
