"""Training an EAGLE-3 layer: it reads the target's states behind the tokens of a text, and its own for what it guesses.

Training goes through drafts as serving does (the paper's training-time test). At the first step every place reads the
target's state before it. At each further step the draft from every root is one token longer: the layer reads the text's
next token beside its own output of the step before, and sees the target's states up to the root and its own outputs
behind it. So what it reads at any depth is what it will read when it serves. The layer adds to the normed state
(`norm_before_residual`): states of late layers are so large that what a fresh layer adds to them is hardly seen, and it
learns half as fast. The result is a folder for `--draft
eagle:DIR`, in the authors' layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.errors import InvalidRequest
from forerun.fields import Fields
from forerun.heads.drafted_layer import DraftedLayer, DraftSteps, KeysAndValues
from forerun.heads.eagle.format import (
    ARCHITECTURE,
    MAP,
    NORM,
    NORMED_RESIDUAL,
    PLACES,
    TAP_IDS,
    EagleForm,
    EagleTensors,
    usual_taps,
)
from forerun.heads.fresh import (
    HEAD,
    TargetTables,
    WrittenStudent,
    drawn_weights,
    layer_values,
    stored_dtype,
    trainable,
)
from forerun.heads.student import Predictions, Student, StudentSizes, TextBatch, check_most, check_taps
from forerun.heads.vocabulary import OFFSETS
from forerun.models.config import ModelConfig, config_of
from forerun.models.loading import Blueprint
from forerun.models.rope import rope_tables
from forerun.models.rows import rms_norm

STEPS = 5  # of a draft that training goes through
DEPTH_WEIGHT = 0.8  # of each step, of the one before it
PLACE = PLACES[0]


@dataclass(frozen=True)
class EagleStudent(WrittenStudent):
    """A layer in training. `embedding` and `head` are the target's, and stay as they are."""

    kind: ClassVar[str] = "eagle"
    values: Mapping[str, Any]
    dtype: torch.dtype
    config: ModelConfig
    weights: dict[str, Tensor]
    embedding: Float[Tensor, "vocab hidden"]
    head: Float[Tensor, "vocab hidden"]
    taps: tuple[int, ...]
    vocabulary: Int[Tensor, " ids"] | None = None
    most_depth: int | None = None
    depth_weights: tuple[float, ...] = tuple(DEPTH_WEIGHT**step for step in range(STEPS))
    own: DraftedLayer = field(init=False)

    def __post_init__(self) -> None:
        rope = rope_tables(self.config).to(self.embedding.device)
        object.__setattr__(self, "own", DraftedLayer(self.config, self.weights, PLACE, rope))

    @classmethod
    def fresh(
        cls,
        target: Blueprint,
        mlp: int | None,
        shared_head: bool,
        seed: int,
        vocabulary: int | Sequence[int] | None = None,
        taps: Sequence[int] | None = None,
    ) -> EagleStudent:
        """A layer shaped like the target's, with the target's norm, and with the target's head or a copy to train.

        The head has so many of the target's tokens, or these, or all of them. Raises InvalidRequest for more than there
        are, and for some of them where the head is shared.
        """
        of, device = target.config, target.placement.device
        ids = head_ids(target, shared_head, vocabulary)
        taps = usual_taps(of.layers) if taps is None else check_taps(taps, of.layers)
        num_ids = of.vocab_size if ids is None else len(ids)
        values = {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **layer_values(target, 1, mlp),
            "vocab_size": of.vocab_size,
            "draft_vocab_size": num_ids,
            TAP_IDS: list(taps),
            NORMED_RESIDUAL: True,
        }
        config = config_of(Fields(Path("the layer's config.json"), without_architecture(values)))
        tensors = EagleTensors(config, EagleForm(taps), PLACE, of.hidden, num_ids, False, not shared_head)
        weights, tables = drawn_weights(tensors.shapes(), seed), TargetTables.of(target)
        weights[MAP] = torch.cat([torch.eye(of.hidden) / len(taps)] * len(taps), dim=1)
        if not shared_head:
            weights[HEAD] = tables.head if ids is None else tables.head[ids]
        weights[NORM] = tables.norm
        weights = trainable(weights, device)
        ids = None if ids is None else ids.to(device)
        return cls(values, stored_dtype(target), config, weights, tables.embedding, tables.head, taps, ids)

    @property
    def about(self) -> Mapping[str, Any]:
        """Its configuration, and whether it has a head of its own."""
        return {**super().about, "shared_head": HEAD not in self.weights}

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        """The law of every step of the drafts from these roots."""
        drafts = DraftSteps.of(batch, STEPS, dice)
        fused = functional.linear(batch.taps[:, :-1].flatten(2).float(), self.weights[MAP])
        found = []
        for states in drafts.run(fused, self.embedding, self.layer):
            judged = rms_norm(states, self.weights[NORM], self.config.norm_eps)
            found.append(functional.linear(judged, self.weights.get(HEAD, self.head)))
        return Predictions(found, drafts.roots)

    def layer(
        self,
        embedded: Float[Tensor, "batch places hidden"],
        states: Float[Tensor, "batch places hidden"],
        places: Int[Tensor, "batch places"],
        past: list[KeysAndValues],
    ) -> Float[Tensor, "batch places hidden"]:
        """The layer's output where the drafts from these places are; its keys and values join the past."""
        own = self.own
        residual = own.normed(states, "hidden_norm")
        joined = torch.cat([own.normed(embedded, "input_layernorm"), residual], dim=2)
        x = residual + own.mix(joined, places, past)
        return x + own.mlp(x)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """The layer and, if it has one, its head, and whose tokens the head's are."""
        if HEAD in weights:
            ids = torch.arange(len(weights[HEAD])) if self.vocabulary is None else self.vocabulary.cpu()
            weights = {**weights, OFFSETS: ids - torch.arange(len(ids))}
        super().write(weights, folder)


def head_ids(
    target: Blueprint, shared_head: bool, vocabulary: int | Sequence[int] | None
) -> Int[Tensor, " ids"] | None:
    """The target's ids of the head's tokens: these, the first so many, or None for all of them."""
    if vocabulary is None:
        return None
    if shared_head:
        raise InvalidRequest("draft_vocab", "the target's head has all tokens: leave --shared-head out, or this one.")
    ids = torch.arange(vocabulary) if isinstance(vocabulary, int) else torch.tensor(vocabulary)
    check_most("draft_vocab", len(ids), target.config.vocab_size)
    return ids


def without_architecture(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as those of the family whose layer it is."""
    return {key: value for key, value in values.items() if key != "architectures"}


def make_eagle(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """An EAGLE-3 layer."""
    sizes.only("eagle", "mlp", "shared_head", "draft_vocab", "taps")
    return EagleStudent.fresh(target, sizes.mlp, bool(sizes.shared_head), seed, sizes.draft_vocab, sizes.taps)
