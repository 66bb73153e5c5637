"""StateDecoder: layers that read each token's embedding with a hidden state, as EAGLE layers and MTP modules do.

`StateEntry` describes for torch and the compiled kernels how the two are combined; this file computes it with torch.
Each kind of heads defines where the states come from.
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
        """The rows normed with this gain; unchanged without one."""
        return x if gain is None else rms_norm(x, gain, self.config.norm_eps)

    def normed_stream(self, x: Float[Tensor, "total hidden"], gain: Tensor | None) -> Float[Tensor, "total hidden"]:
        """Rows of the residual stream normed by the executor, bit for bit as in `chain_drawer`; as `normed` else."""
        return x if gain is None else self.executor.norm_rows(x, gain)

    def set_entry(self, entry: StateEntry, norm: Float[Tensor, " hidden"] | None, backend: Backend) -> None:
        """Create the executor that drafts entire chains with this entry, and with this norm before the head."""
        parts = DecoderParts(self.config, self.embedding, self.layers, norm, self.head, self.rope, entry)
        self.executor = backend.executor(parts)

    def run_with_states(
        self,
        entry: StateEntry,
        layers: range,
        embedded: Float[Tensor, "total hidden"],
        states: Float[Tensor, "total hidden"],
        batch: TokenBatch,
        cache: PagedCache,
    ) -> Float[Tensor, "total hidden"]:
        """The outputs of these layers, after the entry's output norm, for tokens with these states."""
        states, embedded = states.to(self.stream_dtype), embedded.to(self.stream_dtype)
        token = self.normed_stream(embedded, entry.token_norm)
        state = self.normed_stream(states, entry.state_norm)
        joined = torch.cat([state, token] if entry.state_first else [token, state], dim=1)
        if entry.map is None:
            x = self.executor.run(layers, state if entry.normed_stream else states, batch, cache, joined)
        else:
            x = product(entry.map, joined)
            x = self.executor.run(layers, x, batch, cache, x if entry.reads_stream else None)
        return self.normed_stream(x, entry.output_norm)
