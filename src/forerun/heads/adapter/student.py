"""Training an adapter for early exit: layers that read the target's states at an exit, under the target's head.

The network reads the states of the text, which are the same whether the target wrote it or a draft guessed it, so a
guess at any depth reads what its first guess would read there. Fresh layers add nothing to what they read: training
begins at the exit's own guesses. The result is a folder for `--draft early-exit:E:DIR`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest
from forerun.fields import Fields
from forerun.heads.layer_stack import (
    EMBEDDING,
    HALF,
    HEAD,
    NORM,
    WRITERS,
    LayerStack,
    fresh_weights,
    save_weights,
    trainable,
)
from forerun.heads.student import Predictions, Student, StudentSizes, TextBatch
from forerun.models.config import ModelConfig, config_of
from forerun.models.loading import Blueprint


@dataclass(frozen=True)
class AdapterStudent:
    """An adapter in training, for the exit before layer `exit_layer`. `head` is the target's, and stays as it is."""

    exit_layer: int
    values: Mapping[str, Any]
    config: ModelConfig
    weights: dict[str, Tensor]
    head: Float[Tensor, "vocab hidden"]
    depth_weights: tuple[float, ...] = (1.0,)
    most_depth: int | None = None
    vocabulary: Int[Tensor, " ids"] | None = None
    stack: LayerStack = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", LayerStack.of(self.config, self.weights))

    @classmethod
    def fresh(
        cls, target: Blueprint, exit_layer: int | None, layers: int, mlp: int | None, seed: int
    ) -> AdapterStudent:
        """An adapter of so many layers, shaped like the target's, that adds nothing yet. Raises InvalidRequest."""
        of, device = target.config, target.placement.device
        exit_layer = exit_layer or max(1, of.layers // 4)
        if not 1 <= exit_layer < of.layers:
            raise InvalidRequest(
                "exit", f"{exit_layer} must be from 1 to {of.layers - 1}: {target.name} has {of.layers} layers."
            )
        values = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "exit_layer": exit_layer,
            "hidden_size": of.hidden,
            "intermediate_size": of.intermediate if mlp is None else mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": of.heads,
            "num_key_value_heads": of.kv_heads,
            "head_dim": of.head_dim,
            "max_position_embeddings": of.max_positions,
            "rms_norm_eps": of.norm_eps,
            "rope_theta": of.rope.theta,
            "dtype": "bfloat16" if of.dtype in HALF else "float32",
        }
        place = Path("the adapter's config.json")
        config = config_of(Fields(place, values | {"vocab_size": 1, "tie_word_embeddings": True}))
        checkpoint = target.checkpoint(torch.float32)
        weights = fresh_weights(config, seed)
        del weights[EMBEDDING]
        weights = {name: tensor * (not name.endswith(WRITERS)) for name, tensor in weights.items()}
        weights[NORM] = checkpoint.take(NORM, (of.hidden,))
        head = checkpoint.take(EMBEDDING if of.tied else HEAD, (of.vocab_size, of.hidden)).to(device)
        return cls(exit_layer, values, config, trainable(weights, device), head)

    @property
    def taps(self) -> tuple[int, ...]:
        """The states that enter the layer behind the exit."""
        return (self.exit_layer,)

    @property
    def about(self) -> Mapping[str, Any]:
        """Its configuration, which says for which exit it is."""
        return {"kind": "early-exit", "config": dict(self.values)}

    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        """What its first layer reads: the target's states at the exit."""
        return batch.taps[:, :, 0].float()

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        """Its law behind every root."""
        x = self.stack(self.inputs(batch))
        logits = functional.linear(self.stack.normed(x[:, batch.first_root :], NORM), self.head)
        return Predictions([logits], batch.roots)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """The layers and their norm; embedding and head are the target's."""
        save_weights(weights, self.config.dtype, folder)
        (folder / "config.json").write_text(json.dumps(dict(self.values), indent=2) + "\n", "utf-8")

    def spec(self, folder: Path) -> str:
        """`early-exit:E:DIR`."""
        return str(DraftSpec("early-exit", argument=f"{self.exit_layer}:{folder}"))


def make_adapter(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """An adapter for an exit."""
    sizes.only("early-exit", "exit", "layers", "mlp")
    return AdapterStudent.fresh(target, sizes.exit, sizes.layers or 1, sizes.mlp, seed)
