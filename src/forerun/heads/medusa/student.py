"""Training Medusa heads, alone or together with their target (Medusa-2).

A head reads the state before a root, as when drafting. Hydra's heads are trained with the text's tokens in place of
draft tokens (teacher forcing): accepted draft tokens equal the text, and tokens after a rejected one never matter. The
result is a folder for `--draft medusa:DIR`.

The target is fixed, or tuned with the heads so that its states become more predictive (Medusa-2, 2401.10774): by
low-rank adapters on its layers' projections, which are merged into the weights at the end. The loss includes the
divergence of the tuned distribution from the original target's (the paper's self-distillation). The heads learn the
tuned distribution, since the tuned target will verify their drafts. Embedding, norms and output matrix are not tuned.
The tuned target is written to its own folder.
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
from forerun.heads.fresh import TargetTables, save_weights, trainable
from forerun.heads.medusa.format import BIAS, BLOCK, ENTRY, MOST_HEADS, OUTPUT, WEIGHT, MedusaConfig
from forerun.heads.sizes import StudentSizes, check_most
from forerun.heads.student import Predictions, Student, TextBatch
from forerun.heads.trained_layer import LayerStack
from forerun.models.loading import Blueprint
from forerun.models.projections import EMBEDDING, FINAL_NORM, HEAD, expected_tensors
from forerun.models.widen import companions, copy_files
from forerun.store import names_in, save_json, whole_folder, writable

NUM_HEADS = 4  # by default
DEPTH_WEIGHT = 0.8  # loss weight of a head, relative to the head before
RANK = 16  # of the adapters
SCALE = 0.03  # of the adapters' outputs, so that the target learns more slowly than the heads
INTO, OUT_OF = "target.{}.into", "target.{}.out_of"  # an adapter's two matrices
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TUNED = "forerun_tuned"  # key in config.json of a tuned target: the folder of its heads


@dataclass(frozen=True, kw_only=True)
class MedusaStudent(Student):
    """Medusa heads in training, over all of the target's tokens. `tables` are the target's, which are not trained."""

    kind: ClassVar[str] = "medusa"
    tables: TargetTables
    config: MedusaConfig

    @classmethod
    def fresh(cls, target: Blueprint, sizes: StudentSizes, seed: int) -> MedusaStudent:
        """Untrained heads, whose initial logits are those of the target's head. Raises InvalidRequest."""
        sizes.only(cls.kind, "heads", "layers", "hydra", "shared_head", "tune_target")
        target_config, num_heads = target.config, sizes.heads or NUM_HEADS
        check_most("heads", num_heads, MOST_HEADS)
        config = MedusaConfig(
            num_heads=num_heads,
            num_blocks=sizes.layers or 1,
            hidden=target_config.hidden,
            vocab_size=target_config.vocab_size,
            own_output=not sizes.shared_head,
            hydra=bool(sizes.hydra),
        )
        tables = TargetTables.of(target)
        weights = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
        for name, tensor in weights.items():
            head = name.partition(".")[0]
            if name == ENTRY.format(head) + WEIGHT:
                tensor[:, : target_config.hidden] = torch.eye(target_config.hidden)
            elif name == OUTPUT.format(head, config.num_blocks) + WEIGHT:
                tensor.copy_(tables.head.weight)
        return cls.untrained(
            target,
            config.values,
            weights,
            tables=tables,
            config=config,
            depth_weights=tuple(DEPTH_WEIGHT**head for head in range(num_heads)),
            most_depth=num_heads,
        )

    def inputs(self, batch: TextBatch, head: int) -> Float[Tensor, "batch roots inputs"]:
        """The inputs of a head for each root: the state before it, and with Hydra the embeddings of the tokens between
        root and prediction.
        """
        length = batch.read.shape[1]
        states = functional.pad(batch.taps[:, :, 0].float(), (0, 0, 1, 0))[:, batch.first_root : length]
        if not self.config.hydra:
            return states
        tokens = functional.pad(batch.tokens, (0, self.config.num_heads))
        between = [tokens[:, batch.first_root + i : length + i] for i in range(1 + head)]
        return torch.cat([states, *(self.tables.embedding[column] for column in between)], dim=2)

    def predict(self, batch: TextBatch, generator: torch.Generator | None) -> Predictions:
        c, predicted = self.config, []
        for head in range(c.num_heads):
            x = self.inputs(batch, head)
            if c.hydra:
                x = functional.linear(x, self.weights[ENTRY.format(head) + WEIGHT])
            for block in range(c.num_blocks):
                name = BLOCK.format(head, block)
                x = x + functional.silu(functional.linear(x, self.weights[name + WEIGHT], self.weights[name + BIAS]))
            output = self.weights.get(OUTPUT.format(head, c.num_blocks) + WEIGHT)
            predicted.append(self.tables.head(x) if output is None else functional.linear(x, output))
        return Predictions(predicted, batch.roots)


