"""Block drafters (DFlash, 2602.06036): a few layers that predict an entire block of tokens in one pass.

The context is the target's states of the final text, concatenated and mapped to one state per token; every layer
computes its keys and values directly from it. A block is the root's embedding followed by mask tokens: one per further
draft token if the block is `causal`, otherwise as many as the block size, with positions that see each other. The
output at a position gives the logits of one draft token. Embedding and head are the target's, unless the folder has its
own. The cache keeps keys and values of the context only; chains and trees grow from the outputs without another pass.

The positions of a block do not see each other's draft tokens. A Markov head (DSpark, 2607.05147) adds a low-rank bias
that depends on the previous token. A candidate selector (DFlash 2) keeps the top tokens of a position and adds a score
of each one's pair with the previous token, weighted by the state. Both are applied from left to right. The confidence
head estimates the probability that a draft token is accepted if those before it are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.draft.base import Budget, Draft
from forerun.draft.model.drafted_text import DraftedText, DraftRow, RootPass
from forerun.draft.model.grower import grow_by_heads, packed_inputs
from forerun.draft.model.tap_follower import TapFollower
from forerun.heads.block import format as names
from forerun.heads.block.convert import BLOCK, LAYOUTS
from forerun.heads.block.format import BlockTensors, layer_ids
from forerun.heads.block.student import BlockStudent
from forerun.heads.blueprint import HeadParts, StateBlueprint, WideDrafter, widened_layers, widened_tap
from forerun.heads.folder import HeadFolder
from forerun.heads.vocabulary import id_map_of
from forerun.models.batch import TokenBatch
from forerun.models.chains import HeadInputs, IdMap, MaskedPositions, ParallelHeads, UnreadTexts
from forerun.models.decoder import Decoder, LayerOutputs, Outputs
from forerun.models.layer import Linear
from forerun.models.projections import ADDING, HEAD
from forerun.models.rows import product, rms_norm
from forerun.models.runner import DeviceTokens, Read, Runner
from forerun.models.widen import Plan
from forerun.sampling.draws import Draws
from forerun.sampling.winners import largest

MASKED = -1  # the token of a masked position


class BlockDecoder(Decoder):
    """The layers as a decoder, with the further heads on its output states: `after` and `confidence`, None if absent.

    A pass reads either the target's states as context, or the tokens of blocks. `ids` are the token ids of its head.
    """

    has_plain_forward: ClassVar[bool] = False

    def __init__(self, tensors: BlockTensors, folder: HeadFolder, target: Decoder, ids: Int[Tensor, " ids"]) -> None:
        c, shapes, take = tensors.config, tensors.shapes(), folder.take

        def fetch(name: str, _shape: tuple[int, ...]) -> Tensor:
            name = name.removeprefix("model.")
            return take(name) if name in shapes else target.embedding

        weights = folder.weights(fetch)
        own_head = weights.head(take(HEAD).to(target.dtype)) if tensors.own_head else None
        super().__init__(c.layers, weights, head=own_head or folder.shared_head(ids, target))
        self.block = c
        self.fc, self.hidden_norm = folder.make(take(names.MAP)), take(names.MAP_NORM)
        self.mask = take(names.MASK_EMBEDDING) if c.mask_id is None else self.embedding[c.mask_id]
        before = take(names.MARKOV_W1) if c.markov_rank else None
        self.after: MarkovHead | CandidateSelector | None = None
        if before is not None:
            id_map = id_map_of(ids, c.layers.vocab_size, target.embedding.device)
            self.after = MarkovHead(before, folder.make(take(names.MARKOV_W2)), id_map.target_logits)
        elif c.selector_rank:
            projection = folder.make(take(names.SELECTOR))
            self.after = CandidateSelector(take(names.PREDECESSORS), take(names.SUCCESSORS), projection, c.top_k)
        self.confidence: ConfidenceHead | None = None
        if c.confidence:
            weight, bias = (take(name)[0].float() for name in (names.CONFIDENCE, names.CONFIDENCE_BIAS))
            self.confidence = ConfidenceHead(weight, bias, before if c.confidence_with_markov else None)

    def fuse(self, states: Float[Tensor, "total taps target_hidden"]) -> Float[Tensor, "total hidden"]:
        """The context: the target's states at the taps, concatenated, mapped to one state, and normed."""
        fused = product(self.fc, states.flatten(1).to(self.stream_dtype))
        return rms_norm(fused, self.hidden_norm, self.config.norm_eps)

    def forward(
        self, batch: TokenBatch, cache: PagedCache, *, inputs: Float[Tensor, "total hidden"] | None = None, **more: Any
    ) -> LayerOutputs:
        """Write the keys and values of the context `inputs` to the cache; without `inputs`, run the layers on blocks.

        The tokens of masked positions are MASKED.
        """
        assert not any(more.values()), "a block decoder has no taps and runs all layers"
        if inputs is not None:
            self.executor.write_kv(inputs, batch, cache)
            return LayerOutputs(inputs, None)
        masked = (batch.tokens == MASKED)[:, None]
        embedded = torch.where(masked, self.mask, self.embedding[batch.tokens.clamp(min=0)]).to(self.stream_dtype)
        seen = batch if self.block.causal else batch.bidirectional()
        return LayerOutputs(self.executor.run(range(len(self.layers)), embedded, seen, cache), None)

    def states(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        """The normed output of the last layer, which the heads read."""
        return rms_norm(hidden, self.norm, self.config.norm_eps)

    def next_logits(
        self, inputs: HeadInputs, path: Int[Tensor, "rows path"], normed: bool = True
    ) -> Float[Tensor, "rows vocab"]:
        """The logits of the next token: those at its position, after the head that reads the token before it.

        `normed`: whether the states of `inputs` are normed, unlike the outputs of a pass.
        """
        logits = inputs.next_logits(path)
        if self.after is None:
            return logits
        states = inputs.next_states(path)
        return self.after(logits, states if normed else self.states(states), path[:, -1])

    def next_confidence(self, inputs: HeadInputs, path: Int[Tensor, "rows path"]) -> Float[Tensor, " rows"]:
        """The acceptance probability of the next draft token, from normed states."""
        assert self.confidence is not None, "only called with a confidence head"
        return self.confidence(inputs.next_states(path), path[:, -1])


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """Adds a low-rank bias, which depends on the previous token, to a position's logits."""

    before: Float[Tensor, "vocab rank"]
    after: Linear
    target_logits: Callable[[Tensor], Tensor]  # from logits over the head's ids

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], states: Float[Tensor, "rows hidden"], tokens: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows vocab"]:
        """The logits after the previous `tokens`; the states are not used."""
        return logits + self.target_logits(product(self.after, self.before[tokens]).float())


