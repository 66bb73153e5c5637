"""MTP modules: layers that a checkpoint ships to predict further tokens, one module per depth (2412.19437).

A module reads a token with the state at the previous token: both are normed, concatenated and mapped to the model's
width; a decoder layer of the target's kind follows, and a norm. Embedding and head are the target's. The state of the
first module is the target's, after its final norm; the state of each further module is the output of the module before.
So module m depends on the state m + 1 positions before its token, and its first position in a text is m.

Module d drafts at depth d + 1; beyond the depth of the last module, this module continues with its own output. Each
module has read the entire text into its own layer of the cache, so a round starts from the last row of each. Modules
are layers of one decoder, with the kernels and dtypes of the target. `format.py` defines the tensors;
`state_follower.py` pairs states with tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.cache.shared_prefix import CachedPrefix
from forerun.draft.model.state_follower import StateFollower
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest
from forerun.heads.blueprint import HeadBlueprint, HeadParts, StateBlueprint, WideDrafter, widened_layers
from forerun.heads.folder import HeadFolder
from forerun.heads.mtp.format import LAYOUTS, MtpTensors, check_modules
from forerun.heads.mtp.student import MtpStudent
from forerun.heads.state_decoder import StateDecoder
from forerun.models.batch import TokenBatch
from forerun.models.chains import IdMap, joined
from forerun.models.decoder import Decoder, LayerOutputs
from forerun.models.layer import Linear, StateEntry
from forerun.models.loading import Blueprint
from forerun.models.projections import FINAL_NORM_BIAS
from forerun.models.rows import product
from forerun.models.runner import Read, Runner
from forerun.models.widen import Plan

UNKNOWN = math.nan  # a state that the pass itself computes: the previous module's output at the previous row


@dataclass(frozen=True, slots=True)
class MtpModule:
    """The parts of a module without its layer."""

    embedding: Float[Tensor, "vocab hidden"]
    entry: StateEntry
    head: Linear


class MtpDecoder(StateDecoder):
    """The modules as a decoder with its own cache, one layer each.

    Row p of a text is token p + 1 with a state that depends on the tokens up to p. A pass runs all modules or the last
    few: `inputs` has the states of these modules, concatenated, and the result their normed outputs, concatenated.
    UNKNOWN is replaced by the previous module's output at the previous row. Logits are those of the first module that
    ran, over the tokens `ids`.
    """

    def __init__(self, tensors: MtpTensors, folder: HeadFolder, target: Decoder, ids: Int[Tensor, " ids"]) -> None:
        naming, take = tensors.naming, folder.take

        def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
            if name == FINAL_NORM_BIAS:  # norms of modules have no bias, even in families whose norms have one
                return torch.zeros(shape, device=target.embedding.device)
            return take(tensors.stored_name(name))

        weights = folder.weights(fetch)
        super().__init__(tensors.layers, weights, host=target)
        self.modules: list[MtpModule] = []
        for module in range(tensors.layers.layers):
            names = (naming.projection, naming.embedding_norm, naming.state_norm, naming.norm)
            weight, token_norm, state_norm, norm = (take(tensors.name(module, name)) for name in names)
            entry = StateEntry(folder.make(weight), token_norm, state_norm, norm, naming.state_first)
            table, head = (tensors.name(module, name or "") for name in (naming.embedding, naming.head))
            embedding = take(table) if table in tensors.tables else target.embedding
            own_head = weights.head(take(head)[ids]) if head in tensors.tables else None
            self.modules.append(MtpModule(embedding, entry, own_head or folder.shared_head(ids, target)))
        if len(self.modules) == 1:  # entire chains in one call need a single module
            first = self.modules[0]
            self.embedding, self.head = first.embedding, first.head
            self.set_entry(first.entry, None, folder.backend)

    def forward(
        self, batch: TokenBatch, cache: PagedCache, *, inputs: Float[Tensor, "total states"] | None = None, **more: Any
    ) -> LayerOutputs:
        """Run the last modules on the batch, as many as `inputs` has states for."""
        assert inputs is not None, "MTP modules read states"
        assert not any(more.values()), "an MTP decoder has no taps, and its inputs say which modules run"
        states = inputs.view(len(inputs), -1, self.config.hidden)
        first, outputs = len(self.modules) - states.shape[1], list[Tensor]()
        for module in range(first, len(self.modules)):
            x = states[:, module - first]
            if outputs:
                x = torch.where(x.isnan(), functional.pad(outputs[-1], (0, 0, 1, 0))[:-1], x)
            outputs.append(self.read_known(module, x.to(self.stream_dtype), batch, cache))
        return LayerOutputs(torch.cat(outputs, dim=1), None)

    def read_known(
        self, module: int, states: Float[Tensor, "total hidden"], batch: TokenBatch, cache: PagedCache
    ) -> Float[Tensor, "total hidden"]:
        """The outputs of a module; zeros at its first `module` rows, which have no state."""
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
        """The normed outputs of a module."""
        parts = self.modules[module]
        embedded = parts.embedding[batch.tokens]
        return self.run_with_states(parts.entry, range(module, module + 1), embedded, states, batch, cache)

    def logits(self, hidden: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows vocab"]:
        """The logits of normed outputs, in float32."""
        width = self.config.hidden
        head = self.modules[len(self.modules) - hidden.shape[1] // width].head
        return product(head, hidden[:, :width]).float()


class MtpDrafter(StateFollower):
    """Drafts with MTP `modules`, which `runner` runs; `ids` maps their token ids to the target's."""

    names: tuple[str, ...] = ("mtp",)
    taps: tuple[int, ...] = (-1,)

    def __init__(self, modules: MtpDecoder, runner: Runner, ids: IdMap) -> None:
        self.num_modules, self.hidden = len(modules.modules), modules.config.hidden
        super().__init__(runner, ids, self.num_modules * self.hidden)

    def beginning(self, text: Sequence[int], salt: Hashable) -> CachedPrefix:
        """As in Follower; nothing with several modules, since the outputs at a text's end are not cached."""
        return super().beginning(text, salt) if self.num_modules == 1 else CachedPrefix()

    def fuse(self, features: Float[Tensor, "total modules hidden"]) -> Float[Tensor, "total inputs"]:
        """The states of all modules, concatenated."""
        return features.flatten(1)

    def before_fusing(
        self, reads: Sequence[Read], features: Sequence[Float[Tensor, "_ taps hidden"]]
    ) -> Sequence[Float[Tensor, "_ modules hidden"]]:
        """The target's states for the first module; for further modules the previous module's output, a row earlier."""
        if self.num_modules == 1:
            return features
        shown, row = joined(features), 0
        states = shown.new_full((len(shown), self.num_modules, self.hidden), UNKNOWN)
        states[:, 0] = shown[:, 0]
        for read in reads:
            states[row, 1:] = self.end(read.seq_id)
            row += len(read.tokens)
        return [states]

    def draft_states(self, output: Float[Tensor, "*rows outputs"]) -> Float[Tensor, "*rows inputs"]:
        """The states for draft tokens: the outputs of all but the last module, or of the last if it runs alone."""
        return output[..., : max(self.hidden, output.shape[-1] - self.hidden)]

    def end(self, seq_id: int) -> Float[Tensor, "further hidden"]:
        """The outputs of all but the last module at the end of a text; unused zeros if there is no text."""
        if seq_id not in self.outputs:
            return torch.zeros(self.num_modules - 1, self.hidden, device=self.runner.device)
        return self.outputs[seq_id][0].view(-1, self.hidden)[:-1]