@dataclass(frozen=True, kw_only=True)
class JointMedusaStudent(MedusaStudent):
    """Medusa heads in training together with their target, whose adapters are among the `weights`.

    `layers` are the target's, with fixed float32 weights. It has no taps, because it computes the states itself.
    """

    taps: tuple[int, ...] = ()
    layers: LayerStack

    @classmethod
    def of(cls, heads: MedusaStudent, target: Blueprint, seed: int) -> JointMedusaStudent:
        """The heads with untrained adapters of the target. Raises UnsupportedModel for a target that is not dense."""
        generator, adapters = torch.Generator().manual_seed(seed), {}
        fixed = target_weights(target)
        for name, tensor in fixed.items():
            if name.removesuffix(".weight").endswith(PROJECTIONS):
                outputs, inputs = tensor.shape
                rank = min(RANK, outputs, inputs)
                adapters[INTO.format(name)] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                adapters[OUT_OF.format(name)] = torch.zeros(outputs, rank)
        device = target.placement.device
        of_heads = {each.name: getattr(heads, each.name) for each in fields(heads)}
        weights = {**heads.weights, **trainable(adapters, device)}
        layers = LayerStack.of(target.config, {name: tensor.to(device) for name, tensor in fixed.items()})
        return cls(**{**of_heads, "taps": (), "weights": weights}, layers=layers)

    @property
    def description(self) -> Mapping[str, Any]:
        """As for the heads, with the rank of the adapters."""
        return {**super().description, "tuned_rank": RANK}

    def predict(self, batch: TextBatch, generator: torch.Generator | None) -> Predictions:
        """The logits of every head after every root, and those of the tuned target."""
        weights = merged(self.layers.weights, self.weights)
        stack = replace(self.layers, weights=weights)
        states = stack.normed(stack(functional.embedding(batch.read, weights[EMBEDDING])), FINAL_NORM)
        predicted = super().predict(replace(batch, taps=states[:, :, None]), generator)
        head = weights[EMBEDDING if stack.config.tied else HEAD]
        return replace(predicted, target=functional.linear(states[:, batch.first_root :], head))

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the heads; the target is written at the end of training."""
        super().write({name: weights[name] for name in self.config.shapes()}, folder)


def target_weights(target: Blueprint) -> dict[str, Tensor]:
    """All of the target's weights, loaded in float32."""
    checkpoint = target.checkpoint(torch.float32)
    return {name: checkpoint.take(name, shape) for name, shape in expected_tensors(target.config)}


def merged(fixed: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The target's weights with the adapters merged in; other tensors among `adapters` are ignored."""
    weights = dict(fixed)
    for name, tensor in fixed.items():
        if OUT_OF.format(name) in adapters:
            weights[name] = tensor + SCALE * (adapters[OUT_OF.format(name)] @ adapters[INTO.format(name)])
    return weights


def make_medusa(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """A student of these sizes: the heads alone, or with the target if `tune_target` is set."""
    heads = MedusaStudent.fresh(target, sizes, seed)
    return heads if sizes.tune_target is None else JointMedusaStudent.of(heads, target, seed)


def check_free(folder: Path, heads: Path) -> None:
    """Raise if the folder for a tuned target is that of the heads, or contains something else than their target."""
    if folder.resolve() == heads.resolve():
        raise InvalidRequest("tune_target", f"{folder} is the folder of the heads: name another folder.")
    if not folder.exists() or (folder.is_dir() and not names_in(folder)):
        return
    config = folder / "config.json"
    tuned_for = read_fields(config).values.get(TUNED) if config.is_file() else None
    if tuned_for != str(heads.resolve()):
        raise FolderTaken(f"{folder} is not the tuned target of {heads}: name another folder with --tune-target")


def write_target(target: Blueprint, adapters: Mapping[str, Tensor], folder: Path, heads: Path) -> None:
    """Write a complete tuned target: merged weights, the source's other files, and `heads` noted in config.json."""
    weights = merged(target_weights(target), {name: tensor.cpu() for name, tensor in adapters.items()})
    with writable(folder, "tune_target"), whole_folder(folder) as part:
        copy_files(companions(target.folder), target.folder, part)
        values = read_fields(target.folder / "config.json").values
        save_json({**values, TUNED: str(heads.resolve())}, part / "config.json")
        save_weights(weights, target.config.dtype, part)