@dataclass(frozen=True, slots=True)
class CandidateSelector:
    """Keeps the `top_k` tokens of a position and adds a score of each one's pair with the previous token."""

    predecessors: Float[Tensor, "vocab rank"]
    successors: Float[Tensor, "vocab rank"]
    projection: Linear
    top_k: int

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], states: Float[Tensor, "rows hidden"], tokens: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows vocab"]:
        """The logits after the previous `tokens`; -inf for all tokens that are not candidates."""
        candidates = largest(logits, self.top_k)
        query = self.predecessors[tokens].float() * product(self.projection, states).float()
        pairs = (query[:, None] * self.successors[candidates].float()).sum(-1)
        return torch.full_like(logits, -math.inf).scatter_(1, candidates, logits.gather(1, candidates) + pairs)


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """Estimates a draft token's acceptance probability; `before` are the Markov head's embeddings, if it reads them."""

    weight: Float[Tensor, " inputs"]
    bias: Float[Tensor, ""]
    before: Float[Tensor, "vocab rank"] | None

    def __call__(self, states: Float[Tensor, "rows hidden"], tokens: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """The acceptance probability of the draft tokens after the previous `tokens`."""
        read = [states.float()] if self.before is None else [states.float(), self.before[tokens].float()]
        return torch.sigmoid((torch.cat(read, dim=1) * self.weight).sum(-1) + self.bias)


class BlockDrafter(TapFollower):
    """Drafts with block layers, which `runner` runs, and the heads on their output states."""

    names: tuple[str, ...] = ("block",)

    def __init__(self, layers: BlockDecoder, runner: Runner, ids: IdMap) -> None:
        super().__init__(runner, ids)
        self.draws_after_text = runner.draws_unseen  # no wait for the host between text and draft tokens
        self.decoder, self.taps = layers, layers.block.taps
        self.blocks: dict[int, Float[Tensor, "places hidden"]] = {}  # output states at the predicting positions

    def run(self, reads: Sequence[Read], drawn: DeviceTokens | None = None, features: Tensor | None = None) -> Outputs:
        """Read final text as context (`features`), or blocks, whose output states are saved for the heads."""
        if features is not None:
            return self.runner.read(reads, inputs=self.decoder.fuse(features))
        states = self.runner.read(reads)
        outputs = self.decoder.states(states.hidden).split([len(read.tokens) for read in reads])
        self.blocks = {r.seq_id: rows[r.judged[0] : r.judged[-1] + 1] for r, rows in zip(reads, outputs, strict=True)}
        return states

    def max_depth(self, drafted: DraftedText, after_text: Sequence[int]) -> int:
        """The greatest depth after the text; a block that is not causal must fit entirely."""
        return 0 if drafted.lost else self.decoder.block.deepest(self.window - len(drafted.text))

    def read_roots(self, rows: list[DraftRow]) -> RootPass:
        """Read the blocks; returns the rows that fit the cache, and the logits of all their draft tokens."""
        first = self.decoder.block.first
        judged = [range(first, first + row.budget.depth) for row in rows]
        reads = [Read(row.seq_id, self.block_of(row), judged=places) for row, places in zip(rows, judged, strict=True)]
        return self.read_fitting(reads, rows)

    def block_of(self, row: DraftRow) -> Sequence[int]:
        """The tokens of a block: the root, then masked positions."""
        return [*row.after_text, *[MASKED] * (self.decoder.block.num_places(row.budget.depth) - 1)]

    def unread_texts(self, reads: Sequence[Read]) -> UnreadTexts:
        """The unread text as context; it has no outputs."""
        return UnreadTexts([read.tokens for read in reads], self.states.of(reads), None, self.decoder.fuse)

    def parallel_heads(self, rows: Sequence[DraftRow]) -> ParallelHeads:
        """The heads that predict all draft tokens at the positions of one block."""
        block = self.decoder.block
        places = MaskedPositions([*map(self.block_of, rows)], block.num_places, block.first)
        return ParallelHeads(partial(self.decoder.next_logits, normed=False), places=places)

    def grow(self, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "places vocab"]) -> Draft:
        """Chains, or trees of any shape, without another pass of the layers."""
        layers, states = self.decoder, torch.cat([self.blocks[seq_id] for seq_id in granted])
        inputs, unseen = packed_inputs(granted, logits, states), self.runner.draws_unseen
        confidence = layers.next_confidence if layers.confidence else None
        return grow_by_heads(draws, granted, layers.next_logits, inputs, unseen, confidence=confidence)

    def finish(self, draws: Draws, draft: Draft, granted: Mapping[int, Budget]) -> Draft:
        """The draft; the blocks are dropped from the cache."""
        self.runner.drop(list(granted))
        self.blocks = {}
        return draft


