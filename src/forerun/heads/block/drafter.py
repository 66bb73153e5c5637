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
from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.draft.base import NO_DRAFT, Budget, Draft
from forerun.draft.model.ahead import Paths, first_places, grow_ahead
from forerun.draft.model.drafted_text import DraftedText, DraftRow, RootPass
from forerun.draft.model.follower import Follower
from forerun.draft.plan import CacheTokens, DraftContext, DraftPlan, refuse, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.heads.block.block_heads import BlockHeads
from forerun.heads.block.network import MASKED, BlockDecoder, plan_block_drafter
from forerun.models.chains import IdExchange
from forerun.models.runner import DeviceTokens, Read, Runner, States
from forerun.sampling.draws import Draws


class BlockDrafter(Follower):
    """Drafts with a `runner` whose decoder is a BlockDecoder, and with the heads on its states."""

    arms: tuple[str, ...] = ("block",)
    rereads: ClassVar[bool] = False

    def __init__(self, runner: Runner, heads: BlockHeads, ids: IdExchange) -> None:
        super().__init__(runner, ids)
        assert isinstance(runner.decoder, BlockDecoder), "it reads states as context"
        self.decoder = runner.decoder
        self.heads = heads
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

    def room(self, following: DraftedText, late: Sequence[int]) -> int:
        """The deepest draft behind the text: the whole block has to fit where its places see each other."""
        return 0 if following.lost else self.decoder.block.deepest(self.window - len(following.text))

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


def plan_block(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`block:DIR`: layers that guess a block of tokens in one pass, with a cache of their own."""
    refuse_members(spec)
    if spec.argument is None:
        refuse(spec, "name the folder with the layers, as in block:DIR")
    name, block = str(spec), plan_block_drafter(spec.argument, context.target)

    def build(cache_tokens: CacheTokens, _progress: ProgressCallback | None, target: Runner) -> BlockDrafter:
        runner, heads = block.load(cache_tokens[name], target.decoder.config.max_positions, target.decoder)
        return BlockDrafter(runner, heads, block.exchange())

    return DraftPlan({name: block.memory}, build, block.own.fingerprint)
