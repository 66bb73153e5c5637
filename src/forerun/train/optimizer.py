"""What moves the weights: Muon for the matrices of layers, AdamW for embeddings, gains and biases.

Each suits the shapes that it is given. Gradients are clipped to norm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MUON_RATE = 20 / 3  # times AdamW's
TABLES = ("embed", "lm_head", "markov_w", "codebook")  # matrices whose rows are tokens


def build_optimizers(
    weights: Mapping[str, Tensor], rate: float, muon_rate: float | None = None
) -> list[torch.optim.Optimizer]:
    """Both, at these full rates; one of them alone where the other would have nothing."""
    muon_rate = MUON_RATE * rate if muon_rate is None else muon_rate
    matrices = [t for name, t in weights.items() if t.dim() == 2 and not any(table in name for table in TABLES)]
    chosen = set(map(id, matrices))
    others = [tensor for tensor in weights.values() if id(tensor) not in chosen]
    built: list[torch.optim.Optimizer] = []
    if matrices:
        built.append(torch.optim.Muon(matrices, lr=muon_rate, momentum=0.95, weight_decay=0.01))
    if others:
        built.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
    for optimizer in built:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return built


def step_optimizers(weights: Iterable[Tensor], optimizers: Sequence[torch.optim.Optimizer], share: float) -> None:
    """One move at this share of the full rates; gradients are gone afterwards."""
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["full_rate"] * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def states_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """What they remember, for a checkpoint."""
    return [optimizer.state_dict() for optimizer in optimizers]


def restore(optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Have them remember what a checkpoint holds."""
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(dict(state))
