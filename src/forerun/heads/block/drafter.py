"""Block drafters: one pass over masked places guesses several tokens at once, as DFlash and DSpark do (2602.06036).

This module decides what a block reads and how its logits become guesses. The target's states of final text are read as
they are shown, so nothing is left to be read before a draft but the block itself: the root and masked places behind it,
as many as the depth asks for, or the whole block where its places see each other. Its keys and values are dropped after
the pass. From then on chains and trees grow without another pass of the layers: the logits of a place are those of
every guess at that depth, and the heads add what follows from the token before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.cache.plan import ModelMemory
from forerun.draft.base import NO_DRAFT, Budget, Draft
from forerun.draft.model.drafted_text import DraftedText, DraftRow, RootPass
from forerun.draft.model.follower import Follower
from forerun.draft.model.parallel_heads import Paths, first_places, grow_ahead
from forerun.draft.plan import CacheTokens, DraftContext, DraftPlan, refuse
from forerun.draft.spec import DraftSpec
from forerun.heads.block.format import INSIDE, MAP, MASK_EMBEDDING, RANKED, TAP_IDS, BlockTensors, layer_ids
from forerun.heads.block.network import MASKED, BlockDecoder
from forerun.heads.folder import HeadFolder, LoadedHeads, OpenFolder
from forerun.heads.vocabulary import MASK, OFFSETS, DraftVocabulary, read_ids
from forerun.heads.widened import INNER, WideDrafter, layer_fields, widened_layers, widened_tap
from forerun.models.chains import IdExchange, SameIds
from forerun.models.decoder import Decoder, States
from forerun.models.runner import DeviceTokens, Read, Runner
from forerun.models.widen import WRITERS, Plan
from forerun.sampling.draws import Draws


class BlockDrafter(Follower):
    """Drafts with the `layers` of a block, and with the heads on their states."""

    names: tuple[str, ...] = ("block",)
    rereads: ClassVar[bool] = False

    def __init__(self, layers: LoadedHeads[BlockDecoder], ids: IdExchange) -> None:
        super().__init__(layers.runner, ids)
        self.decoder = layers.decoder
        self.heads = self.decoder.heads
        self.taps = self.decoder.block.taps
        self.blocks: dict[int, Float[Tensor, "places hidden"]] = {}  # the states behind the guessing places

    def run(self, reads: Sequence[Read], drawn: DeviceTokens | None = None, features: Tensor | None = None) -> States:
        """Final text is read as context; a block's states are kept for the heads."""
        if features is not None:
            return self.runner.read(reads, inputs=self.decoder.fuse(features))
        states = self.runner.read(reads)
        own = self.decoder.states(states.hidden).split([len(read.tokens) for read in reads])
        self.blocks = {read.seq_id: rows[list(read.judged)] for read, rows in zip(reads, own, strict=True)}
        return states

    def room(self, drafted: DraftedText, late: Sequence[int]) -> int:
        """The deepest draft behind the text: the whole block has to fit where its places see each other."""
        return 0 if drafted.lost else self.decoder.block.deepest(self.window - len(drafted.text))

    def read_roots(self, wishes: list[DraftRow]) -> RootPass:
        """Read the blocks. Gives the wishes that had room, and the logits of all of their guesses."""
        block, reads = self.decoder.block, []
        for wish in wishes:
            masks = [MASKED] * (block.num_places(wish.budget.depth) - 1)
            places = range(block.first, block.first + wish.budget.depth)
            reads.append(Read(wish.seq_id, [*wish.late, *masks], judged=places))
        return self.read_fitting(reads, wishes)

    def grow(self, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "places vocab"]) -> Draft:
        """Chains, or trees of any shape, without another pass of the layers."""
        firsts = first_places(draws, granted)
        states = torch.cat([self.blocks[seq_id] for seq_id in granted])

        def places(own: Sequence[int], paths: Paths) -> tuple[Tensor, Tensor]:
            """Where the guesses behind these are guessed, and the tokens before them."""
            at = [firsts[row] + len(path) for row, path in zip(own, paths, strict=True)]
            tokens = [path[-1] if path else draws.rows[row].tokens[-1] for row, path in zip(own, paths, strict=True)]
            return torch.tensor(at), torch.tensor(tokens)

        def ahead(own: Sequence[int], paths: Paths) -> Tensor:
            started_s = time.perf_counter()
            at, before = places(own, paths)
            found = logits[at] if self.heads.after is None else self.heads.after(logits[at], states[at], before)
            self.pass_s += time.perf_counter() - started_s
            return found

        def confidence(own: Sequence[int], paths: Paths) -> Sequence[float]:
            assert self.heads.confidence is not None, "there is a head to ask"
            at, before = places(own, paths)
            found: list[float] = self.heads.confidence(states[at], before).tolist()
            return found

        budgets = [granted.get(seq_id, NO_DRAFT) for seq_id in draws.seq_ids]
        return grow_ahead(draws, budgets, ahead, confidence if self.heads.confidence else None)

    def finish(self, draws: Draws, draft: Draft, granted: Mapping[int, Budget]) -> Draft:
        """The draft; nothing is left of the blocks."""
        self.runner.drop(list(granted))
        self.blocks = {}
        return draft


