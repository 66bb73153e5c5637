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

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.cache.paged import PagedCache
from forerun.heads.eagle.format import (
    ALL_NORM,
    EMBEDDING,
    HEAD,
    INPUT_NORM,
    MAP,
    MAP_BIAS,
    MASK_STATE,
    NORM,
    STATE_NORM,
    TAP_NORM,
    EagleTensors,
)
from forerun.heads.folder import HeadFolder
from forerun.models.backends.base import DecoderParts
from forerun.models.batch import TokenBatch
from forerun.models.decoder import Decoder, Hidden
from forerun.models.layer import Attention, Layer, Mlp, StateEntry
from forerun.models.packing import LayerMaker, MakeLinear, linear
from forerun.models.rope import rope_tables
from forerun.models.rows import pad_rows, padded_rows, rms_norm

TakeNamed = Callable[[str], Tensor]


@runtime_checkable
class Entry(Protocol):
    """How states and embeddings enter the layer."""

    def fuse(self, states: Float[Tensor, "rows taps target_hidden"]) -> Float[Tensor, "rows hidden"]:
        """The target's states as one, of the layer's width. `rows` is a number that `padded_rows` gives."""
        ...

    def enter(
        self, embedded: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows inputs"]]:
        """The residual stream that the layer adds to, and what its attention reads."""
        ...

    def compiled(self, output_norm: Tensor | None) -> StateEntry:
        """The same for the compiled kernels, with the norm of what the layers make of it."""
        ...


class FusedEntry:
    """EAGLE-3: the states are mapped to one, which is normed and put beside the normed embedding."""

    def __init__(self, tensors: EagleTensors, take: TakeNamed, make: MakeLinear) -> None:
        form = tensors.form
        self.eps = tensors.config.norm_eps
        self.fc = make(take(MAP), take(MAP_BIAS) if form.fc_bias else None)
        self.token_norm, self.state_norm = (take(f"{tensors.place}.{name}") for name in (INPUT_NORM, STATE_NORM))
        self.input_norm = take(ALL_NORM) if form.norm_before_fc else None
        gains = [take(TAP_NORM.format(tap)) for tap in range(len(form.taps))] if form.fc_norm else None
        self.tap_norms = None if gains is None else torch.stack(gains)
        self.normed_residual = form.norm_before_residual

    def fuse(self, states: Float[Tensor, "rows taps target_hidden"]) -> Float[Tensor, "rows hidden"]:
        """The states, normed where the folder says so, through the map."""
        if self.tap_norms is not None:
            states = rms_norm(states, self.tap_norms, self.eps)
        rows = states.flatten(1)
        return self.fc(rows if self.input_norm is None else rms_norm(rows, self.input_norm, self.eps))

    def enter(
        self, embedded: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows inputs"]]:
        """The state, and both of them normed."""
        normed = rms_norm(states, self.state_norm, self.eps)
        read = torch.cat([rms_norm(embedded, self.token_norm, self.eps), normed], dim=1)
        return normed if self.normed_residual else states, read

    def compiled(self, output_norm: Tensor | None) -> StateEntry:
        """The same for the compiled kernels."""
        return StateEntry(None, self.token_norm, self.state_norm, output_norm, normed_stream=self.normed_residual)


class JoinedEntry:
    """EAGLE-1: the state and the embedding are mapped to the layer's input, which has no norm."""

    def __init__(self, tensors: EagleTensors, take: TakeNamed, make: MakeLinear) -> None:
        self.fc = make(take(MAP), take(MAP_BIAS) if tensors.form.fc_bias else None)

    def fuse(self, states: Float[Tensor, "rows taps target_hidden"]) -> Float[Tensor, "rows hidden"]:
        """The one state, as it is."""
        return states.flatten(1)

    def enter(
        self, embedded: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows inputs"]]:
        """The map of both, twice."""
        x = self.fc(torch.cat([embedded, states], dim=1))
        return x, x

    def compiled(self, output_norm: Tensor | None) -> StateEntry:
        """The same for the compiled kernels."""
        return StateEntry(self.fc, None, None, output_norm, reads_stream=True)


class EagleDecoder(Decoder):
    """The layers as a decoder over a cache of its own; it reads embeddings and states side by side.

    `mask` is what P-EAGLE's masked places read in the place of a state; None elsewhere.
    """

    def __init__(self, tensors: EagleTensors, folder: HeadFolder, target: Decoder) -> None:
        shapes, form, make, backend = tensors.shapes(), tensors.form, folder.make, folder.backend

        def take(name: str) -> Tensor:
            return folder.checkpoint.take(name, shapes[name])

        def fetch(name: str, _shape: tuple[int, ...]) -> Tensor:
            return take(f"{tensors.place}.{name}")

        c = self.config = tensors.config
        self.dtype = target.dtype
        self.embedding = take(EMBEDDING) if tensors.own_embedding else target.embedding
        self.entry: Entry = (JoinedEntry if form.joined else FusedEntry)(tensors, take, make)
        table, maker = tensors.table, LayerMaker(c, self.dtype, make, make)
        norms = {name: take(f"{tensors.place}.{name}") for name in table.vectors}
        qk_norm = maker.head_norms(norms.__getitem__) if c.qk_norm else None
        qkv, out = (linear(projection, make, fetch) for projection in (table.qkv, table.out))
        unread = torch.ones(c.hidden, dtype=self.dtype)  # the entry norms what the layer reads
        attention = Attention(unread, qkv, out, qk_norm, None, c.windows[0])
        mlp = Mlp(norms["post_attention_layernorm.weight"], maker.every(table, fetch), None, ())
        more = [maker.load(lambda name, _: take(name.removeprefix("model.")), index) for index in range(1, c.layers)]
        self.layers = [Layer(attention, mlp), *more]
        norm = None if form.joined else take(NORM)
        self.output_norm = norm if form.norm_output else None
        self.head_norm = None if form.norm_output else norm
        self.head = make(take(HEAD)) if tensors.own_head else target.head
        self.rope = rope_tables(c)
        entry = self.entry.compiled(self.output_norm)
        parts = DecoderParts(c, self.embedding, self.layers, self.head_norm, self.head, self.rope, entry)
        self.executor = backend.executor(parts)
        masked = form.mask_token is not None
        self.mask = self.fuse(take(MASK_STATE).view(1, len(form.taps), -1))[0] if masked else None

    def fuse(self, states: Float[Tensor, "total taps target_hidden"]) -> Float[Tensor, "total hidden"]:
        """The target's states, as the layer reads them."""
        return self.entry.fuse(pad_rows(states.to(self.dtype), padded_rows(len(states))))[: len(states)]

    def forward(
        self,
        batch: TokenBatch,
        cache: PagedCache,
        *,
        layers: range | None = None,
        inputs: Float[Tensor, "total hidden"] | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Read the batch from `inputs`, the states; the tokens' embeddings are added here."""
        assert inputs is not None, "it reads states"
        assert layers is None, "all layers are read"
        assert not taps, "nobody reads its states"
        total = len(batch.tokens)
        rows = (pad_rows(t.to(self.stream), padded_rows(total)) for t in (self.embedding[batch.tokens], inputs))
        x, read = self.entry.enter(*rows)
        x = self.executor.run(range(len(self.layers)), x[:total], batch, cache, read[:total])
        x = x if self.output_norm is None else rms_norm(x, self.output_norm, self.config.norm_eps)
        return Hidden(x, None)

    def head_inputs(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        """The layer's outputs, as the head reads them."""
        return hidden if self.head_norm is None else rms_norm(hidden, self.head_norm, self.config.norm_eps)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Logits in float32 of the rows given, over the head's vocabulary."""
        rows = pad_rows(hidden, padded_rows(len(hidden)))
        return self.head(self.head_inputs(rows))[: len(hidden)].float()
