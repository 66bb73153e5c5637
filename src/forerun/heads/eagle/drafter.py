"""EAGLE as drafter: a layer on the target's states drafts token by token (2401.15077, 2503.01840).

This module decides what the layer reads: the target's states, fused, and behind them its own output. `shifted.py`
decides which of them goes with which token. P-EAGLE (2602.01469) reads masked places behind the root instead, as many
as there are guesses, all in one pass: the logits of a place are those of every guess at its depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.draft.base import NO_DRAFT, Budget, Draft
from forerun.draft.model.ahead import Paths, first_places, grow_ahead
from forerun.draft.model.drafted_text import DraftRow, RootPass
from forerun.draft.model.shifted import ShiftedFollower
from forerun.draft.plan import CacheTokens, DraftContext, DraftPlan, refuse, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.heads.eagle.blueprint import DraftVocabulary, plan_layer
from forerun.heads.eagle.network import EagleDecoder
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws


class EagleDrafter(ShiftedFollower):
    """Drafts with a layer's `runner`, whose decoder is an EagleDecoder; `taps` are the states that it reads."""

    arms: tuple[str, ...] = ("eagle",)

    def __init__(self, runner: Runner, ids: DraftVocabulary, taps: tuple[int, ...]) -> None:
        super().__init__(runner, ids)
        assert isinstance(runner.decoder, EagleDecoder), "it fuses states"
        self.decoder = runner.decoder
        self.taps = taps

    def of_text(
        self, reads: Sequence[Read], features: Float[Tensor, "total taps hidden"]
    ) -> Float[Tensor, "total inputs"]:
        """The target's states, fused."""
        return self.decoder.fuse(features)

    def of_guess(self, output: Float[Tensor, " outputs"]) -> Float[Tensor, " inputs"]:
        """The layer's output stands for the state."""
        return output


class ParallelEagleDrafter(EagleDrafter):
    """P-EAGLE: its masked places have the embedding of `mask_token`, and a state that was learned."""

    def __init__(self, runner: Runner, ids: DraftVocabulary, taps: tuple[int, ...], mask_token: int) -> None:
        super().__init__(runner, ids, taps)
        self.mask_token = mask_token

    def inputs(
        self, reads: Sequence[Read], features: Float[Tensor, "total taps hidden"] | None
    ) -> Float[Tensor, "total inputs"]:
        """The target's states for text; the learned one for masked places."""
        if features is not None:
            return self.of_text(reads, features)
        assert self.decoder.mask is not None, "it has masked places"
        return self.decoder.mask.expand(sum(len(read.tokens) for read in reads), -1)

    def read_roots(self, wishes: list[DraftRow]) -> RootPass:
        """Read masked places. Gives the wishes that had room, and the logits of all of their guesses."""
        masks = {wish.seq_id: [self.mask_token] * (wish.budget.depth - 1) for wish in wishes}
        reads = [Read(seq_id, own, judged=range(len(own))) for seq_id, own in masks.items() if own]
        ahead = self.read_fitting(reads, wishes)
        roots = super().read_roots(ahead.wishes)
        rest = ahead.logits.split([len(masks[wish.seq_id]) for wish in ahead.wishes])
        packed = [part for root, own in zip(roots.logits, rest, strict=True) for part in (root[None], own)]
        return RootPass(ahead.reads, ahead.wishes, torch.cat(packed) if packed else roots.logits)

    def grow(self, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "places vocab"]) -> Draft:
        """Chains or trees, without another pass."""
        firsts = first_places(draws, granted)

        def ahead(rows: Sequence[int], paths: Paths) -> Tensor:
            return logits[[firsts[row] + len(path) for row, path in zip(rows, paths, strict=True)]]

        return grow_ahead(draws, [granted.get(seq_id, NO_DRAFT) for seq_id in draws.seq_ids], ahead)

    def finish(self, draws: Draws, draft: Draft, granted: Mapping[int, Budget]) -> Draft:
        """The draft; nothing is left of the masked places."""
        self.drop(list(granted))
        return draft


def plan_eagle(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`eagle:DIR`: an EAGLE layer on the target's states, with a cache of its own."""
    refuse_members(spec)
    if spec.argument is None:
        refuse(spec, "name the folder with the layer, as in eagle:DIR")
    name, eagle = str(spec), plan_layer(spec.argument, context.target)

    def build(cache_tokens: CacheTokens, _progress: ProgressCallback | None, target: Runner) -> EagleDrafter:
        config = target.decoder.config
        runner = eagle.load(cache_tokens[name], config.max_positions, target.decoder)
        ids, mask_token = DraftVocabulary(config.vocab_size, eagle.ids), eagle.tensors.form.mask_token
        if mask_token is None:
            return EagleDrafter(runner, ids, eagle.taps)
        return ParallelEagleDrafter(runner, ids, eagle.taps, mask_token)

    return DraftPlan({name: eagle.memory}, build, eagle.layer.fingerprint)
