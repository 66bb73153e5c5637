"""Initial weights of a drafter in training, the target's tables that it uses, and how it is saved.

Weights are float32 tensors by their names in the checkpoint. The target's embedding, head and norm are float32 too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.models.loading import Blueprint
from forerun.models.packing import centred, gains, shifted
from forerun.models.projections import ADDING, EMBEDDING, FINAL_NORM, FINAL_NORM_BIAS, HEAD, Shapes
from forerun.store import save_tensors

HALF = (torch.float16, torch.bfloat16)
SPREAD = 0.02  # standard deviation of fresh weights


@dataclass(frozen=True, slots=True)
class TargetHead:
    """The target's output layer: weights, and a bias and a soft cap of the logits if it has them."""

    weight: Float[Tensor, "ids hidden"]
    bias: Float[Tensor, " ids"] | None = None
    cap: float | None = None

    def __call__(self, states: Float[Tensor, "*places hidden"]) -> Float[Tensor, "*places ids"]:
        """The logits, with gradients."""
        logits = functional.linear(states, self.weight, self.bias)
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def __getitem__(self, ids: Int[Tensor, " some"] | slice) -> TargetHead:
        return TargetHead(self.weight[ids], None if self.bias is None else self.bias[ids], self.cap)


@dataclass(frozen=True, slots=True)
class TargetTables:
    """The target's embedding, final norm and output layer, on its device."""

    embedding: Float[Tensor, "vocab hidden"]
    head: TargetHead
    norm: Float[Tensor, " hidden"]
    scale: Float[Tensor, " hidden"] | None = None  # the norm's gains if it is a plain RMS norm, else None

    @classmethod
    def of(cls, target: Blueprint) -> TargetTables:
        c, device, checkpoint = target.config, target.placement.device, target.checkpoint(torch.float32)
        embedding = checkpoint.take(EMBEDDING, (c.vocab_size, c.hidden)).to(device)
        weight = embedding if c.tied else checkpoint.take(HEAD, (c.vocab_size, c.hidden)).to(device)
        bias = shifted(weight, None, checkpoint.take(FINAL_NORM_BIAS, (c.hidden,)).to(device)) if c.norm_bias else None
        norm = gains(checkpoint.take(FINAL_NORM, (c.hidden,)), c.gains_minus_one) * c.logits_scale
        embedding = embedding if c.embedding_scale == 1 else embedding * c.embedding_scale
        head = TargetHead(weight, bias, c.logits_cap)
        scale = None if c.norm_bias or c.layer_norm else norm.to(device)
        return cls(centred(embedding, 1) if c.layer_norm else embedding, head, norm.to(device), scale)


def stored_dtype(target: Blueprint) -> torch.dtype:
    """The dtype in which a trained drafter is stored: bfloat16 for a target stored in 16 bits, else float32."""
    return torch.bfloat16 if target.config.dtype in HALF else torch.float32


def layer_values(target: Blueprint, layers: int, mlp: int | None) -> dict[str, Any]:
    """The fields of config.json for `layers` layers with the target's shapes, or with `mlp` neurons per layer."""
    target_config = target.config
    return target_config.layer_fields() | {
        "intermediate_size": target_config.intermediate if mlp is None else mlp,
        "num_hidden_layers": layers,
        "max_position_embeddings": target_config.max_positions,
        "rope_theta": target_config.rope.theta,
        "dtype": str(stored_dtype(target)).removeprefix("torch."),
    }


def drawn_weights(shapes: Shapes, seed: int, num_layers: int | None = None) -> dict[str, Tensor]:
    """Initial weights in float32: normal, sampled in the order of `shapes`; gains are 1 and biases 0.

    With `num_layers`, matrices that add to the residual stream are scaled down by sqrt(2 num_layers).
    """
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
            continue
        spread = SPREAD / math.sqrt(2 * num_layers) if num_layers and name.endswith(ADDING) else SPREAD
        weights[name] = torch.randn(shape, generator=generator) * spread
    return weights


def trainable(weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of the weights on a device, with gradients."""
    return {name: tensor.detach().clone().to(device).requires_grad_() for name, tensor in weights.items()}


def save_weights(weights: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> None:
    """Write model.safetensors in this dtype; integer tensors keep their own."""
    stored = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in weights.items()
    }
    save_tensors(stored, folder / "model.safetensors")
