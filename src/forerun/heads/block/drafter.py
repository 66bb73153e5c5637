"""Block drafters: a few layers that guess a whole block of tokens in one pass, from a target's states (2602.06036).

The target's states of final text, joined and mapped to one state each, are context: every layer makes keys and values
of them, and they pass through no layer. A block is the root's embedding and masked places behind it, as many as the
depth asks for, or the whole block where its places see each other. They read the context and each other, or those
before them alone where the block is `causal`, and the state behind a place gives the logits of one guess. Embedding and
head are the target's. The cache holds the context's keys and values; those of a block are dropped after its pass. From
then on chains and trees grow without another pass of the layers.

A block's places do not see what the places before them guess. A Markov head (DSpark, 2607.05147) adds a low-rank bias
that the token before decides. A candidate selector (DFlash 2) keeps the likeliest tokens of a place, and adds to each a
score of the pair that it makes with the token before it, which the place's state weighs. Both are read from left to
right, at the cost of a product with the vocabulary or with some candidates. The confidence head estimates with which
chance a place's guess is accepted, if those before it are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.cache.plan import ModelMemory
from forerun.draft.base import Budget, Draft
from forerun.draft.model.drafted_text import DraftedText, DraftRow, RootPass
from forerun.draft.model.fed_follower import FedFollower
from forerun.draft.model.grower import grow_by_heads, places_of
from forerun.heads.block import format as names
from forerun.heads.block.convert import LAYOUTS
from forerun.heads.block.format import BlockTensors, layer_ids
from forerun.heads.block.student import BlockStudent
from forerun.heads.blueprint import FolderBlueprint, HeadParts, WideDrafter, widened_layers, widened_tap
from forerun.heads.folder import HeadFolder
from forerun.heads.vocabulary import MASK, OFFSETS, exchange_of, read_ids
from forerun.models.batch import TokenBatch
from forerun.models.chains import Foreseen, HeadsAhead, IdExchange, MaskedPlaces, UnreadTexts
from forerun.models.decoder import Decoder, Hidden, States
from forerun.models.layer import Linear
from forerun.models.projections import ADDING
from forerun.models.rows import product, rms_norm
from forerun.models.runner import DeviceTokens, Read, Runner
from forerun.models.widen import Plan
from forerun.sampling.draws import Draws
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


class BlockDrafter(FedFollower):
    """Drafts with the `layers` of a block, which `runner` reads through, and the heads on their states."""

    names: tuple[str, ...] = ("block",)

    def __init__(self, layers: BlockDecoder, runner: Runner, ids: IdExchange) -> None:
        super().__init__(runner, ids)
        self.draws_behind_text = runner.draws_unseen  # and does not wait for the host between guesses
        self.decoder, self.heads, self.taps = layers, layers.heads, layers.block.taps
        self.blocks: dict[int, Float[Tensor, "places hidden"]] = {}  # the states behind the guessing places

    def run(self, reads: Sequence[Read], drawn: DeviceTokens | None = None, features: Tensor | None = None) -> States:
        """Final text is read as context; a block's states are kept for the heads."""
        if features is not None:
            return self.runner.read(reads, inputs=self.decoder.fuse(features))
        states = self.runner.read(reads)
        outputs = self.decoder.states(states.hidden).split([len(read.tokens) for read in reads])
        self.blocks = {r.seq_id: rows[r.judged[0] : r.judged[-1] + 1] for r, rows in zip(reads, outputs, strict=True)}
        return states

    def room(self, drafted: DraftedText, late: Sequence[int]) -> int:
        """The deepest draft behind the text: the whole block has to fit where its places see each other."""
        return 0 if drafted.lost else self.decoder.block.deepest(self.window - len(drafted.text))

    def read_roots(self, rows: list[DraftRow]) -> RootPass:
        """Read the blocks. Gives the rows that had room, and the logits of all of their guesses."""
        first = self.decoder.block.first
        judged = [range(first, first + row.budget.depth) for row in rows]
        reads = [Read(row.seq_id, self.block_of(row), judged=places) for row, places in zip(rows, judged, strict=True)]
        return self.read_fitting(reads, rows)

    def block_of(self, row: DraftRow) -> Sequence[int]:
        """The root and the masked places behind it."""
        return [*row.late, *[MASKED] * (self.decoder.block.num_places(row.budget.depth) - 1)]

    def unread_texts(self, reads: Sequence[Read]) -> UnreadTexts:
        """Context, which nothing is guessed from."""
        return UnreadTexts([read.tokens for read in reads], self.states.of(reads), None, self.decoder.fuse)

    def heads_ahead(self, rows: Sequence[DraftRow]) -> HeadsAhead:
        """All guesses are made at the places of a block."""

        def logits(foreseen: Foreseen, path: Tensor) -> Tensor:
            level, after = path.shape[1] - 1, self.heads.after
            assert foreseen.logits is not None, "blocks are read"
            assert foreseen.states is not None, "blocks are read"
            at_place = foreseen.logits[:, level]
            return at_place if after is None else after(at_place, layers.states(foreseen.states[:, level]), path[:, -1])

        layers, block = self.decoder, self.decoder.block
        return HeadsAhead(logits, places=MaskedPlaces([*map(self.block_of, rows)], block.num_places, block.first))

    def grow(self, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "places vocab"]) -> Draft:
        """Chains, or trees of any shape, without another pass of the layers."""
        places, states = places_of(granted), torch.cat([self.blocks[seq_id] for seq_id in granted])
        after, sure = self.heads.after, self.heads.confidence

        def logits_behind(seq_ids: Sequence[int], path: Tensor) -> Tensor:
            at = places(seq_ids, path)
            return logits[at] if after is None else after(logits[at], states[at], path[:, -1])

        def confidence(seq_ids: Sequence[int], path: Tensor) -> Tensor:
            assert sure is not None, "there is a head to ask"
            return sure(states[places(seq_ids, path)], path[:, -1])

        unseen = self.runner.draws_unseen
        return grow_by_heads(draws, granted, logits_behind, unseen, confidence=confidence if sure else None)

    def finish(self, draws: Draws, draft: Draft, granted: Mapping[int, Budget]) -> Draft:
        """The draft; nothing is left of the blocks."""
        self.runner.drop(list(granted))
        self.blocks = {}
        return draft


