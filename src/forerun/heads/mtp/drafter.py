"""MTP modules: layers that a checkpoint ships for predicting further tokens, one module for each (2412.19437).

A module reads a token beside a state after the token before it: both are normed, joined and mapped to the model's
width; one decoder layer of the target's own kind follows, and a norm. Embedding and head are the target's. For the
first module the state is the target's, behind its final norm; for each further one it is the output of the module
before. So where module m reads a token, it knows the target's state m + 1 places before that token, and of every text
its first place is the m-th.

Module d guesses at depth d + 1, and behind the last module's guess the last module goes on with its own output, as
often as asked. Every module has read the whole text in its own layer of the cache, so what a round begins with is the
last row of each. Modules are computed as layers of one decoder, so by the same kernels and in the same number formats
as the target's own. What a checkpoint must hold is decided in `format.py`, which state goes with which token in
`state_follower.py`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.cache.beginnings import Beginning
from forerun.cache.paged import PagedCache
from forerun.cache.plan import ModelMemory
from forerun.draft.model.state_follower import StateFollower
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest
from forerun.heads.blueprint import FolderBlueprint, HeadBlueprint, HeadParts, WideDrafter, widened_layers
from forerun.heads.folder import HeadFolder, OpenFolder
from forerun.heads.mtp.format import LAYOUTS, SIGNS, MtpTensors, check_modules, guessed_ids
from forerun.heads.mtp.student import MtpStudent
from forerun.heads.state_decoder import StateDecoder
from forerun.heads.vocabulary import exchange_of
from forerun.models.batch import TokenBatch
from forerun.models.chains import IdExchange, joined
from forerun.models.decoder import Decoder, Hidden
from forerun.models.layer import Linear, StateEntry
from forerun.models.loading import Blueprint
from forerun.models.projections import FINAL_NORM_BIAS
from forerun.models.rows import product
from forerun.models.runner import Read, Runner
from forerun.models.widen import Plan

UNKNOWN = math.nan  # stands for a state that the same pass computes, as the module before reads the row before


@dataclass(frozen=True, slots=True)
class MtpModule:
    """What a module has beside its layer."""

    embedding: Float[Tensor, "vocab hidden"]
    entry: StateEntry
    head: Linear


class MtpDecoder(StateDecoder):
    """The modules as a decoder over a cache of its own, a layer each.

    Row p of a text is its token p + 1, beside what is known of the tokens up to p. A pass reads through all modules, or
    the last ones: `inputs` has the states of each, side by side, and the pass gives the normed output of each likewise.
    UNKNOWN is a state that the module before gives for the row before. Logits are those of the first module that read,
    for the tokens `ids`.
    """

    def __init__(self, tensors: MtpTensors, folder: HeadFolder, target: Decoder, ids: Int[Tensor, " ids"]) -> None:
        shapes, naming, backend, quantize = tensors.shapes(), tensors.naming, folder.backend, folder.quantize

        def take(name: str) -> Tensor:
            return folder.take(name, shapes[name])

        def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
            if name == FINAL_NORM_BIAS:  # of families whose norms have one; the norms of modules have none
                return torch.zeros(shape, device=target.embedding.device)
            return take(tensors.stored_name(name))

        super().__init__(tensors.config, fetch, target.dtype, backend, quantize, host=target)
        make_head = partial(backend.linear, quantize="int8" if quantize else None)
        self.modules: list[MtpModule] = []
        for module in range(tensors.config.layers):
            names = (naming.projection, naming.embedding_norm, naming.state_norm, naming.norm)
            weight, token_norm, state_norm, norm = (take(tensors.name(module, name)) for name in names)
            entry = StateEntry(folder.make(weight), token_norm, state_norm, norm, naming.state_first)
            table, head = (tensors.name(module, name or "") for name in (naming.embedding, naming.head))
            embedding = take(table) if table in tensors.own else target.embedding
            own_head = make_head(take(head)[ids]) if head in tensors.own else None
            self.modules.append(MtpModule(embedding, entry, own_head or folder.shared_head(ids, target)))
        if len(self.modules) == 1:  # several take turns, step by step
            first = self.modules[0]
            self.embedding, self.head = first.embedding, first.head
            self.enters_by(first.entry, None, backend)

    def forward(
        self, batch: TokenBatch, cache: PagedCache, *, inputs: Float[Tensor, "total states"] | None = None, **more: Any
    ) -> Hidden:
        """Read the batch beside `inputs`, through as many of the last modules as it has states for."""
        assert inputs is not None, "it reads states"
        assert not any(more.values()), "the states say which modules read, and nobody reads their states"
        states = inputs.view(len(inputs), -1, self.config.hidden)
        first, outputs = len(self.modules) - states.shape[1], list[Tensor]()
        for module in range(first, len(self.modules)):
            x = states[:, module - first]
            if outputs:
                x = torch.where(x.isnan(), functional.pad(outputs[-1], (0, 0, 1, 0))[:-1], x)
            outputs.append(self.read_known(module, x.to(self.stream), batch, cache))
        return Hidden(torch.cat(outputs, dim=1), None)

    def read_known(
        self, module: int, states: Float[Tensor, "total hidden"], batch: TokenBatch, cache: PagedCache
    ) -> Float[Tensor, "total hidden"]:
        """One module's outputs where it has a state to read, which is from its own number of rows on; zeros before."""
        if module == 0:
            return self.read_module(module, states, batch, cache)
        part, rows = batch.without_first(module)
        out = torch.zeros_like(states)
        if len(part.tokens):
            out[rows] = self.read_module(module, states[rows], part, cache)
        return out

    def read_module(
        self, module: int, states: Float[Tensor, "total hidden"], batch: TokenBatch, cache: PagedCache
    ) -> Float[Tensor, "total hidden"]:
        """One module's outputs, behind its norm."""
        parts = self.modules[module]
        embedded = parts.embedding[batch.tokens]
        return self.read_beside(parts.entry, range(module, module + 1), embedded, states, batch, cache)

    def logits(self, hidden: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows vocab"]:
        """Logits in float32, of outputs that are normed."""
        width = self.config.hidden
        head = self.modules[len(self.modules) - hidden.shape[1] // width].head
        return product(head, hidden[:, :width]).float()


class MtpDrafter(StateFollower):
    """Drafts with a target's `modules`, which `runner` reads; `ids` are between its guesses and the target's."""

    names: tuple[str, ...] = ("mtp",)
    taps: tuple[int, ...] = (-1,)

    def __init__(self, modules: MtpDecoder, runner: Runner, ids: IdExchange) -> None:
        self.num_modules, self.hidden = len(modules.modules), modules.config.hidden
        super().__init__(runner, ids, self.num_modules * self.hidden)

    def beginning(self, text: Sequence[int], salt: Hashable) -> Beginning:
        """Nothing where there are several modules: the outputs behind a text, which they read, are not kept."""
        return super().beginning(text, salt) if self.num_modules == 1 else Beginning()

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
