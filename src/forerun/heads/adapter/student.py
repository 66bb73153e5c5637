"""Training an adapter for early exit: layers that read the target's states at an exit, under the target's head.

The network reads the states of the text, which are the same whether the target wrote it or a draft guessed it, so a
guess at any depth reads what its first guess would read there. Fresh layers add nothing to what they read: training
begins at the exit's own guesses. The result is a folder for `--draft early-exit:E:DIR`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest
from forerun.fields import Fields
from forerun.heads.adapter.format import EXIT
from forerun.heads.fresh import (
    EMBEDDING,
    NORM,
    WRITERS,
    TargetTables,
    WrittenStudent,
    fresh_weights,
    layer_values,
    stored_dtype,
    trainable,
)
from forerun.heads.student import Predictions, Student, StudentSizes, TextBatch
from forerun.heads.trained_layer import LayerStack
from forerun.models.config import ModelConfig, config_of
from forerun.models.loading import Blueprint


@dataclass(frozen=True)
class AdapterStudent(WrittenStudent):
    """An adapter in training, for the exit before layer `exit_layer`. `head` is the target's, and stays as it is."""

    kind: ClassVar[str] = "early-exit"
    exit_layer: int
    values: Mapping[str, Any]
    dtype: torch.dtype
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
        of = target.config
        exit_layer = exit_layer or max(1, of.layers // 4)
        if not 1 <= exit_layer < of.layers:
            raise InvalidRequest(
                "exit", f"{exit_layer} must be from 1 to {of.layers - 1}: {target.name} has {of.layers} layers."
            )
        values = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            EXIT: exit_layer,
            **layer_values(target, layers, mlp),
        }
        place = Path("the adapter's config.json")
        config = config_of(Fields(place, values | {"vocab_size": 1, "tie_word_embeddings": True}))
        weights, tables = fresh_weights(config, seed), TargetTables.of(target)
        del weights[EMBEDDING]
        weights = {name: tensor * (not name.endswith(WRITERS)) for name, tensor in weights.items()}
        weights[NORM] = tables.norm
        weights = trainable(weights, target.placement.device)
        return cls(exit_layer, values, stored_dtype(target), config, weights, tables.head)

    @property
    def taps(self) -> tuple[int, ...]:
        """The states that enter the layer behind the exit."""
        return (self.exit_layer,)

    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        """What its first layer reads: the target's states at the exit."""
        return batch.taps[:, :, 0].float()

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        """Its law behind every root."""
        x = self.stack(self.inputs(batch))
        logits = functional.linear(self.stack.normed(x[:, batch.first_root :], NORM), self.head)
        return Predictions([logits], batch.roots)

    def spec(self, folder: Path) -> str:
        """`early-exit:E:DIR`."""
        return str(DraftSpec(self.kind, argument=f"{self.exit_layer}:{folder}"))


def make_adapter(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """An adapter for an exit."""
    sizes.only("early-exit", "exit", "layers", "mlp")
    return AdapterStudent.fresh(target, sizes.exit, sizes.layers or 1, sizes.mlp, seed)
