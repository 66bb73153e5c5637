"""Block drafters: one pass over masked places guesses several tokens at once, as DFlash and DSpark do (2602.06036).

This module decides what a block reads and how its logits become guesses. Behind the target's states of final text a
draft reads the block itself: the root and masked places behind it, as many as the depth asks for, or the whole block
where its places see each other. Its keys and values are dropped after
the pass. From then on chains and trees grow without another pass of the layers: the logits of a place are those of
every guess at that depth, and the heads add what follows from the token before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.plan import ModelMemory
from forerun.draft.base import Budget, Draft
from forerun.draft.model.drafted_text import DraftedText, DraftRow, RootPass
from forerun.draft.model.fed_follower import FedFollower
from forerun.draft.model.grower import grow_by_heads, places_of
from forerun.heads.block import format as names
from forerun.heads.block.convert import LAYOUTS
from forerun.heads.block.format import BlockTensors, layer_ids
from forerun.heads.block.network import MASKED, BlockDecoder
from forerun.heads.block.student import BlockStudent
from forerun.heads.blueprint import FolderBlueprint, HeadParts, WideDrafter, widened_layers, widened_tap
from forerun.heads.folder import HeadFolder
from forerun.heads.vocabulary import MASK, OFFSETS, exchange_of, read_ids
from forerun.models.chains import Foreseen, HeadsAhead, IdExchange, MaskedPlaces, UnreadTexts
from forerun.models.decoder import Decoder, States
from forerun.models.projections import ADDING
from forerun.models.runner import DeviceTokens, Read, Runner
from forerun.models.widen import Plan
from forerun.sampling.draws import Draws


class BlockDrafter(FedFollower):
    """Drafts with the `layers` of a block, which `runner` reads through, and the heads on their states."""

    names: tuple[str, ...] = ("block",)

    def __init__(self, layers: BlockDecoder, runner: Runner, ids: IdExchange) -> None:
        super().__init__(runner, ids)
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

    @property
    def draws_behind_text(self) -> bool:
        """On devices, which do not wait for the host between guesses."""
        return self.runner.draws_unseen

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