class BlockBlueprint(StateBlueprint):
    """`block:DIR`: a checked drafter that is not loaded yet."""

    method, decoder = BLOCK, BlockDecoder
    tensors: BlockTensors

    def drafter(self, layers: BlockDecoder, runner: Runner, ids: IdMap) -> BlockDrafter:
        return BlockDrafter(layers, runner, ids)

    def widened(self, plan: Plan) -> WideDrafter:
        """The widened layers, map of states, and further heads."""
        tensors = self.tensors
        layers = widened_layers(tensors.config.layers, plan, self.folder.name)
        taps = tuple(widened_tap(plan, tap) for tap in tensors.config.taps)
        wide = replace(
            tensors, config=replace(tensors.config, layers=layers, taps=taps), target_hidden=plan.wide.hidden
        )
        options = self.folder.fields.inside(names.NESTED).values
        options = {**options, names.TAP_IDS: layer_ids(taps, plan.wide.layers)}
        shapes, writers = (tensors.shapes(), wide.shapes()), (names.MAP, names.MASK_EMBEDDING)
        return WideDrafter.of_layers(
            self.folder, shapes, layers, {names.NESTED: options}, writers, inner=(*ADDING, *names.RANKED)
        )


PARTS = HeadParts(BlockBlueprint, BlockStudent.fresh, LAYOUTS)
