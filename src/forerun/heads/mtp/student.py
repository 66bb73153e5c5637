"""Training an MTP module: one layer on the target's last state, reused for every draft token (FastMTP, 2509.18362).

At the first step each position reads the text's token there with the target's state before it, after the final norm. At
each further step the draft from every root is one token longer, and the module reads the text's next token with its own
output of the step before. So it learns to continue from its own outputs, as it must when drafting; modules trained for
a single token do not. Early steps have greater loss weights, because drafts seldom reach late ones. Embedding, head and
target are not trained. The result is a folder for `--draft mtp:DIR`, in the layout of Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.fields import Fields
from forerun.heads.fresh import TargetTables, drawn_weights, layer_values
from forerun.heads.mtp.format import COUNT_KEYS, DRAFT_VOCAB, MtpTensors
from forerun.heads.sizes import StudentSizes, check_most
from forerun.heads.student import TargetText, TextBatch
from forerun.heads.trained_layer import DraftedStudent
from forerun.models.config import config_of
from forerun.models.loading import Blueprint
from forerun.models.mtp_names import QWEN
from forerun.models.projections import ADDING

STEPS = 4  # depth of the drafts in training
DEPTH_WEIGHT = 0.6  # loss weight of a step, relative to the step before
LEAST_GAIN = 0.05  # gains of the target's final norm below this are treated as 1 when dividing by them
LEAST_ROWS = 4  # answer tokens per input of the projection that the fit needs
RIDGE = 1e-3  # regularization of the fit, relative to the mean square of the inputs


@dataclass(frozen=True, kw_only=True)
class MtpStudent(DraftedStudent):
    """An MTP module in training."""

    kind: ClassVar[str] = "mtp"
    fitted_answers: ClassVar[int] = 256
    place: ClassVar[str] = QWEN.layer.format(0).removesuffix(".")
    depth_weights: tuple[float, ...] = tuple(DEPTH_WEIGHT**step for step in range(STEPS))

    @classmethod
    def fresh(cls, target: Blueprint, sizes: StudentSizes, seed: int) -> MtpStudent:
        """An untrained module with the shapes of the target's layers; its initial output is close to its state input.

        A portable module norms queries and keys, as those of `speculators` do.
        """
        sizes.only(cls.kind, "mlp", "portable", "draft_vocab")
        target_config, num_ids = target.config, sizes.draft_vocab
        check_most("draft_vocab", num_ids or 1, target_config.vocab_size)
        values = {
            "model_type": "qwen3" if sizes.portable else "llama",
            COUNT_KEYS[-1]: 1,
            "vocab_size": target_config.vocab_size,
            **layer_values(target, 1, sizes.mlp),
            **({} if num_ids is None else {DRAFT_VOCAB: num_ids}),
        }
        config = config_of(Fields(Path("the module's config.json"), values))
        weights = drawn_weights(MtpTensors(config, QWEN, target_config.layers, target_config.vocab_size).shapes(), seed)
        tables = TargetTables.of(target)
        gain = tables.norm.cpu()
        weights[QWEN.norm] = gain
        weights[QWEN.projection][:, target_config.hidden :] = torch.diag(1 / safe(gain))
        return cls.untrained(target, values, weights, tables=tables, config=config)

    @torch.no_grad()
    def fit(self, texts: Sequence[TargetText]) -> None:
        """Initialize the projection by ridge regression, and the layer so that it adds nothing.

        The regression predicts the target's state at a token from the token's embedding and the state before it; the
        states are those after the final norm, divided by its gains. Does nothing for too few answer tokens.
        """
        size = 2 * self.config.hidden
        if sum(len(text.roots) for text in texts) < LEAST_ROWS * size:
            return
        shapes, table = ((size, size), (size, self.config.hidden)), self.tables.embedding
        gram, sums = (table.new_zeros(shape, dtype=torch.float64) for shape in shapes)
        for text in texts:
            states, tokens = text.taps[:, 0].float(), torch.tensor(text.tokens, device=table.device)
            places = torch.arange(text.num_prompt, len(states), device=table.device)
            read = self.joined(self.tables.embedding[tokens[places]], states[places - 1]).double()
            gram += read.T @ read
            sums += read.T @ (states[places] / safe(self.weights[QWEN.norm])).double()
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        self.weights[QWEN.projection].copy_(torch.linalg.solve(gram, sums).T)
        for name, weight in self.weights.items():
            if name.endswith(ADDING):
                weight.zero_()

    def joined(
        self, embedded: Float[Tensor, "*places hidden"], states: Float[Tensor, "*places hidden"]
    ) -> Float[Tensor, "*places inputs"]:
        """The inputs of the projection: normed embedding and normed state."""
        return torch.cat([self.normed(embedded, QWEN.embedding_norm), self.normed(states, QWEN.state_norm)], dim=-1)

    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        return batch.taps[:, :-1, 0].float()

    def entry(
        self, embedded: Float[Tensor, "batch places hidden"], states: Float[Tensor, "batch places hidden"]
    ) -> tuple[Float[Tensor, "batch places hidden"], None]:
        """The stream is the projection of the normed embedding and the normed state."""
        return functional.linear(self.joined(embedded, states), self.weights[QWEN.projection]), None

    def output(self, x: Float[Tensor, "batch places hidden"]) -> Float[Tensor, "batch places hidden"]:
        return self.normed(x, QWEN.norm)


def safe(gain: Float[Tensor, " hidden"]) -> Float[Tensor, " hidden"]:
    """The gains as divisors: those below LEAST_GAIN are replaced by 1."""
    return torch.where(gain.abs() < LEAST_GAIN, 1.0, gain)
