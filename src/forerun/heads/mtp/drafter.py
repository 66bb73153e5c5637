"""MTP modules as drafter: each guesses one token further ahead, the last one as often as asked (2412.19437).

This module decides which module makes which guess, and from what: module d guesses at depth d + 1, and beyond their
number the last one goes on from its own outputs. Every module has read the whole text in its own layer of the cache,
from the target's states or the outputs of the module before, so what a round begins with is the last row of each.
`shifted.py` decides which state goes with which token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.draft.model.shifted import ShiftedFollower
from forerun.draft.plan import CacheTokens, DraftContext, DraftPlan, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.heads.mtp.network import UNKNOWN, MtpDecoder, plan_modules
from forerun.models.chains import SameIds
from forerun.models.runner import Read, Runner


class MtpDrafter(ShiftedFollower):
    """Drafts with the modules' `runner`, whose decoder is an MtpDecoder."""

    arms: tuple[str, ...] = ("mtp",)
    taps: tuple[int, ...] = (-1,)

    def __init__(self, runner: Runner) -> None:
        vocab = runner.decoder.config.vocab_size
        super().__init__(runner, SameIds(vocab, vocab))
        assert isinstance(runner.decoder, MtpDecoder), "it reads states"
        self.num_modules = len(runner.decoder.modules)
        self.hidden = runner.decoder.config.hidden

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """Nothing where there are several modules: the outputs behind a text, which they read, are not kept."""
        return super().adoptable(text, most, salt) if self.num_modules == 1 else 0

    def of_text(
        self, reads: Sequence[Read], features: Float[Tensor, "total taps hidden"]
    ) -> Float[Tensor, "total inputs"]:
        """The target's states for the first module; for each further one what the one before gives a row earlier."""
        states = features.new_full((len(features), self.num_modules, self.hidden), UNKNOWN)
        states[:, 0], row = features[:, 0], 0
        for read in reads:
            states[row, 1:] = self.end(read.seq_id)
            row += len(read.tokens)
        return states.flatten(1)

    def of_guess(self, output: Float[Tensor, " outputs"]) -> Float[Tensor, " inputs"]:
        """Each module's output is read by the next one; the last module's by itself, once the others have guessed."""
        return output[: max(self.hidden, len(output) - self.hidden)]

    def end(self, seq_id: int) -> Float[Tensor, "further hidden"]:
        """Outputs of all modules but the last, behind a text; zeros, on which no guess depends, where there is none."""
        if seq_id not in self.outputs:
            return torch.zeros(self.num_modules - 1, self.hidden)
        return self.outputs[seq_id][0].view(-1, self.hidden)[:-1]


def plan_mtp(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`mtp`: the modules that ship with the target; `mtp:DIR`: those in a folder. They have a cache of their own."""
    refuse_members(spec)
    name, modules = str(spec), plan_modules(spec.argument, context.target)

    def build(cache_tokens: CacheTokens, _progress: ProgressCallback | None, target: Runner) -> MtpDrafter:
        return MtpDrafter(modules.load(cache_tokens[name], target.decoder.config.max_positions, target.decoder))

    return DraftPlan({name: modules.memory}, build, modules.layers.fingerprint)