class MtpBlueprint(StateBlueprint):
    """`mtp`: the modules that ship with the target; `mtp:DIR`: those in a folder."""

    decoder = MtpDecoder
    tensors: MtpTensors

    @classmethod
    def of(cls, folder: HeadFolder) -> Self:
        return cls.checked(folder, check_modules(folder))

    @classmethod
    def read(cls, spec: DraftSpec, target: Blueprint) -> HeadBlueprint:
        """The target's modules, unless the specification names a folder."""
        if spec.argument is None:
            return cls.of(HeadFolder.at(target.folder, str(target.folder), target, is_targets=True))
        return cls.of(HeadFolder.open(spec.argument, spec.name, target))

    def drafter(self, layers: MtpDecoder, runner: Runner, ids: IdMap) -> MtpDrafter:
        return MtpDrafter(layers, runner, ids)

    def widened(self, plan: Plan) -> WideDrafter:
        """The modules, widened; the outputs of their projections stay 0 in the new channels."""
        tensors, name = self.tensors, self.folder.name
        if tensors.naming.behind_layers:
            problem = "the names of its modules contain the target's number of layers, which changes"
            raise InvalidRequest("draft", f"{name} cannot be widened: {problem}.")
        layers = widened_layers(tensors.layers, plan, name)
        shapes = tensors.shapes(), replace(tensors, layers=layers).shapes()
        return WideDrafter.of_layers(self.folder, shapes, layers, {}, (tensors.naming.projection.rpartition("}.")[2],))


PARTS = HeadParts(MtpBlueprint, MtpStudent.fresh, LAYOUTS)
