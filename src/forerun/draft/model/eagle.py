"""EAGLE as drafter: a layer on the target's states drafts token by token (2401.15077, 2503.01840).

This module decides what the layer reads: the target's states, fused, and behind them its own output. `shifted.py`
decides which of them goes with which token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.draft.model.shifted import ShiftedFollower
from forerun.draft.plan import CacheTokens, DraftContext, DraftPlan, refuse, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.models.eagle import DraftVocabulary, plan_layer
from forerun.models.eagle_layer import EagleDecoder
from forerun.models.runner import Read, Runner


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

    def of_roots(self, seq_ids: Sequence[int]) -> Float[Tensor, "roots inputs"]:
        """The same."""
        return self.decoder.fuse(torch.stack([self.last[seq_id] for seq_id in seq_ids]))

    def of_guess(self, output: Float[Tensor, " outputs"]) -> Float[Tensor, " inputs"]:
        """The layer's output stands for the state."""
        return output


def plan_eagle(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`eagle:DIR`: an EAGLE layer on the target's states, with a cache of its own."""
    refuse_members(spec)
    if spec.argument is None:
        refuse(spec, "name the folder with the layer, as in eagle:DIR")
    name, eagle = str(spec), plan_layer(spec.argument, context.target)

    def build(cache_tokens: CacheTokens, _progress: ProgressCallback | None, target: Runner) -> EagleDrafter:
        config = target.decoder.config
        runner = eagle.load(cache_tokens[name], config.max_positions, target.decoder)
        return EagleDrafter(runner, DraftVocabulary(config.vocab_size, eagle.ids), eagle.taps)

    return DraftPlan({name: eagle.memory}, build, eagle.layer.fingerprint)
