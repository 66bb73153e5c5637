"""Block drafters: a few layers that guess a whole block of tokens in one pass, from a target's states (2602.06036).

The target's states of final text, joined and mapped to one state each, are context: every layer makes keys and values
of them, and they pass through no layer. A block is the root's embedding and masked places behind it. Its places read
the context and each other, or those before them alone where the block is `causal`, and the state behind a place gives
the logits of one guess. Embedding and head are the target's.

The cache holds the context's keys and values. Those of a block are of no use after its pass.

A block's places do not see what the places before them guess. A Markov head (DSpark, 2607.05147) adds a low-rank bias
that the token before decides. A candidate selector (DFlash 2) keeps the likeliest tokens of a place, and adds to each a
score of the pair that it makes with the token before it, which the place's state weighs. Both are read from left to
right, at the cost of a product with the vocabulary or with some candidates. The confidence head estimates with which
chance a place's guess is accepted, if those before it are. The file decides how all this is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.heads.block import format as names
from forerun.heads.block.format import BlockTensors
from forerun.heads.folder import HeadFolder
from forerun.heads.vocabulary import exchange_of
from forerun.models.batch import TokenBatch
from forerun.models.decoder import Decoder, Hidden
from forerun.models.layer import Linear
from forerun.models.rows import product, rms_norm
from forerun.sampling.winners import largest

MASKED = -1  # stands for the token of a masked place
SpreadLogits = Callable[[Tensor], Tensor]  # logits over the head's own ids to those over the target's


class BlockDecoder(Decoder):
    """The layers as a decoder, with `heads` on its states.

    It reads the target's states as context, if given any, and else the tokens of blocks. `ids` are the
    tokens of its head.
    """

    layers_alone: ClassVar[bool] = False

    def __init__(self, tensors: BlockTensors, folder: HeadFolder, target: Decoder, ids: Int[Tensor, " ids"]) -> None:
        shapes, self.block = tensors.shapes(), tensors.config

        def take(name: str, _shape: tuple[int, ...]) -> Tensor:
            name = name.removeprefix("model.")
            return folder.take(name, shapes[name]) if name in shapes else target.embedding

        quantize = folder.quantize
        if tensors.own_head:
            head = folder.backend.linear(take(names.HEAD, ()).to(target.dtype), quantize="int8" if quantize else None)
        else:
            head = folder.shared_head(ids, target)
        super().__init__(tensors.config.layers, take, target.dtype, folder.backend, quantize, head=head)
        exchange = exchange_of(ids, tensors.config.layers.vocab_size, target.embedding.device)
        self.heads = BlockHeads.load(tensors, folder, exchange.spread)
        self.fc = folder.make(take(names.MAP, ()))
        self.hidden_norm = take(names.MAP_NORM, ())
        mask_id = self.block.mask_id
        self.mask = take(names.MASK_EMBEDDING, ()) if mask_id is None else self.embedding[mask_id]

    def fuse(self, states: Float[Tensor, "total taps target_hidden"]) -> Float[Tensor, "total hidden"]:
        """The target's states as context: joined, mapped to one, and normed."""
        return rms_norm(product(self.fc, states.flatten(1).to(self.stream)), self.hidden_norm, self.config.norm_eps)

    def forward(
        self, batch: TokenBatch, cache: PagedCache, *, inputs: Float[Tensor, "total hidden"] | None = None, **more: Any
    ) -> Hidden:
        """Put context into the cache, which is `inputs`; without it read blocks, whose masked places are MASKED."""
        assert not any(more.values()), "all layers are read, and nobody reads their states"
        if inputs is not None:
            self.executor.remember(inputs, batch, cache)
            return Hidden(inputs, None)
        masked = (batch.tokens == MASKED)[:, None]
        embedded = torch.where(masked, self.mask, self.embedding[batch.tokens.clamp(min=0)]).to(self.stream)
        seen = batch if self.block.causal else batch.all_seen()
        return Hidden(self.executor.run(range(len(self.layers)), embedded, seen, cache), None)

    def states(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        """What the heads read of the stream behind the last layer."""
        return rms_norm(hidden, self.norm, self.config.norm_eps)


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
        query = self.predecessors[tokens].float() * product(self.projection, states).float()
        pairs = (query[:, None] * self.successors[candidates].float()).sum(-1)
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
    def load(cls, tensors: BlockTensors, folder: HeadFolder, spread: SpreadLogits) -> BlockHeads:
        """All that the configuration names."""
        c, shapes, make = tensors.config, tensors.shapes(), folder.make

        def take(name: str) -> Tensor:
            return folder.take(name, shapes[name])

        before = take(names.MARKOV_W1) if c.markov_rank else None
        after: MarkovHead | CandidateSelector | None = None
        if before is not None:
            after = MarkovHead(before, make(take(names.MARKOV_W2)), spread)
        elif c.selector_rank:
            after = CandidateSelector(
                take(names.PREDECESSORS), take(names.SUCCESSORS), make(take(names.SELECTOR)), c.top_k
            )
        if not c.confidence:
            return cls(after, None)
        weight, bias = take(names.CONFIDENCE)[0].float(), take(names.CONFIDENCE_BIAS)[0].float()
        return cls(after, ConfidenceHead(weight, bias, before if c.confidence_with_markov else None))
