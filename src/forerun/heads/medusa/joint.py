"""Training Medusa heads together with their target, whose states become easier to guess from (Medusa-2, 2401.10774).

The target is tuned by low-rank adapters on its layers' projections, which are merged into the weights at the end. What
it was is its teacher: the loss of each place has the distance of the tuned law from the law that the target had when it
wrote the answers (the paper's self-distillation). The heads learn the tuned law, which is the one that will verify
their guesses. Embedding, norms and output matrix stay as they are. The result is a folder for `--draft medusa:DIR`, and
another one with the target that it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.errors import FolderTaken, InvalidRequest
from forerun.fields import read_fields
from forerun.heads.fresh import save_config, save_weights, trainable
from forerun.heads.medusa.student import MedusaStudent
from forerun.heads.sizes import StudentSizes
from forerun.heads.student import Predictions, Student, TextBatch
from forerun.heads.trained_layer import LayerStack
from forerun.models.loading import Blueprint
from forerun.models.projections import EMBEDDING, FINAL_NORM, HEAD, promised_tensors
from forerun.models.widen import companions, copy_files
from forerun.store import names_in, whole_folder, writable

RANK = 16  # of the adapters
SCALE = 0.03  # of what they add: so much slower the target is tuned than the heads are trained
INTO, OUT_OF = "target.{}.into", "target.{}.out_of"  # an adapter's two matrices
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TUNED = "forerun_tuned"  # what config.json of a tuned target says of its training


@dataclass(frozen=True, kw_only=True)
class JointMedusaStudent(MedusaStudent):
    """Heads in training, and adapters of their target among the `weights`, which taps no states: it computes them.

    `layers` are the target's, with weights in float32 that stay as they are.
    """

    taps: tuple[int, ...] = ()
    layers: LayerStack

    @classmethod
    def of(cls, heads: MedusaStudent, target: Blueprint, seed: int) -> JointMedusaStudent:
        """Heads with a target that is not tuned yet. Raises UnsupportedModel for one with experts or sinks."""
        dice, adapters = torch.Generator().manual_seed(seed), {}
        fixed = target_weights(target)
        for name, tensor in fixed.items():
            if name.removesuffix(".weight").endswith(PROJECTIONS):
                outputs, inputs = tensor.shape
                rank = min(RANK, outputs, inputs)
                adapters[INTO.format(name)] = torch.randn(rank, inputs, generator=dice) / inputs**0.5
                adapters[OUT_OF.format(name)] = torch.zeros(outputs, rank)
        device = target.placement.device
        of_heads = {each.name: getattr(heads, each.name) for each in fields(heads)}
        weights = {**heads.weights, **trainable(adapters, device)}
        layers = LayerStack.of(target.config, {name: tensor.to(device) for name, tensor in fixed.items()})
        return cls(**{**of_heads, "taps": (), "weights": weights}, layers=layers)

    @property
    def about(self) -> Mapping[str, Any]:
        """The heads', and the rank of the adapters."""
        return {**super().about, "tuned_rank": RANK}

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        """The law of every head behind every root, and the tuned target's own."""
        weights = merged(self.layers.weights, self.weights)
        stack = replace(self.layers, weights=weights)
        states = stack.normed(stack(functional.embedding(batch.read, weights[EMBEDDING])), FINAL_NORM)
        found = super().predict(replace(batch, taps=states[:, :, None]), dice)
        head = weights[EMBEDDING if stack.config.tied else HEAD]
        return replace(found, target=functional.linear(states[:, batch.first_root :], head))

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """The heads; the target is written at the end of the training."""
        super().write({name: weights[name] for name in self.config.shapes()}, folder)


def target_weights(target: Blueprint) -> dict[str, Tensor]:
    """All of a target's weights, read anew in float32."""
    checkpoint = target.checkpoint(torch.float32)
    return {name: checkpoint.take(name, shape) for name, shape in promised_tensors(target.config)}


def merged(fixed: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A target's weights with these adapters merged into them; other tensors among the adapters are left alone."""
    found = dict(fixed)
    for name, tensor in fixed.items():
        if OUT_OF.format(name) in adapters:
            found[name] = tensor + SCALE * (adapters[OUT_OF.format(name)] @ adapters[INTO.format(name)])
    return found


def make_medusa(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """Heads, as many as are asked for, of so many blocks; with the target, if that is to be tuned."""
    heads = MedusaStudent.fresh(target, sizes, seed)
    return heads if sizes.tune_target is None else JointMedusaStudent.of(heads, target, seed)


def check_free(folder: Path, heads: Path) -> None:
    """Raise where a folder for a tuned target is the heads' own, or holds anything but the target of these heads."""
    if folder.resolve() == heads.resolve():
        raise InvalidRequest("tune_target", f"{folder} is where the heads go: name another folder.")
    if not folder.exists() or (folder.is_dir() and not names_in(folder)):
        return
    config = folder / "config.json"
    made = read_fields(config).values.get(TUNED) if config.is_file() else None
    if made != str(heads.resolve()):
        raise FolderTaken(f"{folder} is not the tuned target of {heads}: name another folder with --tune-target")


def write_target(target: Blueprint, adapters: Mapping[str, Tensor], folder: Path, heads: Path) -> None:
    """Write a tuned target, whole; what lies beside its weights is as it was, but what config.json says of `heads`."""
    weights = merged(target_weights(target), {name: tensor.cpu() for name, tensor in adapters.items()})
    with writable(folder, "tune_target"), whole_folder(folder) as part:
        copy_files(companions(target.folder), target.folder, part)
        save_config({**read_fields(target.folder / "config.json").values, TUNED: str(heads.resolve())}, part)
        save_weights(weights, target.config.dtype, part)
