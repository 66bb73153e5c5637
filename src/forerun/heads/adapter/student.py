"""Training an adapter for early exit: layers that read the target's states at an exit, with the target's head.

The states at the exit are the same for text and for draft tokens. Untrained layers add nothing to their input, so
training starts from the predictions of the exit alone. The result is a folder for `--draft early-exit:E:DIR`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from forerun.annotations import Float
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest
from forerun.fields import Fields
from forerun.heads.adapter.format import EXIT
from forerun.heads.fresh import TargetHead, TargetTables, drawn_weights, layer_values
from forerun.heads.sizes import StudentSizes
from forerun.heads.student import TextBatch
from forerun.heads.trained_layer import StackStudent
from forerun.models.config import config_of
from forerun.models.loading import Blueprint
from forerun.models.projections import ADDING, EMBEDDING, FINAL_NORM, tensor_shapes


@dataclass(frozen=True, kw_only=True)
class AdapterStudent(StackStudent):
    """An adapter in training, with a tap at its exit. `head` is the target's, which is not trained."""

    kind: ClassVar[str] = "early-exit"
    head: TargetHead

    @classmethod
    def fresh(cls, target: Blueprint, sizes: StudentSizes, seed: int) -> AdapterStudent:
        """An untrained adapter, whose layers have the target's shapes. Raises InvalidRequest for an invalid exit."""
        sizes.only(cls.kind, "exit", "layers", "mlp")
        num_layers = target.config.layers
        exit_layer = sizes.exit or max(1, num_layers // 4)
        if not 1 <= exit_layer < num_layers:
            raise InvalidRequest(
                "exit", f"{exit_layer} must be from 1 to {num_layers - 1}: {target.name} has {num_layers} layers."
            )
        values = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            EXIT: exit_layer,
            **layer_values(target, sizes.layers or 1, sizes.mlp),
        }
        place = Path("the adapter's config.json")
        config = config_of(Fields(place, values | {"vocab_size": 1, "tie_word_embeddings": True}))
        weights, tables = drawn_weights(tensor_shapes(config), seed, config.layers), TargetTables.of(target)
        del weights[EMBEDDING]
        weights = {name: tensor * (not name.endswith(ADDING)) for name, tensor in weights.items()}
        weights[FINAL_NORM] = tables.norm
        return cls.untrained(target, values, weights, config=config, head=tables.head, taps=(exit_layer,))

    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        """The target's states at the exit."""
        return batch.taps[:, :, 0].float()

    def logits(self, states: Float[Tensor, "batch places hidden"]) -> Float[Tensor, "batch places vocab"]:
        return self.head(states)

    def spec(self, folder: Path) -> str:
        return str(DraftSpec(self.kind, argument=f"{self.taps[0]}:{folder}"))
