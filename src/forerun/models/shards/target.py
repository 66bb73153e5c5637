"""The executor, cache and runner of a target whose layers are split over several ranks, on rank 0.

Each operation is sent to the other ranks before rank 0 computes its own part. Results are complete, so engine and
drafters do not know of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from torch import Tensor

from forerun.annotations import Float
from forerun.cache.paged import PagedCache
from forerun.models.backends.base import AttentionInputs, ChainDrawer, Executor, Stream
from forerun.models.backends.native import NativeExecutor, pass_tables
from forerun.models.batch import TokenBatch
from forerun.models.decoder import Decoder
from forerun.models.runner import Runner
from forerun.models.shards.ranks import Order, RankGroup
from forerun.models.shards.shard import Columns
from forerun.sampling.draws import Draws


class SharedExecutor:
    """An executor whose layers and head all ranks compute together."""

    def __init__(self, part: NativeExecutor, ranks: RankGroup) -> None:
        self.part = part
        self.ranks = ranks
        self.stream_dtype, self.query_rule, self.num_experts_read = part.stream_dtype, part.query_rule, 0

    def run(
        self, layers: range, x: Stream, batch: TokenBatch, cache: PagedCache, read: AttentionInputs | None = None
    ) -> Stream:
        assert read is None, "a target's layers read no states"
        tables = pass_tables(batch, cache.keys.shape[2])
        places = batch.positions, batch.slots
        self.ranks.send(Order.RUN, [[layers.start, layers.stop], *places, *tables], x)
        with self.ranks.in_step():
            x = self.part.compute(layers, x, places, tables, cache)
        self.num_experts_read = self.part.num_experts_read  # every rank reads a part of the same experts
        return x

    def write_kv(self, read: AttentionInputs, batch: TokenBatch, cache: PagedCache) -> None:
        """Never called: only layers of drafters read states."""
        raise AssertionError("a target's layers read no states")

    def norm_rows(self, x: Stream, gain: Float[Tensor, " hidden"]) -> Stream:
        return self.part.norm_rows(x, gain)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        rows = hidden.float()
        self.ranks.send(Order.LOGITS, rows=rows)
        config = self.part.parts.config
        with self.ranks.in_step():
            return self.ranks.joined(Columns.TOKENS, self.part.logits(rows), config.vocab_size, config)

    def lower(self, num_layers: int) -> Executor:
        lower = copy(self)
        lower.part = self.part.lower(num_layers)
        return lower

    def chain_drawer(self, draws: Draws, reads_states: bool) -> ChainDrawer | None:
        return None


class SharedCache(PagedCache):
    """The cache of rank 0's heads, which sends every change of slots to the other ranks."""

    def __init__(self, ranks: RankGroup, **fields: Any) -> None:
        super().__init__(**fields)
        self.ranks = ranks

    def copy_slots(self, source: int, target: int, count: int) -> None:
        self.ranks.send(Order.COPY, [[source, target, count]])
        super().copy_slots(source, target, count)

    def zero_slots(self, first: int, end: int) -> None:
        self.ranks.send(Order.ZERO, [[first, end]])
        super().zero_slots(first, end)

    def gather_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.ranks.send(Order.GATHER, [sources, targets])
        super().gather_slots(sources, targets)


def shared_runner(decoder: Decoder, ranks: RankGroup, num_tokens: int) -> Runner:
    """A runner of rank 0's decoder, which computes with the other ranks, with a new cache of `num_tokens`."""
    assert isinstance(decoder.executor, NativeExecutor), "ranks share what the compiled kernels compute"
    decoder.executor = SharedExecutor(decoder.executor, ranks)
    return Runner(decoder, SharedCache(ranks, **decoder.cache_shape, num_tokens=num_tokens))
