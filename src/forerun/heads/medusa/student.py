"""Training Medusa heads: each predicts one token further ahead from the target's last state; hydra's from the tokens
between, too.

A head reads the state before a root, which serving has when a round begins. Hydra's heads are taught with the text's
own tokens in the place of guesses, which is what they read wherever those guesses were right; where they were not,
nothing that follows counts. The target stays as it is. The result is a folder for `--draft medusa:DIR`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.heads.fresh import TargetHead, TargetTables
from forerun.heads.medusa.format import BIAS, BLOCK, ENTRY, MOST_HEADS, OUTPUT, WEIGHT, MedusaConfig
from forerun.heads.sizes import StudentSizes, check_most
from forerun.heads.student import Predictions, Student, TextBatch
from forerun.models.loading import Blueprint

NUM_HEADS = 4  # unless said
DEPTH_WEIGHT = 0.8  # of each head, of the one before it


@dataclass(frozen=True, kw_only=True)
class MedusaStudent(Student):
    """Heads in training, as many as guesses. `head` and `embedding` are the target's, and stay as they are."""

    kind: ClassVar[str] = "medusa"
    config: MedusaConfig
    embedding: Float[Tensor, "vocab hidden"]
    head: TargetHead

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
        return cls.begun(
            target,
            config.values,
            weights,
            config=config,
            embedding=tables.embedding,
            head=tables.head,
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
        return torch.cat([states, *(self.embedding[own] for own in between)], dim=2)

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        """The law of every head behind every root."""
        c, found = self.config, []
        for head in range(c.num_heads):
            x = self.inputs(batch, head)
            if c.hydra:
                x = functional.linear(x, self.weights[ENTRY.format(head) + WEIGHT])
            for block in range(c.num_blocks):
                name = BLOCK.format(head, block)
                x = x + functional.silu(functional.linear(x, self.weights[name + WEIGHT], self.weights[name + BIAS]))
            output = self.weights.get(OUTPUT.format(head, c.num_blocks) + WEIGHT)
            found.append(self.head(x) if output is None else functional.linear(x, output))
        return Predictions(found, batch.roots)