@dataclass(frozen=True, slots=True)
class BlockBlueprint(FolderBlueprint):
    """`block:DIR`: a drafter that was checked, not loaded; `ids` are the target's of its head's tokens."""

    folder: HeadFolder
    tensors: BlockTensors
    ids: Int[Tensor, " draft_vocab"]

    @classmethod
    def of(cls, folder: HeadFolder) -> BlockBlueprint:
        target, checkpoint = folder.target, folder.checkpoint
        tensors = BlockTensors.of(folder.fields, target.config, target.name, checkpoint.stored)
        folder.check(tensors.shapes(), names.TITLE, (OFFSETS, MASK))
        size = target.config.vocab_size
        return cls(folder, tensors, read_ids(checkpoint, tensors.draft_vocab, size))

    @property
    def memory(self) -> ModelMemory:
        tensors = self.tensors
        shared = 0 if tensors.own_head else len(self.ids)
        return self.folder.memory(tensors.config.layers, tensors.shapes(), tensors.tables, shared)

    def load(self, max_model_len: int, target: Decoder) -> BlockDecoder:
        """The layers and what stands on them, for texts of `max_model_len` at most."""
        config, layers = self.tensors.config, self.tensors.config.layers
        layers = replace(layers, max_positions=min(max_model_len + config.block_size, layers.max_positions))
        tensors = replace(self.tensors, config=replace(config, layers=layers))
        return BlockDecoder(tensors, self.folder, target, self.ids)

    def build(self, num_tokens: int, target: Runner) -> BlockDrafter:
        config = target.decoder.config
        layers = self.load(config.max_positions, target.decoder)
        runner = self.folder.target.runner(layers, num_tokens)
        return BlockDrafter(layers, runner, exchange_of(self.ids, config.vocab_size, target.device))

    def widened(self, plan: Plan) -> WideDrafter:
        """The layers, the map of the states that they read, and what stands on their own."""
        tensors = self.tensors
        layers = widened_layers(tensors.config.layers, plan, self.folder.name)
        taps = tuple(widened_tap(plan, tap) for tap in tensors.config.taps)
        wide = replace(
            tensors, config=replace(tensors.config, layers=layers, taps=taps), target_hidden=plan.wide.hidden
        )
        inside = {**self.folder.fields.inside(names.INSIDE).values, names.TAP_IDS: layer_ids(taps, plan.wide.layers)}
        shapes, writers = (tensors.shapes(), wide.shapes()), (names.MAP, names.MASK_EMBEDDING)
        return WideDrafter.of_layers(
            self.folder, shapes, layers, {names.INSIDE: inside}, writers, inner=(*ADDING, *names.RANKED)
        )


PARTS = HeadParts(names.SIGNS, BlockBlueprint, BlockStudent.fresh, LAYOUTS)
