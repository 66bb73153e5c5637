"""What stands on a block's states: a head that lets a guess depend on the token before it, and one that estimates it.

A block's places do not see what the places before them guess. A Markov head (DSpark, 2607.05147) adds a low-rank bias
that the token before decides. A candidate selector (DFlash 2) keeps the likeliest tokens of a place, and adds to each a
score of the pair that it makes with the token before it, which the place's state weighs. Both are read from left to
right, at the cost of a product with the vocabulary or with some candidates. The confidence head estimates with which
chance a place's guess is accepted, if those before it are. This file decides their arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.heads.block.format import (
    CONFIDENCE,
    CONFIDENCE_BIAS,
    MARKOV_W1,
    MARKOV_W2,
    PREDECESSORS,
    SELECTOR,
    SUCCESSORS,
    BlockTensors,
)
from forerun.models.layer import MakeLinear
from forerun.models.linear import Linear, padded_rows
from forerun.models.mlp import pad_rows
from forerun.models.weights import Checkpoint
from forerun.sampling.winners import largest

SpreadLogits = Callable[[Tensor], Tensor]  # logits over the head's own ids to those over the target's


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """Adds to a place's logits what the token before it says of the next one."""

    before: Float[Tensor, "vocab rank"]
    after: Linear
    spread: SpreadLogits

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], states: Float[Tensor, "rows hidden"], tokens: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows vocab"]:
        """The logits after these tokens; the states do not matter."""
        return logits + self.spread(product(self.after, self.before[tokens]).float())


@dataclass(frozen=True, slots=True)
class CandidateSelector:
    """Leaves the `top_k` likeliest tokens of a place, with a score of the pair that each makes with the one before."""

    predecessors: Float[Tensor, "vocab rank"]
    successors: Float[Tensor, "vocab rank"]
    projection: Linear
    top_k: int

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], states: Float[Tensor, "rows hidden"], tokens: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows vocab"]:
        """The logits after these tokens: -inf for all that are no candidates."""
        candidates = largest(logits, self.top_k)
        wanted = self.predecessors[tokens].float() * product(self.projection, states).float()
        pairs = (wanted[:, None] * self.successors[candidates].float()).sum(-1)
        return torch.full_like(logits, -math.inf).scatter_(1, candidates, logits.gather(1, candidates) + pairs)


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """The chance that a place's guess is accepted; `before` are a Markov head's embeddings, where it reads them."""

    weight: Float[Tensor, " inputs"]
    bias: Float[Tensor, ""]
    before: Float[Tensor, "vocab rank"] | None

    def __call__(self, states: Float[Tensor, "rows hidden"], tokens: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Of the guesses after these tokens, from 0 to 1."""
        read = [states.float()] if self.before is None else [states.float(), self.before[tokens].float()]
        return torch.sigmoid((torch.cat(read, dim=1) * self.weight).sum(-1) + self.bias)


@dataclass(frozen=True, slots=True)
class BlockHeads:
    """The heads of one drafter; None where it has no such head."""

    after: MarkovHead | CandidateSelector | None
    confidence: ConfidenceHead | None

    @classmethod
    def load(cls, tensors: BlockTensors, checkpoint: Checkpoint, make: MakeLinear, spread: SpreadLogits) -> BlockHeads:
        """All that the configuration names."""
        c, shapes = tensors.config, tensors.shapes()

        def take(name: str) -> Tensor:
            return checkpoint.take(name, shapes[name])

        before = take(MARKOV_W1) if c.markov_rank else None
        after: MarkovHead | CandidateSelector | None = None
        if before is not None:
            after = MarkovHead(before, make(take(MARKOV_W2)), spread)
        elif c.selector_rank:
            after = CandidateSelector(take(PREDECESSORS), take(SUCCESSORS), make(take(SELECTOR)), c.top_k)
        if not c.confidence:
            return cls(after, None)
        weight, bias = take(CONFIDENCE)[0].float(), take(CONFIDENCE_BIAS)[0].float()
        return cls(after, ConfidenceHead(weight, bias, before if c.confidence_with_markov else None))


def product(linear: Linear, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
    """The layer's, for any number of rows."""
    return linear(pad_rows(x, padded_rows(len(x))))[: len(x)]
