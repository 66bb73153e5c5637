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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.heads.folder import HeadFolder
from forerun.heads.mtp.format import MtpTensors
from forerun.heads.state_decoder import StateDecoder
from forerun.models.batch import TokenBatch
from forerun.models.decoder import Decoder, Hidden
from forerun.models.layer import Linear, StateEntry
from forerun.models.projections import FINAL_NORM_BIAS
from forerun.models.rows import product

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
