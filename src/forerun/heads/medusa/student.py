"""Training Medusa heads: each predicts one token further ahead from the target's last state; hydra's from the tokens
between, too.

A head reads the state before a root, which serving has when a round begins. Hydra's heads are taught with the text's
own tokens in the place of guesses, which is what they read wherever those guesses were right; where they were not,
nothing that follows counts. The result is a folder for `--draft medusa:DIR`.

The target stays as it is, or is tuned with them, so that its states become easier to guess from (Medusa-2, 2401.10774):
by low-rank adapters on its layers' projections, which are merged into the weights at the end. What it was is its
teacher: the loss of each place has the distance of the tuned law from the law that the target had when it wrote the
answers (the paper's self-distillation). The heads learn the tuned law, which is the one that will verify their guesses.
Embedding, norms and output matrix stay as they are, and the tuned target is written into a folder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.errors import FolderTaken, InvalidRequest
from forerun.fields import read_fields
from forerun.heads.fresh import TargetTables, save_config, save_weights, trainable
from forerun.heads.medusa.format import BIAS, BLOCK, ENTRY, MOST_HEADS, OUTPUT, WEIGHT, MedusaConfig
from forerun.heads.sizes import StudentSizes, check_most
from forerun.heads.student import Predictions, Student, TableStudent, TextBatch
from forerun.heads.trained_layer import LayerStack
from forerun.models.loading import Blueprint
from forerun.models.projections import EMBEDDING, FINAL_NORM, HEAD, promised_tensors
from forerun.models.widen import companions, copy_files
from forerun.store import names_in, whole_folder, writable

NUM_HEADS = 4  # unless said
DEPTH_WEIGHT = 0.8  # of each head, of the one before it
RANK = 16  # of the adapters
SCALE = 0.03  # of what they add: so much slower the target is tuned than the heads are trained
INTO, OUT_OF = "target.{}.into", "target.{}.out_of"  # an adapter's two matrices
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TUNED = "forerun_tuned"  # what config.json of a tuned target says of its training


@dataclass(frozen=True, kw_only=True)
class MedusaStudent(TableStudent):
    """Heads in training, as many as guesses, of all of the target's tokens."""

    kind: ClassVar[str] = "medusa"
    may_lack_tokens: ClassVar[bool] = False
    config: MedusaConfig

    @classmethod
    def fresh(cls, target: Blueprint, sizes: StudentSizes, seed: int) -> MedusaStudent:
        """Heads that say what the target's head says of the state they read, whatever the seed.

        Raises InvalidRequest.
        """
        sizes.only(cls.kind, "heads", "layers", "hydra", "shared_head", "tune_target")
        of, num_heads = target.config, sizes.heads or NUM_HEADS
        check_most("heads", num_heads, MOST_HEADS)
        config = MedusaConfig(
            num_heads, sizes.layers or 1, of.hidden, of.vocab_size, not sizes.shared_head, bool(sizes.hydra)
        )
        tables = TargetTables.of(target)
        weights = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
        for name, tensor in weights.items():
            head = name.partition(".")[0]
            if name == ENTRY.format(head) + WEIGHT:
                tensor[:, : of.hidden] = torch.eye(of.hidden)
            elif name == OUTPUT.format(head, config.num_blocks) + WEIGHT:
                tensor.copy_(tables.head.weight)
        return cls.beside(
            target,
            config.values,
            weights,
            tables,
            config=config,
            depth_weights=tuple(DEPTH_WEIGHT**head for head in range(num_heads)),
            most_depth=num_heads,
        )

    def inputs(self, batch: TextBatch, head: int) -> Float[Tensor, "batch roots inputs"]:
        """What a head reads for every root: the state before it and, with hydra, the embeddings of what is between."""
        length = batch.read.shape[1]
        states = functional.pad(batch.taps[:, :, 0].float(), (0, 0, 1, 0))[:, batch.first_root : length]
        if not self.config.hydra:
            return states
        tokens = functional.pad(batch.tokens, (0, self.config.num_heads))
        between = [tokens[:, batch.first_root + i : length + i] for i in range(1 + head)]
        return torch.cat([states, *(self.embedding[column] for column in between)], dim=2)

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        c, predicted = self.config, []
        for head in range(c.num_heads):
            x = self.inputs(batch, head)
            if c.hydra:
                x = functional.linear(x, self.weights[ENTRY.format(head) + WEIGHT])
            for block in range(c.num_blocks):
                name = BLOCK.format(head, block)
                x = x + functional.silu(functional.linear(x, self.weights[name + WEIGHT], self.weights[name + BIAS]))
            output = self.weights.get(OUTPUT.format(head, c.num_blocks) + WEIGHT)
            predicted.append(self.head(x) if output is None else functional.linear(x, output))
        return Predictions(predicted, batch.roots)


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
        predicted = super().predict(replace(batch, taps=states[:, :, None]), dice)
        head = weights[EMBEDDING if stack.config.tied else HEAD]
        return replace(predicted, target=functional.linear(states[:, batch.first_root :], head))

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """The heads; the target is written at the end of the training."""
        super().write({name: weights[name] for name in self.config.shapes()}, folder)


def target_weights(target: Blueprint) -> dict[str, Tensor]:
    """All of a target's weights, read anew in float32."""
    checkpoint = target.checkpoint(torch.float32)
    return {name: checkpoint.take(name, shape) for name, shape in promised_tensors(target.config)}


def merged(fixed: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A target's weights with these adapters merged into them; other tensors among the adapters are left alone."""
    weights = dict(fixed)
    for name, tensor in fixed.items():
        if OUT_OF.format(name) in adapters:
            weights[name] = tensor + SCALE * (adapters[OUT_OF.format(name)] @ adapters[INTO.format(name)])
    return weights


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
