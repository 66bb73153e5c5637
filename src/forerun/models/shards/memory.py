"""Memory that ranks of one machine share, in which the compiled kernels put columns side by side (kernels/ranks.cpp).

An exchange through it takes microseconds, through gloo a quarter of a millisecond. Where the system has no such memory,
and between machines, gloo does it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import POINTER, c_char_p, c_int64, c_void_p

from torch import Tensor

from forerun.annotations import Float
from forerun.models.backends.structures import CGather
from forerun.models.config import ModelConfig
from forerun.models.shards.shard import Columns, Shard

ANSWER_S = 300.0  # that a rank waits for another one in a pass: longer than the longest pass
HALF = 1 << 18  # numbers of an exchange that a rank's area holds: rows beyond go in another one


def shared_file(world: int) -> int | None:
    """A file of memory for so many ranks, which ends with the last process that has it; None without such."""
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("forerun-ranks")
    os.ftruncate(file, world * (64 + 2 * 4 * HALF))
    return file


class SharedColumns:
    """What puts columns side by side for one rank. Raises OSError where the memory cannot be had."""

    def __init__(self, lib: ctypes.CDLL, path: str, shard: Shard, config: ModelConfig) -> None:
        lib.forerun_ranks.restype = c_void_p
        lib.forerun_ranks.argtypes = [c_char_p, c_int64, c_int64, c_int64, POINTER(c_int64), c_int64]
        for name in ("lost", "reset"):
            getattr(lib, f"forerun_ranks_{name}").argtypes = [c_void_p]
        lib.forerun_ranks_gather.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64]
        lib.forerun_free_ranks.argtypes = [c_void_p]
        size = config.heads * config.head_dim
        heads = [*(each.start for each in shard.columns(Columns.HEADS, size, config)), size]
        self.lib = lib
        places, patience_ms = (c_int64 * len(heads))(*heads), int(1000 * ANSWER_S)
        self.pointer = lib.forerun_ranks(path.encode(), shard.rank, shard.world, HALF, places, patience_ms)
        if not self.pointer:
            raise OSError(f"the memory that ranks share cannot be opened at {path}")
        weakref.finalize(self, lib.forerun_free_ranks, self.pointer)
        self.gather = ctypes.cast(lib.forerun_ranks_gather, CGather)

    @property
    def is_lost(self) -> bool:
        """Whether another rank has ended in the middle of an exchange."""
        return bool(self.lib.forerun_ranks_lost(self.pointer))

    def join(self, what: Columns, rows: Float[Tensor, "rows columns"]) -> None:
        """Make these rows whole, at whose beginnings this rank's columns are."""
        num_rows, columns = rows.shape
        self.lib.forerun_ranks_gather(self.pointer, what, rows.data_ptr(), columns, columns, num_rows)

    def reset(self) -> None:
        """Begin anew with other processes in the places of the others."""
        self.lib.forerun_ranks_reset(self.pointer)
