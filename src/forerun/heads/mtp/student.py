"""Training an MTP module: a layer on the target's last state, used again for every guess (FastMTP, 2509.18362).

At the first step every place reads the text's token there beside the target's state before it, behind the final norm.
At each further step the draft from every root is one token longer, and the module reads the text's next token beside
its own output of the step before. So it learns to go on from its own outputs, which modules that were trained for one
token cannot, and what it reads at any depth is what it will read when it serves. Early steps weigh more, because drafts
seldom get to the late ones. Embedding, head and target stay as they are. The result is a folder for `--draft mtp:DIR`,
in the layout of Qwen3-Next.
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
from forerun.fields import Fields
from forerun.heads.drafted_layer import DraftedLayer, DraftSteps, KeysAndValues
from forerun.heads.fresh import (
    TargetTables,
    WrittenStudent,
    drawn_weights,
    layer_values,
    stored_dtype,
    trainable,
)
from forerun.heads.mtp.format import COUNT_KEYS, MtpTensors
from forerun.heads.student import Predictions, Student, StudentSizes, TextBatch
from forerun.models.config import ModelConfig, config_of
from forerun.models.loading import Blueprint
from forerun.models.mtp_names import QWEN
from forerun.models.rope import rope_tables
from forerun.models.rows import rms_norm

STEPS = 4  # of a draft that training goes through
DEPTH_WEIGHT = 0.6  # of each step, of the one before it
LEAST_GAIN = 0.05  # of the target's final norm, that is divided by


@dataclass(frozen=True)
class MtpStudent(WrittenStudent):
    """A module in training. `embedding` and `head` are the target's."""

    kind: ClassVar[str] = "mtp"
    values: Mapping[str, Any]
    dtype: torch.dtype
    config: ModelConfig
    weights: dict[str, Tensor]
    embedding: Float[Tensor, "vocab hidden"]
    head: Float[Tensor, "vocab hidden"]
    taps: tuple[int, ...] = (-1,)
    vocabulary: Int[Tensor, " ids"] | None = None
    most_depth: int | None = None
    depth_weights: tuple[float, ...] = tuple(DEPTH_WEIGHT**step for step in range(STEPS))
    own: DraftedLayer = field(init=False)

    def __post_init__(self) -> None:
        rope = rope_tables(self.config).to(self.embedding.device)
        place = QWEN.layer.format(0).removesuffix(".")
        object.__setattr__(self, "own", DraftedLayer(self.config, self.weights, place, rope))

    @classmethod
    def fresh(cls, target: Blueprint, mlp: int | None, seed: int, portable: bool = False) -> MtpStudent:
        """A module shaped like the target's layers, or with so many neurons, that begins by repeating its state.

        A `portable` one has norms on queries and keys, as modules of `speculators` have.
        """
        of = target.config
        values = {
            "model_type": "qwen3" if portable else "llama",
            COUNT_KEYS[-1]: 1,
            "vocab_size": of.vocab_size,
            **layer_values(target, 1, mlp),
        }
        config = config_of(Fields(Path("the module's config.json"), values))
        weights = drawn_weights(MtpTensors(config, QWEN, of.layers).shapes(), seed)
        tables = TargetTables.of(target)
        gain = tables.norm.cpu()
        weights[QWEN.norm] = gain
        weights[QWEN.projection][:, of.hidden :] = torch.diag(1 / torch.where(gain.abs() < LEAST_GAIN, 1.0, gain))
        weights = trainable(weights, target.placement.device)
        return cls(values, stored_dtype(target), config, weights, tables.embedding, tables.head)

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        """The law of every step of the drafts from these roots."""
        drafts = DraftSteps.of(batch, STEPS, dice)
        steps = drafts.run(batch.taps[:, :-1, 0].float(), self.embedding, self.module)
        return Predictions([functional.linear(states, self.head) for states in steps], drafts.roots)

    def module(
        self,
        embedded: Float[Tensor, "batch places hidden"],
        states: Float[Tensor, "batch places hidden"],
        places: Int[Tensor, "batch places"],
        past: list[KeysAndValues],
    ) -> Float[Tensor, "batch places hidden"]:
        """The module's output where the drafts from these places are; its keys and values join the past."""
        own = self.own
        joined = torch.cat([self.normed(embedded, QWEN.embedding_norm), self.normed(states, QWEN.state_norm)], dim=2)
        x = functional.linear(joined, self.weights[QWEN.projection])
        x = x + own.mix(own.normed(x, "input_layernorm"), places, past)
        return self.normed(x + own.mlp(x), QWEN.norm)

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Behind the norm whose gain has this name."""
        return rms_norm(x, self.weights[name], self.config.norm_eps)


def make_mtp(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """An MTP module."""
    sizes.only("mtp", "mlp", "portable")
    return MtpStudent.fresh(target, sizes.mlp, seed, bool(sizes.portable))
