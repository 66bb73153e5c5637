"""StateDecoder: layers that read each token with the state before it, as EAGLE layers and MTP modules do.

`StateEntry` describes how the two are combined, also for the compiled kernels; this file computes it with torch. Each
kind decides where the states come from.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.cache.paged import PagedCache
from forerun.models.backends.base import Backend, DecoderParts
from forerun.models.batch import TokenBatch
from forerun.models.decoder import Decoder
from forerun.models.layer import StateEntry
from forerun.models.rows import product, rms_norm


class StateDecoder(Decoder):
    """A decoder with one or more state entries, and its own cache."""

    has_plain_forward: ClassVar[bool] = False

    def normed(self, x: Tensor, gain: Tensor | None) -> Tensor:
        """The rows after this norm; unchanged without a gain."""
        return x if gain is None else rms_norm(x, gain, self.config.norm_eps)

    def behind(self, x: Float[Tensor, "total hidden"], gain: Tensor | None) -> Float[Tensor, "total hidden"]:
        """Rows of the stream after this norm, with the bits of `chain_drawer`; unchanged without a gain."""
        return x if gain is None else self.executor.norm_rows(x, gain)

    def enters_by(self, entry: StateEntry, norm: Float[Tensor, " hidden"] | None, backend: Backend) -> None:
        """Set the executor that drafts whole chains with this entry, and this norm before the head."""
        parts = DecoderParts(self.config, self.embedding, self.layers, norm, self.head, self.rope, entry)
        self.executor = backend.executor(parts)

    def read_beside(
        self,
        entry: StateEntry,
        layers: range,
        embedded: Float[Tensor, "total hidden"],
        states: Float[Tensor, "total hidden"],
        batch: TokenBatch,
        cache: PagedCache,
    ) -> Float[Tensor, "total hidden"]:
        """The outputs of these layers and the output norm, for tokens with states."""
        embedded, states = embedded.to(self.stream_dtype), states.to(self.stream_dtype)
        token, state = self.behind(embedded, entry.token_norm), self.behind(states, entry.state_norm)
        joined = torch.cat([state, token] if entry.state_first else [token, state], dim=1)
        if entry.map is None:
            x = self.executor.run(layers, state if entry.normed_stream else states, batch, cache, joined)
        else:
            x = product(entry.map, joined)
            x = self.executor.run(layers, x, batch, cache, x if entry.reads_stream else None)
        return self.behind(x, entry.output_norm)
