"""EAGLE: decoder layers that draft token by token from a target's states (2401.15077, 2406.16858, 2503.01840).

At each position the first layer reads the embedding of the token there and the target's state at the previous token;
further layers, which few drafters have, are ordinary decoder layers. For draft tokens, which the target has not read,
the last layer's output at the parent replaces the state. `state_follower.py` pairs states with tokens; this file
computes the layer's input, in which the generations differ:

- EAGLE-1 and EAGLE-2: embedding and state are concatenated and mapped to the layer's width; the head is the target's.
- EAGLE-3: states of several layers are concatenated and mapped to the layer's width. State and embedding are normed and
  concatenated, the state is also the residual stream, and a norm and possibly an own head follow.
- P-EAGLE (2602.01469): one pass reads mask tokens after the root with a learned state, one per further draft token; all
  draft tokens of a depth have the logits of the same position.

Dtype and kernels are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.draft.base import Budget, Draft
from forerun.draft.model.drafted_text import DraftRow, RootPass
from forerun.draft.model.grower import grow_by_heads, packed_inputs
from forerun.draft.model.state_follower import StateFollower
from forerun.errors import InvalidRequest
from forerun.heads.blueprint import HeadParts, StateBlueprint, WideDrafter, widened_layers, widened_tap
from forerun.heads.eagle import format as names
from forerun.heads.eagle.format import EagleTensors
from forerun.heads.eagle.student import EagleStudent
from forerun.heads.folder import HeadFolder
from forerun.heads.kinds import SPECULATORS
from forerun.heads.state_decoder import StateDecoder
from forerun.models.batch import TokenBatch
from forerun.models.chains import HeadInputs, IdMap, MaskedPositions, ParallelHeads
from forerun.models.decoder import Decoder, LayerOutputs
from forerun.models.layer import StateEntry
from forerun.models.projections import HEAD
from forerun.models.rows import product
from forerun.models.runner import Read, Runner
from forerun.models.widen import Plan
from forerun.sampling.draws import Draws


class EagleDecoder(StateDecoder):
    """The layers as a decoder with its own cache, whose inputs are embeddings and states.

    `ids` are the token ids of its head. `mask` is the learned state of P-EAGLE's mask tokens, None for others.
    """

    def __init__(self, tensors: EagleTensors, folder: HeadFolder, target: Decoder, ids: Int[Tensor, " ids"]) -> None:
        shapes, form, make, take = tensors.shapes(), tensors.form, folder.make, folder.take
        self.form = form

        def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
            """A decoder's tensor; ones for a missing input norm, since the entry norms the inputs."""
            name = name.removeprefix("model.").replace("layers.0.", f"{tensors.place}.", 1)
            return take(name) if name in shapes else target.norm.new_ones(shape, dtype=target.dtype)

        super().__init__(tensors.layers, folder.weights(fetch), host=target)
        self.embedding = take(names.EMBEDDING) if tensors.own_embedding else target.embedding
        self.head = make(take(HEAD)) if tensors.own_head else folder.shared_head(ids, target)
        self.map = make(take(names.MAP), take(names.MAP_BIAS) if form.fc_bias else None)
        self.all_norm = take(names.ALL_NORM) if form.norm_before_fc else None
        gains = [take(names.TAP_NORM.format(tap)) for tap in range(len(form.taps))] if form.fc_norm else None
        self.tap_norms = None if gains is None else torch.stack(gains)
        norm = None if form.joined else take(names.NORM)
        self.head_norm = None if form.norm_output else norm
        if form.joined:
            self.entry = StateEntry(self.map, None, None, None, reads_stream=True)
        else:
            gain, state_gain = (take(f"{tensors.place}.{name}") for name in (names.INPUT_NORM, names.STATE_NORM))
            residual = form.norm_before_residual
            self.entry = StateEntry(None, gain, state_gain, norm if form.norm_output else None, normed_stream=residual)
        self.set_entry(self.entry, self.head_norm, folder.backend)
        masked = form.mask_token is not None
        self.mask = self.fuse(take(names.MASK_STATE).view(1, len(form.taps), -1))[0] if masked else None

    def fuse(self, states: Float[Tensor, "total taps target_hidden"]) -> Float[Tensor, "total hidden"]:
        """The state input of the layer: the target's state in EAGLE-1, else its states normed, concatenated, mapped."""
        states = states.to(self.dtype)
        if self.form.joined:
            return states.flatten(1)
        return product(self.map, self.normed(self.normed(states, self.tap_norms).flatten(1), self.all_norm))

    def forward(
        self, batch: TokenBatch, cache: PagedCache, *, inputs: Float[Tensor, "total hidden"] | None = None, **more: Any
    ) -> LayerOutputs:
        """Run the layers on the batch's embeddings and the states `inputs`."""
        assert inputs is not None, "EAGLE layers read states"
        assert not any(more.values()), "an EAGLE decoder has no taps and runs all layers"
        layers, embedded = range(len(self.layers)), self.embedding[batch.tokens]
        return LayerOutputs(self.run_with_states(self.entry, layers, embedded, inputs, batch, cache), None)

    def head_inputs(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        """The layer's outputs, after the norm before the head if there is one."""
        return self.normed_stream(hidden, self.head_norm)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        return product(self.head, self.head_inputs(hidden)).float()


class EagleDrafter(StateFollower):
    """Drafts with EAGLE layers, which `runner` runs; `taps` are the target's states that they read."""

    names: tuple[str, ...] = ("eagle",)

    def __init__(self, layers: EagleDecoder, runner: Runner, ids: IdMap) -> None:
        super().__init__(runner, ids, layers.config.hidden)
        self.decoder, self.taps = layers, layers.form.taps

    def fuse(self, features: Float[Tensor, "total taps hidden"]) -> Float[Tensor, "total inputs"]:
        return self.decoder.fuse(features)

    def draft_states(self, output: Float[Tensor, "*rows outputs"]) -> Float[Tensor, "*rows inputs"]:
        """The layer's output itself."""
        return output


class ParallelEagleDrafter(EagleDrafter):
    """P-EAGLE: predicts further draft tokens at mask tokens, which have a learned state."""

    def __init__(self, layers: EagleDecoder, runner: Runner, ids: IdMap) -> None:
        super().__init__(layers, runner, ids)
        assert layers.form.mask_token is not None, "P-EAGLE has a mask token"
        self.mask_token = layers.form.mask_token
        self.draws_after_text = runner.draws_unseen  # no wait for the host between text and draft tokens

    def inputs(
        self, reads: Sequence[Read], features: Float[Tensor, "total taps hidden"] | None
    ) -> Float[Tensor, "total inputs"]:
        """The target's states for text; the learned state for mask tokens."""
        if features is not None:
            return self.fuse(features)
        assert self.decoder.mask is not None, "P-EAGLE has a learned state"
        return self.decoder.mask.expand(sum(len(read.tokens) for read in reads), -1)

    def parallel_heads(self, rows: Sequence[DraftRow]) -> ParallelHeads:
        """The heads that predict the first draft token at the end of the text, and each further one at a mask token."""
        tokens = [[self.mask_token] * (row.budget.depth - 1) for row in rows]
        places = MaskedPositions(tokens, lambda depth: depth - 1, state=self.decoder.mask)
        return ParallelHeads(HeadInputs.next_logits, places=places)

    def read_roots(self, rows: list[DraftRow]) -> RootPass:
        """Read the mask tokens; returns the rows that fit the cache, and the logits of all their draft tokens."""
        masks = {row.seq_id: [self.mask_token] * (row.budget.depth - 1) for row in rows}
        reads = [Read(seq_id, tokens, judged=range(len(tokens))) for seq_id, tokens in masks.items() if tokens]
        ahead = self.read_fitting(reads, rows)
        roots = super().read_roots(ahead.rows)
        rest = ahead.logits.split([len(masks[row.seq_id]) for row in ahead.rows])
        packed = [part for root, tokens in zip(roots.logits, rest, strict=True) for part in (root[None], tokens)]
        return RootPass(ahead.reads, ahead.rows, torch.cat(packed) if packed else roots.logits)

    def grow(self, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "places vocab"]) -> Draft:
        """Grow chains or trees from these logits, without another pass."""
        inputs = packed_inputs(granted, logits)
        return grow_by_heads(draws, granted, HeadInputs.next_logits, inputs, self.runner.draws_unseen)

    def finish(self, draws: Draws, draft: Draft, granted: Mapping[int, Budget]) -> Draft:
        """The draft; the mask tokens are dropped from the cache."""
        self.drop(list(granted))
        return draft