@dataclass(frozen=True, slots=True)
class BlockBlueprint:
    """A drafter that was checked, but that is not loaded; `ids` are between those of its head and the target's."""

    folder: HeadFolder
    tensors: BlockTensors
    ids: IdExchange

    @classmethod
    def of(cls, folder: HeadFolder) -> BlockBlueprint:
        """The drafter in a folder. Raises ModelError for one that cannot be used."""
        folder.refuse_devices("block drafters")
        target, checkpoint = folder.target, folder.checkpoint
        tensors = BlockTensors.of(folder.fields, target.config, target.name, checkpoint.stored)
        folder.check(tensors.shapes(), "a block drafter with these fields", (OFFSETS, MASK))
        size = target.config.vocab_size
        if tensors.draft_vocab == size and OFFSETS not in checkpoint:
            return cls(folder, tensors, SameIds(size, size))
        return cls(folder, tensors, DraftVocabulary(size, read_ids(checkpoint, tensors.draft_vocab, size)))

    @property
    def memory(self) -> ModelMemory:
        """What it takes once loaded."""
        return self.folder.memory(self.tensors.config.layers, self.tensors.shapes(), self.tensors.tables)

    def load(self, num_tokens: int, max_model_len: int, target: Decoder) -> LoadedHeads[BlockDecoder]:
        """The layers with a cache of `num_tokens`, for texts of `max_model_len` at most, and what stands on them."""
        config = self.tensors.config
        positions = min(max_model_len + config.block_size, config.layers.max_positions)
        tensors = replace(self.tensors, config=replace(config, layers=replace(config.layers, max_positions=positions)))
        return LoadedHeads.of(BlockDecoder(tensors, self.folder, target, self.ids.spread), num_tokens)

    def widened(self, plan: Plan) -> WideDrafter:
        """The layers, the map of the states that they read, and what stands on their own."""
        tensors = self.tensors
        layers = widened_layers(tensors.config.layers, plan, self.folder.name)
        taps = tuple(widened_tap(plan, tap) for tap in tensors.config.taps)
        config = replace(tensors.config, layers=layers, taps=taps)
        inside = {**self.folder.fields.inside(INSIDE).values, TAP_IDS: layer_ids(taps, plan.wide.layers)}
        fields = layer_fields(layers) | {"vocab_size": layers.vocab_size, INSIDE: inside}
        wide = replace(tensors, config=config, target_hidden=plan.wide.hidden).shapes()
        writers = (*WRITERS, MAP, MASK_EMBEDDING)
        inner = (*INNER, *RANKED)
        return WideDrafter(self.folder, tensors.shapes(), wide, fields, writers, layers.qk_norm, inner=inner)


def plan_block(spec: DraftSpec, context: DraftContext, open_folder: OpenFolder) -> DraftPlan:
    """`block:DIR`: layers that guess a block of tokens in one pass, with a cache of their own."""
    if spec.argument is None:
        refuse(spec, "name the folder with the layers, as in block:DIR")
    name, block = str(spec), BlockBlueprint.of(open_folder(spec.argument))

    def build(cache_tokens: CacheTokens, _progress: ProgressCallback | None, target: Runner) -> BlockDrafter:
        layers = block.load(cache_tokens[name], target.decoder.config.max_positions, target.decoder)
        return BlockDrafter(layers, block.ids)

    return DraftPlan({name: block.memory}, build, block.folder.fingerprint)
