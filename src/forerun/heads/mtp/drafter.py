"""MTP modules as drafter: each guesses one token further ahead, the last one as often as asked (2412.19437).

This module decides which module makes which guess, and from what: module d guesses at depth d + 1, and beyond their
number the last one goes on from its own outputs. Every module has read the whole text in its own layer of the cache,
from the target's states or the outputs of the module before, so what a round begins with is the last row of each.
`state_follower.py` decides which state goes with which token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.beginnings import Beginning
from forerun.cache.plan import ModelMemory
from forerun.draft.model.state_follower import StateFollower
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest
from forerun.heads.blueprint import FolderBlueprint, HeadBlueprint, HeadParts, WideDrafter, widened_layers
from forerun.heads.folder import HeadFolder, OpenFolder
from forerun.heads.mtp.format import LAYOUTS, SIGNS, MtpTensors, check_modules, guessed_ids
from forerun.heads.mtp.network import UNKNOWN, MtpDecoder
from forerun.heads.mtp.student import MtpStudent
from forerun.heads.vocabulary import exchange_of
from forerun.models.chains import IdExchange, joined
from forerun.models.decoder import Decoder
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from forerun.models.widen import Plan


class MtpDrafter(StateFollower):
    """Drafts with a target's `modules`, which `runner` reads; `ids` are between its guesses and the target's."""

    names: tuple[str, ...] = ("mtp",)
    taps: tuple[int, ...] = (-1,)

    def __init__(self, modules: MtpDecoder, runner: Runner, ids: IdExchange) -> None:
        super().__init__(runner, ids)
        self.num_modules = len(modules.modules)
        self.hidden = modules.config.hidden

    def beginning(self, text: Sequence[int], salt: Hashable) -> Beginning:
        """Nothing where there are several modules: the outputs behind a text, which they read, are not kept."""
        return super().beginning(text, salt) if self.num_modules == 1 else Beginning()

    @property
    def num_outputs(self) -> int:
        """Of every module, side by side."""
        return self.num_modules * self.hidden

    def fuse(self, features: Float[Tensor, "total modules hidden"]) -> Float[Tensor, "total inputs"]:
        """Side by side."""
        return features.flatten(1)

    def before_fusing(
        self, reads: Sequence[Read], features: Sequence[Float[Tensor, "_ taps hidden"]]
    ) -> Sequence[Float[Tensor, "_ modules hidden"]]:
        """The target's states for the first module; for each further one what the one before gives a row earlier."""
        if self.num_modules == 1:
            return features
        shown, row = joined(features), 0
        states = shown.new_full((len(shown), self.num_modules, self.hidden), UNKNOWN)
        states[:, 0] = shown[:, 0]
        for read in reads:
            states[row, 1:] = self.end(read.seq_id)
            row += len(read.tokens)
        return [states]

    def of_guess(self, output: Float[Tensor, "*rows outputs"]) -> Float[Tensor, "*rows inputs"]:
        """Each module's output is read by the next one; the last module's by itself, once the others have guessed."""
        return output[..., : max(self.hidden, output.shape[-1] - self.hidden)]

    def end(self, seq_id: int) -> Float[Tensor, "further hidden"]:
        """Outputs of all modules but the last, behind a text; zeros, on which no guess depends, where there is none."""
        if seq_id not in self.outputs:
            return torch.zeros(self.num_modules - 1, self.hidden, device=self.runner.device)
        return self.outputs[seq_id][0].view(-1, self.hidden)[:-1]


@dataclass(frozen=True, slots=True)
class MtpBlueprint(FolderBlueprint):
    """`mtp`: the modules that ship with the target; `mtp:DIR`: those in a folder. They have a cache of their own."""

    folder: HeadFolder
    tensors: MtpTensors
    ids: Int[Tensor, " draft_vocab"]

    @classmethod
    def of(cls, folder: HeadFolder, ships: bool = False) -> MtpBlueprint:
        """The modules in a folder, which `ships` says is the target's own. Raises ModelError as `check_modules`."""
        return cls(folder, check_modules(folder, ships), guessed_ids(folder, ships))

    @classmethod
    def read(cls, spec: DraftSpec, target: Blueprint, open_folder: OpenFolder) -> HeadBlueprint:
        """The target's own, unless the specification names a folder."""
        if spec.argument is not None:
            return cls.of(open_folder(spec.argument))
        return cls.of(HeadFolder.at(target.folder, str(target.folder), target), ships=True)

    @property
    def memory(self) -> ModelMemory:
        """What they take once loaded; tables of their own count as they are stored."""
        tensors = self.tensors
        return self.folder.memory(tensors.config, tensors.shapes(), tensors.own, shared_rows=len(self.ids))

    def load(self, max_model_len: int, target: Decoder) -> MtpDecoder:
        """The modules, for texts of `max_model_len` at most."""
        config = self.tensors.config
        config = replace(config, max_positions=min(max_model_len, config.max_positions))
        return MtpDecoder(replace(self.tensors, config=config), self.folder, target, self.ids)

    def build(self, num_tokens: int, target: Runner) -> MtpDrafter:
        config = target.decoder.config
        modules = self.load(config.max_positions, target.decoder)
        runner = self.folder.target.runner(modules, num_tokens)
        return MtpDrafter(modules, runner, exchange_of(self.ids, config.vocab_size, target.device))

    def widened(self, plan: Plan) -> WideDrafter:
        """Modules in a folder of their own: what they map into their residual stream stays 0 in the new channels."""
        tensors, name = self.tensors, self.folder.name
        if tensors.naming.behind_layers:
            raise InvalidRequest("draft", f"{name} numbers its modules behind the target's layers, which become more.")
        config = widened_layers(tensors.config, plan, name)
        shapes = tensors.shapes(), replace(tensors, config=config).shapes()
        return WideDrafter.of_layers(self.folder, shapes, config, {}, (tensors.naming.projection.rpartition("}.")[2],))


PARTS = HeadParts(SIGNS, MtpBlueprint, MtpStudent.fresh, LAYOUTS)
