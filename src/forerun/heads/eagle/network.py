"""EAGLE's decoder layers: they read a target's states and guesses the token after the next one.

At a place the first layer reads two things: the embedding of the token there, and the target's state after the token
before it; layers behind it, which few drafters have, are a decoder's own. Where the target has not read that token yet,
as with guesses, the last layer's output there stands for the state, or in P-EAGLE (2602.01469) a learned one.
This file decides how the two enter the layer, which is what differs between the generations. In EAGLE-1 and EAGLE-2
(2401.15077, 2406.16858) they are mapped together, and the output is read by the target's head. In EAGLE-3 (2503.01840)
the state is several states of different layers, joined and mapped to the layer's width; both are normed and joined, the
state is also the residual stream, and a norm and perhaps a head of the layer's own follow. Number format and kernels
are the target's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.heads.eagle import format as names
from forerun.heads.eagle.format import EagleTensors
from forerun.heads.folder import HeadFolder
from forerun.heads.state_decoder import StateDecoder
from forerun.models.batch import TokenBatch
from forerun.models.decoder import Decoder, Hidden
from forerun.models.layer import StateEntry
from forerun.models.rows import product


class EagleDecoder(StateDecoder):
    """The layers as a decoder over a cache of its own; it reads embeddings and states side by side.

    `ids` are the tokens of its head. `mask` is what P-EAGLE's masked places read in the place of a state, None
    elsewhere.
    """

    def __init__(self, tensors: EagleTensors, folder: HeadFolder, target: Decoder, ids: Int[Tensor, " ids"]) -> None:
        shapes, form, make = tensors.shapes(), tensors.form, folder.make

        def take(name: str) -> Tensor:
            return folder.take(name, shapes[name])

        def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
            """A decoder's tensor; ones for a norm that there is none of, because the entry norms what is read."""
            name = name.removeprefix("model.").replace("layers.0.", f"{tensors.place}.", 1)
            return take(name) if name in shapes else target.norm.new_ones(shape, dtype=target.dtype)

        super().__init__(tensors.config, fetch, target.dtype, folder.backend, folder.quantize, host=target)
        self.embedding = take(names.EMBEDDING) if tensors.own_embedding else target.embedding
        self.head = make(take(names.HEAD)) if tensors.own_head else folder.shared_head(ids, target)
        self.map = make(take(names.MAP), take(names.MAP_BIAS) if form.fc_bias else None)
        self.joined = form.joined
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
        self.enters_by(self.entry, self.head_norm, folder.backend)
        masked = form.mask_token is not None
        self.mask = self.fuse(take(names.MASK_STATE).view(1, len(form.taps), -1))[0] if masked else None

    def fuse(self, states: Float[Tensor, "total taps target_hidden"]) -> Float[Tensor, "total hidden"]:
        """The target's states, as the layer reads them: in EAGLE-1 the one, as it is, else all of them through the map,
        normed where the folder says so."""
        states = states.to(self.dtype)
        if self.joined:
            return states.flatten(1)
        return product(self.map, self.normed(self.normed(states, self.tap_norms).flatten(1), self.all_norm))

    def forward(
        self, batch: TokenBatch, cache: PagedCache, *, inputs: Float[Tensor, "total hidden"] | None = None, **more: Any
    ) -> Hidden:
        """Read the batch from `inputs`, the states; the tokens' embeddings are added here."""
        assert inputs is not None, "it reads states"
        assert not any(more.values()), "all layers are read, and nobody reads their states"
        layers, embedded = range(len(self.layers)), self.embedding[batch.tokens]
        return Hidden(self.read_beside(self.entry, layers, embedded, inputs, batch, cache), None)

    def head_inputs(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        """The layer's outputs, as the head reads them."""
        return self.behind(hidden, self.head_norm)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        return product(self.head, self.head_inputs(hidden)).float()