class EagleBlueprint(StateBlueprint):
    """`eagle:DIR`: a checked drafter that is not loaded yet."""

    method, decoder = names.EAGLE3, EagleDecoder
    tensors: EagleTensors

    def drafter(self, layers: EagleDecoder, runner: Runner, ids: IdMap) -> EagleDrafter:
        return (EagleDrafter if layers.mask is None else ParallelEagleDrafter)(layers, runner, ids)

    def widened(self, plan: Plan) -> WideDrafter:
        """The widened layers and map of states."""
        tensors, name = self.tensors, self.folder.name
        if SPECULATORS in self.folder.fields.values:
            command = f"forerun convert {name} --to eagle --out NEW"
            fix = f"convert it with `{command}`, and widen the result"
            raise InvalidRequest("draft", f"{name} is in the layout of speculators, which is not widened: {fix}.")
        layers = widened_layers(tensors.layers, plan, name)
        shapes = tensors.shapes(), replace(tensors, layers=layers, target_hidden=plan.wide.hidden).shapes()
        taps = {} if tensors.form.joined else {names.TAP_IDS: [widened_tap(plan, tap) for tap in tensors.form.taps]}
        writers = (names.MAP, names.MAP_BIAS, names.MASK_STATE)
        return WideDrafter.of_layers(self.folder, shapes, layers, taps, writers, readers=(names.MASK_STATE,))


PARTS = HeadParts(EagleBlueprint, EagleStudent.fresh, names.LAYOUTS)
