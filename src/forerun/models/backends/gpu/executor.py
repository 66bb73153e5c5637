"""FixedExecutor: layers that read states, as those of trained heads do, in passes of fixed shape.

A whole model's pass is `run_pass`, which fuses sums and norms from its first layer to its head. Trained heads have
computations of their own before, between and behind their layers, and ask for the layers alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.cache.paged import PagedCache
from forerun.models.backends.base import DecoderParts, Entered, Stream
from forerun.models.backends.gpu.fixed import FixedBatch, run_layers
from forerun.models.backends.gpu.ops import Ops
from forerun.models.backends.torch_cpu.backend import TorchExecutor
from forerun.models.batch import EACH_ALONE, TokenBatch
from forerun.models.layer import counters_of


class FixedExecutor(TorchExecutor):
    """A decoder's layers over all rows of a pass of fixed shape, padding among them."""

    def __init__(self, parts: DecoderParts, ops: Ops) -> None:
        super().__init__(parts, EACH_ALONE)
        self.ops = ops

    @property
    def num_experts_read(self) -> int:
        """As in every executor; asking waits for the device."""
        return int(torch.cat(counters).sum()) if (counters := counters_of(self.parts.layers)) else 0

    def run(
        self, layers: range, x: Stream, batch: TokenBatch, cache: PagedCache, read: Entered | None = None
    ) -> Stream:
        assert isinstance(batch, FixedBatch), "passes are of fixed shape"
        x, delta, _ = run_layers(self.parts, self.ops, batch, cache, layers, x, read)
        gain = self.parts.layers[layers[-1]].mlp.out_norm
        return self.ops.add_norm(x, delta, None, self.parts.config.norm_eps, gain)[0]

    def norm_rows(self, x: Stream, gain: Float[Tensor, " hidden"]) -> Stream:
        return self.ops.add_norm(x.contiguous(), None, gain, self.parts.config.norm_eps)[1]

    def remember(self, read: Entered, batch: TokenBatch, cache: PagedCache) -> None:
        assert isinstance(batch, FixedBatch), "passes are of fixed shape"
        c, rope, at = self.parts.config, self.parts.rope, (batch.positions, batch.slots)
        for i, layer in enumerate(self.parts.layers):
            store, qkv = (cache.keys[i], cache.values[i]), layer.attention.qkv(read)
            self.ops.rotate_store(qkv, (rope.cos, rope.sin), at, layer.attention, c, store)
