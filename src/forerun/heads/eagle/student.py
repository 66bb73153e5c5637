"""Training an EAGLE-3 layer, from the target's states of texts and its own outputs.

Training unrolls drafts as they are generated (the paper's training-time test). At the first step each position reads
the target's state before it. At each further step the draft from every root is one token longer: the layer reads the
text's next token with its own output of the step before, and attends to the target's states up to the root and to its
own outputs after it. The residual stream is the normed state (`norm_before_residual`): the states of late layers are so
large that the outputs of an untrained layer hardly change them, and training takes twice as long. The result is a
folder for `--draft eagle:DIR`, in the authors' layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.fields import Fields
from forerun.heads.eagle import format as names
from forerun.heads.eagle.format import EagleForm, EagleTensors, usual_taps
from forerun.heads.fresh import TargetTables, drawn_weights, layer_values, trainable
from forerun.heads.sizes import StudentSizes, check_most
from forerun.heads.student import Student, TextBatch
from forerun.heads.trained_layer import DraftedStudent
from forerun.heads.vocabulary import OFFSETS
from forerun.models.config import config_of
from forerun.models.loading import Blueprint
from forerun.models.projections import HEAD

STEPS = 5  # depth of the drafts in training
DEPTH_WEIGHT = 0.8  # loss weight of a step, relative to the step before


@dataclass(frozen=True, kw_only=True)
class EagleStudent(DraftedStudent):
    """An EAGLE-3 layer in training."""

    kind: ClassVar[str] = "eagle"
    place: ClassVar[str] = names.PLACES[0]
    depth_weights: tuple[float, ...] = tuple(DEPTH_WEIGHT**step for step in range(STEPS))

    @classmethod
    def fresh(cls, target: Blueprint, sizes: StudentSizes, seed: int) -> EagleStudent:
        """An untrained layer with the target's shapes and norm, and with the target's head or a trainable copy of it.

        The head has all of the target's tokens, or the first `draft_vocab`. Raises InvalidRequest for invalid sizes.
        """
        sizes.only(cls.kind, "mlp", "shared_head", "draft_vocab", "taps")
        target_config, is_shared = target.config, bool(sizes.shared_head)
        num_ids = sizes.draft_vocab or target_config.vocab_size
        check_most("draft_vocab", num_ids, target_config.vocab_size)
        taps = sizes.tapped(target_config.layers) or usual_taps(target_config.layers)
        values = {
            "model_type": "llama",
            **layer_values(target, 1, sizes.mlp),
            "vocab_size": target_config.vocab_size,
            "draft_vocab_size": num_ids,
            names.TAP_IDS: list(taps),
            names.NORMED_RESIDUAL: True,
        }
        config = config_of(Fields(Path("the layer's config.json"), values))
        tensors = EagleTensors(config, EagleForm(taps), cls.place, target_config.hidden, num_ids, False, not is_shared)
        weights, tables = drawn_weights(tensors.shapes(), seed), TargetTables.of(target)
        weights[names.MAP] = torch.cat([torch.eye(target_config.hidden) / len(taps)] * len(taps), dim=1)
        if not is_shared:
            weights[HEAD] = tables.head.weight[:num_ids]
        weights[names.NORM] = tables.norm
        return cls.untrained(
            target,
            {"architectures": [names.ARCHITECTURE], **values},
            weights,
            tables=tables,
            config=config,
            taps=taps,
            vocabulary=None if sizes.draft_vocab is None else torch.arange(num_ids, device=tables.embedding.device),
        )

    @property
    def description(self) -> Mapping[str, Any]:
        """As in Student, and whether the head is the target's."""
        return {**super().description, "shared_head": HEAD not in self.weights}

    def with_vocabulary(self, ids: Int[Tensor, " ids"]) -> Student:
        """As in Student: the head has the rows of these tokens, of the target's head or of a trainable copy."""
        rows, is_shared = {HEAD: self.tables.head.weight[ids]}, HEAD not in self.weights
        copied = {} if is_shared else trainable(rows, self.tables.embedding.device)
        return replace(super().with_vocabulary(ids), weights={**self.weights, **copied})

    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        return functional.linear(batch.taps[:, :-1].flatten(2).float(), self.weights[names.MAP])

    def entry(
        self, embedded: Float[Tensor, "batch places hidden"], states: Float[Tensor, "batch places hidden"]
    ) -> tuple[Float[Tensor, "batch places hidden"], Float[Tensor, "batch places inputs"]]:
        """The normed state is the stream; attention reads it concatenated with the normed token."""
        residual = self.normed(states, f"{self.place}.{names.STATE_NORM}")
        token = self.normed(embedded, f"{self.place}.{names.INPUT_NORM}")
        return residual, torch.cat([token, residual], dim=2)

    def logits(self, states: Float[Tensor, "batch roots hidden"]) -> Float[Tensor, "batch roots vocab"]:
        """The logits of the drafter's own head, or else of the target's."""
        weight, read = self.weights.get(HEAD), self.normed(states, names.NORM)
        return self.tables.head(read) if weight is None else functional.linear(read, weight)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the layer, and its own head, if any, with the head's token ids."""
        all_ids = {OFFSETS: torch.zeros(len(weights[HEAD]), dtype=torch.long)} if HEAD in weights else {}
        super().write({**all_ids, **weights}, folder)
