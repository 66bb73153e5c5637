"""MTP modules: layers that a checkpoint ships for predicting further tokens, one module for each (2412.19437).

A module reads a token beside a state after the token before it: both are normed, joined and mapped to the model's
width; one decoder layer of the target's own kind follows, and a norm. Embedding and head are the target's. For the
first module the state is the target's, behind its final norm; for each further one it is the output of the module
before. So where module m reads a token, it knows the target's state m + 1 places before that token, and of every text
its first place is the m-th. Behind the last module's guess the last module goes on with its own output.

The file decides how modules are computed: as layers of one decoder, so by the same kernels and in the same number
formats as the target's own. What a checkpoint must hold is decided in `format.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.cache.paged import PagedCache
from forerun.heads.folder import HeadFolder
from forerun.heads.mtp.format import MtpTensors
from forerun.models.backends.base import DecoderParts
from forerun.models.batch import AttentionPath, TokenBatch
from forerun.models.decoder import Decoder, Hidden
from forerun.models.layer import Linear, StateEntry
from forerun.models.rows import pad_rows, padded_rows, rms_norm

UNKNOWN = math.nan  # stands for a state that the same pass computes, as the module before reads the row before


@dataclass(frozen=True, slots=True)
class MtpModule:
    """What a module has beside its layer."""

    embedding: Float[Tensor, "vocab hidden"]
    embedding_norm: Float[Tensor, " hidden"]
    state_norm: Float[Tensor, " hidden"]
    projection: Linear
    norm: Float[Tensor, " hidden"]
    head: Linear


class MtpDecoder(Decoder):
    """The modules as a decoder over a cache of its own, a layer each.

    Row p of a text is its token p + 1, beside what is known of the tokens up to p. A pass reads through all modules, or
    the last ones: `inputs` has the states of each, side by side, and the pass gives the normed output of each likewise.
    UNKNOWN is a state that the module before gives for the row before. Logits are those of the first module that read.
    """

    def __init__(self, tensors: MtpTensors, folder: HeadFolder, target: Decoder) -> None:
        shapes, naming, make, backend = tensors.shapes(), tensors.naming, folder.make, folder.backend
        quantize = folder.target.quantize

        def take(name: str) -> Tensor:
            return folder.checkpoint.take(name, shapes[name])

        super().__init__(
            tensors.config,
            lambda name, _shape: take(tensors.stored_name(name)),
            target.dtype,
            backend,
            quantize,
            host=target,
        )
        make_head = partial(backend.linear, quantize="int8" if quantize else None)
        self.state_first = naming.state_first
        self.modules: list[MtpModule] = []
        for module in range(tensors.config.layers):
            name = partial(tensors.name, module)
            own_head = naming.head is not None and name(naming.head) in tensors.own
            own_table = naming.embedding is not None and name(naming.embedding) in tensors.own
            self.modules.append(
                MtpModule(
                    embedding=take(name(naming.embedding)) if own_table else target.embedding,  # type: ignore[arg-type]
                    embedding_norm=take(name(naming.embedding_norm)),
                    state_norm=take(name(naming.state_norm)),
                    projection=make(take(name(naming.projection))),
                    norm=take(name(naming.norm)),
                    head=make_head(take(name(naming.head))) if own_head else target.head,  # type: ignore[arg-type]
                )
            )
        if len(self.modules) == 1:  # several take turns, step by step
            own = self.modules[0]
            self.embedding = own.embedding
            entry = StateEntry(own.projection, own.embedding_norm, own.state_norm, own.norm, self.state_first)
            parts = DecoderParts(tensors.config, own.embedding, self.layers, None, own.head, self.rope, entry)
            self.executor = backend.executor(parts)

    def forward(
        self,
        batch: TokenBatch,
        cache: PagedCache,
        *,
        layers: range | None = None,
        inputs: Float[Tensor, "total states"] | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Read the batch beside `inputs`, through as many of the last modules as it has states for."""
        assert inputs is not None, "it reads states"
        assert layers is None, "the states say which modules read"
        assert not taps, "nobody reads its states"
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
        rows = [row for row, position in enumerate(batch.positions.tolist()) if position >= module]
        out = torch.zeros_like(states)
        if rows:
            own = batch.some(rows)
            own = replace(own, paths=[without_first(path, module) for path in own.paths])
            out[rows] = self.read_module(module, states[rows], own, cache)
        return out

    def read_module(
        self, module: int, states: Float[Tensor, "total hidden"], batch: TokenBatch, cache: PagedCache
    ) -> Float[Tensor, "total hidden"]:
        """One module's outputs, behind its norm."""
        own, total, eps = self.modules[module], len(states), self.config.norm_eps
        normed = [
            rms_norm(own.embedding[batch.tokens].to(self.stream), own.embedding_norm, eps),
            rms_norm(states, own.state_norm, eps),
        ]
        joined = torch.cat(normed[::-1] if self.state_first else normed, dim=1)
        x = own.projection(pad_rows(joined, padded_rows(total)))[:total]
        x = self.executor.run(range(module, module + 1), x, batch, cache)
        return rms_norm(x, own.norm, eps)

    def logits(self, hidden: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows vocab"]:
        """Logits in float32, of outputs that are normed."""
        width = self.config.hidden
        head = self.modules[len(self.modules) - hidden.shape[1] // width].head
        return head(pad_rows(hidden[:, :width], padded_rows(len(hidden))))[: len(hidden)].float()


def without_first(path: AttentionPath, rows: int) -> AttentionPath:
    """The path without the first rows of its text, of which none is among its queries."""
    positions = [position - rows for position in path.positions]
    return replace(path, positions=positions, first_slot=path.first_slot + rows, masks={})
