"""Shard: the part of every layer that one rank of tensor parallelism holds and computes.

All linear layers are split by outputs (column-parallel), and the ranks' outputs are gathered. So each output is one sum
over all inputs in a fixed order, and its bits do not depend on the number of ranks. Splitting by inputs (row-parallel)
would give partial sums, whose total has other bits for each number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from forerun.annotations import Int
from forerun.errors import InvalidRequest, UnsupportedModel
from forerun.models.config import ModelConfig
from forerun.models.layer import LANES


class Columns(IntEnum):
    """The kinds of outputs of linear layers, which decide where they may be split (`Gathered` in decoder.hpp)."""

    HEADS = 0
    HIDDEN = 1
    NEURONS = 2
    TOKENS = 3


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of rank `rank` of `world` ranks."""

    rank: int
    world: int

    def check_fit(self, config: ModelConfig) -> None:
        """Raise InvalidRequest if heads or neurons cannot be split over `world` ranks, UnsupportedModel if all heads
        are normed as one vector."""
        heads = sorted(n for n in range(1, config.heads + 1) if is_divisible(config, n))
        neurons = [config.intermediate] if config.experts is None or config.experts.layers == () else []
        if config.experts is not None:
            neurons += [config.experts.intermediate, *([config.experts.shared] if config.experts.shared else [])]
        most = min(-(-count // LANES) for count in neurons)
        if self.world not in heads or self.world > most:
            possible = ", ".join(str(n) for n in heads if n <= most)
            raise InvalidRequest(
                "tensor_parallel_size",
                f"{self.world} ranks cannot share {config.heads} heads, {config.kv_heads} key heads and "
                f"{min(neurons)} neurons: use {possible}.",
            )
        if config.joint_norm:
            raise UnsupportedModel(
                f"tensor_parallel_size: {config.family} norms all heads as one vector, which cannot be split over "
                "ranks: use 1."
            )

    def of(self, config: ModelConfig) -> ModelConfig:
        """The configuration with the numbers of this rank's heads."""
        return replace(config, heads=len(self.heads(config)), kv_heads=len(self.kv_heads(config)))

    def kv_heads(self, config: ModelConfig) -> range:
        """The key heads of this rank; with fewer key heads than ranks, several ranks hold the same one."""
        if self.world <= config.kv_heads:
            return part(config.kv_heads, self.rank, self.world)
        first = self.rank * config.kv_heads // self.world
        return range(first, first + 1)

    def heads(self, config: ModelConfig) -> range:
        """The query heads of this rank."""
        keys, sharing = self.kv_heads(config), self.world // config.kv_heads
        if sharing <= 1:
            return range(keys.start * config.group, keys.stop * config.group)
        inside = part(config.group, self.rank % sharing, sharing)
        return range(keys.start * config.group + inside.start, keys.start * config.group + inside.stop)

    def columns(self, what: Columns, count: int, config: ModelConfig) -> list[range]:
        """Each rank's range of the `count` outputs of this kind."""
        if what == Columns.HEADS:
            heads = [Shard(rank, self.world).heads(config) for rank in range(self.world)]
            return [range(each.start * config.head_dim, each.stop * config.head_dim) for each in heads]
        unit = LANES if what == Columns.NEURONS else 1
        units = [part(count // unit, rank, self.world) for rank in range(self.world)]
        return [range(each.start * unit, each.stop * unit) for each in units]

    def rows(self, what: Columns, sizes: Sequence[int], config: ModelConfig) -> Int[torch.Tensor, " outputs"]:
        """The indices of this rank's outputs in a layer that is the concatenation of parts of these sizes.

        The parts of HEADS are queries, keys and values; those of NEURONS are gate and up.
        """
        parts = [self.columns(what, size, config)[self.rank] for size in sizes[:1]] * len(sizes)
        if what == Columns.HEADS:
            keys = self.kv_heads(config)
            parts[1:] = [range(keys.start * config.head_dim, keys.stop * config.head_dim)] * (len(sizes) - 1)
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        return torch.tensor([first + row for first, each in zip(firsts, parts, strict=True) for row in each])


WHOLE = Shard(0, 1)  # without tensor parallelism


def part(count: int, rank: int, world: int) -> range:
    """This rank's contiguous part of `count` items, divided as evenly as possible."""
    return range(count * rank // world, count * (rank + 1) // world)


def is_divisible(config: ModelConfig, world: int) -> bool:
    """Whether heads can be split over `world` ranks: each has some key heads, or equally many ranks share each one."""
    return world <= config.kv_heads or (world % config.kv_heads == 0 and world // config.kv_heads <= config.group)
