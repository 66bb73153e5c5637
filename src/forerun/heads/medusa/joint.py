"""Training Medusa heads together with their target, whose states become easier to guess from (Medusa-2, 2401.10774).

The target is tuned by low-rank adapters on its layers' projections, which are merged into the weights at the end. What
it was is its teacher: the loss of each place has the distance of the tuned law from the law that the target had when it
wrote the answers (the paper's self-distillation). The heads learn the tuned law, which is the one that will verify
their guesses. Embedding, norms and output matrix stay as they are. The result is a folder for `--draft medusa:DIR`, and
another one with the target that it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Int
from forerun.heads.fresh import EMBEDDING, HEAD, NORM, trainable
from forerun.heads.medusa.student import MedusaStudent
from forerun.heads.student import Predictions, Student, StudentSizes, TextBatch
from forerun.heads.trained_layer import LayerStack
from forerun.models.config import ModelConfig
from forerun.models.loading import Blueprint
from forerun.models.projections import promised_tensors

RANK = 16  # of the adapters
SCALE = 0.03  # of what they add: so much slower the target is tuned than the heads are trained
INTO, OUT_OF = "target.{}.into", "target.{}.out_of"  # an adapter's two matrices
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class JointMedusaStudent:
    """Heads and adapters in training. `fixed` are the target's weights, in float32, and stay as they are."""

    heads: MedusaStudent
    config: ModelConfig
    fixed: Mapping[str, Tensor]
    adapters: dict[str, Tensor]
    taps: tuple[int, ...] = ()
    vocabulary: Int[Tensor, " ids"] | None = None
    weights: dict[str, Tensor] = field(init=False)
    stack: LayerStack = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", {**self.heads.weights, **self.adapters})
        object.__setattr__(self, "stack", LayerStack.of(self.config, self.fixed))

    @classmethod
    def fresh(cls, target: Blueprint, heads: MedusaStudent, seed: int) -> JointMedusaStudent:
        """Heads with a target that is not tuned yet. Raises UnsupportedModel for one with experts or sinks."""
        of, checkpoint = target.config, target.checkpoint(torch.float32)
        device, dice = target.placement.device, torch.Generator().manual_seed(seed)
        fixed = {name: checkpoint.take(name, shape).to(device) for name, shape in promised_tensors(of)}
        adapters = {}
        for name, tensor in fixed.items():
            if name.removesuffix(".weight").endswith(PROJECTIONS):
                outputs, inputs = tensor.shape
                rank = min(RANK, outputs, inputs)
                adapters[INTO.format(name)] = torch.randn(rank, inputs, generator=dice) / inputs**0.5
                adapters[OUT_OF.format(name)] = torch.zeros(outputs, rank)
        return cls(heads, of, fixed, trainable(adapters, device))

    @property
    def depth_weights(self) -> tuple[float, ...]:
        """The heads'."""
        return self.heads.depth_weights

    @property
    def most_depth(self) -> int | None:
        """The heads'."""
        return self.heads.most_depth

    @property
    def about(self) -> Mapping[str, Any]:
        """The heads', and the rank of the adapters."""
        return {**self.heads.about, "tuned_rank": RANK}

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        """The law of every head behind every root, and the tuned target's own."""
        weights = merged(self.fixed, self.adapters)
        stack = replace(self.stack, weights=weights)
        states = stack.normed(stack(functional.embedding(batch.read, weights[EMBEDDING])), NORM)
        found = self.heads.predict(replace(batch, taps=states[:, :, None]), dice)
        head = weights[EMBEDDING if self.config.tied else HEAD]
        return replace(found, target=functional.linear(states[:, batch.first_root :], head))

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """The heads; the target is written at the end of the training."""
        self.heads.write({name: weights[name] for name in self.heads.weights}, folder)

    def spec(self, folder: Path) -> str:
        """`medusa:DIR`."""
        return self.heads.spec(folder)


def merged(fixed: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A target's weights with these adapters merged into them; other tensors among the adapters are left alone."""
    found = dict(fixed)
    for name, tensor in fixed.items():
        if OUT_OF.format(name) in adapters:
            found[name] = tensor + SCALE * (adapters[OUT_OF.format(name)] @ adapters[INTO.format(name)])
    return found


def make_medusa(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """Heads, as many as are asked for, of so many blocks; with the target, if that is to be tuned."""
    sizes.only("medusa", "heads", "layers", "hydra", "shared_head", "tune_target")
    heads = MedusaStudent.fresh(target, sizes.heads, sizes.layers, bool(sizes.hydra), bool(sizes.shared_head))
    return heads if sizes.tune_target is None else JointMedusaStudent.fresh(target, heads, seed)
