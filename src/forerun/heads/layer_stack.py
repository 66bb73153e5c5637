"""Decoder layers with gradients: the arithmetic of `models/decoder.py` over whole texts at once.

This file decides how layers are computed while they are trained, and what fresh ones begin with. Weights are a mapping
from the names that the checkpoint will have to tensors, so what is trained is what is written. Norms and rotations are
the decoder's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Bool, Float
from forerun.errors import UnsupportedModel
from forerun.models.config import ModelConfig
from forerun.models.decoder import rms_norm, rotate
from forerun.models.projections import promised_tensors
from forerun.models.rope import RopeTables, rope_tables

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
HALF = (torch.float16, torch.bfloat16)
SPREAD = 0.02  # standard deviation of fresh weights
WRITERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # what adds to the residual stream


@dataclass(frozen=True, slots=True)
class LayerStack:
    """The dense layers of a configuration over `weights`, whose names are those of a checkpoint."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    rope: RopeTables

    @classmethod
    def of(cls, config: ModelConfig, weights: Mapping[str, Tensor]) -> LayerStack:
        """The layers, with tables of angles on the weights' device. Raises UnsupportedModel for experts and sinks."""
        if config.experts or config.sinks:
            raise UnsupportedModel(
                f"a {config.family} with experts or attention sinks cannot be trained: choose a dense checkpoint"
            )
        device = next(iter(weights.values())).device
        return cls(config, weights, rope_tables(config).to(device))

    def __call__(self, x: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch length hidden"]:
        """The residual stream behind the last layer; the first place of a text is position 0."""
        length = x.shape[1]
        rotation = self.rope.cos[:length], self.rope.sin[:length]
        masks = {window: mask_of(window, length, x.device) for window in set(self.config.windows)}
        for layer in range(self.config.layers):
            x = x + self.attention(layer, x, rotation, masks[self.config.windows[layer]])
            x = x + self.mlp(layer, x)
        return x

    def normed(self, x: Float[Tensor, "batch length hidden"], name: str) -> Float[Tensor, "batch length hidden"]:
        """Behind the norm whose gain has this name."""
        return rms_norm(x, self.weights[name], self.config.norm_eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Through a projection, with its bias if it has one."""
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def attention(
        self,
        layer: int,
        x: Float[Tensor, "batch length hidden"],
        rotation: tuple[Tensor, Tensor],
        mask: Bool[Tensor, "length length"] | None,
    ) -> Float[Tensor, "batch length hidden"]:
        """What the layer's attention adds."""
        c, prefix = self.config, f"model.layers.{layer}"
        batch, length, _ = x.shape
        x = self.normed(x, f"{prefix}.input_layernorm.weight")
        q, k, v = (self.linear(x, f"{prefix}.self_attn.{name}_proj").unflatten(-1, (-1, c.head_dim)) for name in "qkv")
        if c.qk_norm:
            q = rms_norm(q, self.weights[f"{prefix}.self_attn.q_norm.weight"], c.norm_eps)
            k = rms_norm(k, self.weights[f"{prefix}.self_attn.k_norm.weight"], c.norm_eps)
        cos, sin = (table.repeat(batch, 1)[:, None] for table in rotation)
        q, k = (rotate(t.flatten(0, 1), cos, sin).view(t.shape) for t in (q, k))
        k, v = (t.repeat_interleave(c.group, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.linear(mixed.transpose(1, 2).reshape(batch, length, -1), f"{prefix}.self_attn.o_proj")

    def mlp(self, layer: int, x: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch length hidden"]:
        """What the layer's MLP adds."""
        prefix = f"model.layers.{layer}"
        x = self.normed(x, f"{prefix}.post_attention_layernorm.weight")
        gate, up = (self.linear(x, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up"))
        return self.linear(functional.silu(gate) * up, f"{prefix}.mlp.down_proj")


def mask_of(window: int | None, length: int, device: torch.device) -> Bool[Tensor, "length length"] | None:
    """Which places see which; None where each sees all before it."""
    if window is None or window >= length:
        return None
    place = torch.arange(length, device=device)
    behind = place[:, None] - place
    return (behind >= 0) & (behind < window)


def fresh_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Weights to begin with, in float32: normal ones, smaller where many layers add up; gains of 1, biases of 0."""
    dice, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in promised_tensors(config):
        if len(shape) == 1:
            weights[name] = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
            continue
        spread = SPREAD / math.sqrt(2 * config.layers) if name.endswith(WRITERS) else SPREAD
        weights[name] = torch.randn(shape, generator=dice) * spread
    return weights


def trainable(weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of these on a device that gradients are kept for."""
    return {name: tensor.detach().clone().to(device).requires_grad_() for name, tensor in weights.items()}


def save_weights(weights: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> None:
    """Write model.safetensors, in this number format."""
    path = folder / "model.safetensors"
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()}
    save_file(stored, path, {"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it to its owner alone
