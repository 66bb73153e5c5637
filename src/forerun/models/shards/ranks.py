"""RankGroup: the processes of tensor parallelism, and their communication.

Rank 0 has the engine and sends orders to the other ranks, which know layers, slots and numbers, but no requests. All
ranks take part in each all-gather of columns. Orders use a gloo process group, separate from torch's default group,
which belongs to the user. On one machine the compiled kernels gather columns through shared memory (kernels/ranks.cpp),
in microseconds instead of a quarter of a millisecond with gloo. Between machines, or if the system does not support
such memory, gloo gathers them.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import POINTER, c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.errors import RankLost
from forerun.models.backends.structures import CGather
from forerun.models.config import ModelConfig
from forerun.models.shards.shard import Columns, Shard

NUM_SIZES = 16  # integers in the header of a message
HEAD = 2048  # integers in the first part of a message; a longer body follows in a second part
FAILED = "failed"  # the store's key for the error of a rank
MEMORY = "memory"  # the store's key for the path of the shared memory
Exchange = Callable[[int | None, int, int, int, int, int], None]
ANSWER_S = 300.0  # the timeout of an exchange: longer than any pass
HALF = 1 << 18  # the most floats of a rank in one exchange; further rows need another exchange


def shared_file(world: int) -> int | None:
    """The descriptor of an in-memory file for `world` ranks; None if the system does not support it."""
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("forerun-ranks")
    os.ftruncate(file, world * (64 + 2 * 4 * HALF))
    return file


class SharedColumns:
    """The all-gather of columns through shared memory, for one rank. Raises OSError if the memory cannot be opened."""

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
            raise OSError(f"the shared memory of the ranks cannot be opened at {path}")
        weakref.finalize(self, lib.forerun_free_ranks, self.pointer)
        self.gather = ctypes.cast(lib.forerun_ranks_gather, CGather)

    @property
    def is_lost(self) -> bool:
        """Whether another rank ended during an exchange."""
        return bool(self.lib.forerun_ranks_lost(self.pointer))

    def join(self, what: Columns, rows: Float[Tensor, "rows columns"]) -> None:
        """All-gather columns in place: each row begins with this rank's columns, and then holds those of all ranks."""
        num_rows, columns = rows.shape
        self.lib.forerun_ranks_gather(self.pointer, what, rows.data_ptr(), columns, columns, num_rows)

    def reset(self) -> None:
        """Reset the state, after other ranks have ended and before new ones start."""
        self.lib.forerun_ranks_reset(self.pointer)


class Order(IntEnum):
    """What rank 0 orders the other ranks to do."""

    STOP = 0
    LOAD = 1
    RUN = 2
    LOGITS = 3
    COPY = 4
    GATHER = 5
    ZERO = 6


@dataclass(frozen=True, slots=True)
class RankMessage:
    """An order with its integer arrays and, for some orders, float32 rows."""

    order: Order
    numbers: Sequence[Tensor]
    rows: Tensor | None = None


class RankGroup:
    """One rank's connection to all ranks. `lost` is the error after which it is unusable; None: there was none.

    `group` is a torch.distributed.ProcessGroup of `shard.world` ranks, and `store` a store of their errors. On rank 0,
    `restart`, if set, is called before the next order if a rank was lost, and `end` ends the processes of other ranks.
    """

    def __init__(self, shard: Shard, group: Any, store: Any) -> None:
        self.shard = shard
        self.group = group
        self.store = store
        self.lost: BaseException | None = None
        self.restart: Callable[[], None] | None = None
        self.end: Callable[[], None] = lambda: None
        self.columns: SharedColumns | None = None

    def connect(self, lib: ctypes.CDLL, config: ModelConfig) -> tuple[Any, int | None]:
        """The function with which compiled kernels all-gather columns (a CGather), and its first argument."""
        if not self.store.check([MEMORY]):
            return CGather(self.gatherer(config)), None
        self.columns = SharedColumns(lib, self.store.get(MEMORY).decode(), self.shard, config)
        return self.columns.gather, self.columns.pointer

    def wait(self, work: Callable[[], Any]) -> None:
        """Take part in a collective operation. Raises RankLost if another rank does not take part."""
        self.check()
        try:
            work().wait()
        except RuntimeError as error:
            self.lost = error
            self.check()

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""
        if self.columns is not None and self.columns.is_lost and self.lost is None:
            self.lost = RuntimeError("it ended during a pass")
        if self.lost is not None:
            raise RankLost(
                f"{self.reason()}: see its last output, and whether its machine has free memory."
            ) from self.lost

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """A context in which rank 0 computes its part of an order. After an error the group is unusable, since other
        ranks wait for rank 0 in an exchange."""
        try:
            yield
        except BaseException as error:
            self.lost = self.lost or error
            raise

    def reason(self) -> str:
        """The error that the failed rank reported, or that a rank has ended without a report."""
        with suppress(RuntimeError):  # the store ends with rank 0
            if self.store.check([FAILED]):
                return str(self.store.get(FAILED).decode())
        reason = str(self.lost).partition(". This is typically")[0]  # without gloo's advice
        return f"one of the {self.shard.world} ranks of the model has ended or does not answer ({reason})"

    def report(self, error: BaseException) -> None:
        """Report the error that ends this rank to rank 0."""
        with suppress(RuntimeError):
            self.store.set(FAILED, f"rank {self.shard.rank}: {type(error).__name__}: {error}")

    def replace(self, others: RankGroup) -> None:
        """Continue with the processes of another group."""
        self.group, self.store, self.lost = others.group, others.store, None
        if self.columns is not None:
            self.columns.reset()

    def load(self, numbers: Sequence[Sequence[int]], fingerprint: str) -> None:
        """Order all other ranks to load their shards. Raises RankLost unless they have the same `fingerprint`."""
        self.send(Order.LOAD, numbers)
        self.check_fingerprint(fingerprint)

    def wait_until_loaded(self) -> None:
        """Wait until all ranks have loaded their shards. Raises RankLost."""
        self.exchange(torch.zeros(1, 1), [range(1)] * self.shard.world)

    def stop(self) -> None:
        """Order all other ranks to stop."""
        self.restart = None
        with suppress(RankLost):
            self.send(Order.STOP)
        self.end()

    def check_fingerprint(self, fingerprint: str) -> None:
        """Raise RankLost unless all ranks call this method with the same fingerprint, a text of hex digits."""
        numbers = [float(int(fingerprint[i : i + 4], 16)) for i in range(0, len(fingerprint), 4)]
        by_rank = self.exchange(torch.tensor([numbers]), [range(len(numbers))] * self.shard.world)
        others = [rank for rank, each in enumerate(by_rank) if not torch.equal(each, by_rank[0])]
        if others:
            raise RankLost(
                f"rank {others[0]} has another fingerprint than rank 0: use the same files, versions and processor "
                "instructions (FORERUN_ISA) on all ranks, or results would depend on the rank."
            )

    def send(self, order: Order, numbers: Sequence[Any] = (), rows: Tensor | None = None) -> None:
        """Send an order to all other ranks, after a restart if one was lost. Raises RankLost."""
        if self.lost is not None and self.restart is not None:
            self.restart()
        arrays = [np.ascontiguousarray(each, dtype=np.int64) for each in numbers]
        shape = (0, 0) if rows is None else rows.shape
        if rows is not None:
            values = np.resize(rows.numpy().reshape(-1), rows.numel() + rows.numel() % 2)  # two in each int64
            arrays.append(values.view(np.int64))
        sizes = [order, *shape, *(len(each) for each in arrays)]
        assert len(sizes) <= NUM_SIZES, f"a message of {len(sizes)} sizes"
        head = np.full(HEAD, -1)
        head[: len(sizes)] = sizes
        body = np.concatenate(arrays) if arrays else head[:0]
        is_short = len(body) <= HEAD - NUM_SIZES
        if is_short:
            head[NUM_SIZES : NUM_SIZES + len(body)] = body
        self.wait(lambda: self.group.broadcast(torch.from_numpy(head), 0))
        if not is_short:
            self.wait(lambda: self.group.broadcast(torch.from_numpy(body), 0))

    def receive(self) -> RankMessage:
        """Wait for the next order of rank 0. Raises RankLost if rank 0 ends."""
        head = torch.empty(HEAD, dtype=torch.long)
        self.wait(lambda: self.group.broadcast(head, 0))
        order, num_rows, width, *sizes = head[:NUM_SIZES].tolist()
        sizes = [size for size in sizes if size >= 0]
        body = head[NUM_SIZES : NUM_SIZES + sum(sizes)]
        if sum(sizes) > HEAD - NUM_SIZES:
            body = torch.empty(sum(sizes), dtype=torch.long)
            self.wait(lambda: self.group.broadcast(body, 0))
        parts = list(body.split(sizes)) if sizes else []
        if not width:
            return RankMessage(Order(order), parts)
        rows = parts.pop().view(torch.float32)[: num_rows * width].view(num_rows, width)
        return RankMessage(Order(order), parts, rows)

    def joined(
        self, what: Columns, part: Float[Tensor, "rows some"], count: int, config: ModelConfig
    ) -> Float[Tensor, "rows count"]:
        """All-gather rows: `part` has this rank's columns, the result all `count` of them. Raises RankLost."""
        if self.columns is None:
            return torch.cat(self.exchange(part, self.shard.columns(what, count, config)), 1)
        rows = torch.empty(len(part), count)
        rows[:, : part.shape[1]] = part
        self.columns.join(what, rows)
        self.check()
        return rows

    def exchange(self, part: Float[Tensor, "rows own"], columns: Sequence[range]) -> list[Float[Tensor, "rows _"]]:
        """All-gather by gloo: each rank's columns of the same rows; `columns` are the ranges of all ranks."""
        widest = max(len(each) for each in columns)
        mine = torch.empty(len(part), widest)
        mine[:, : part.shape[1]] = part
        gathered = torch.empty(self.shard.world * len(part), widest)
        self.wait(lambda: self.group._allgather_base(gathered, mine))
        return [rows[:, : len(each)] for rows, each in zip(gathered.split(len(part)), columns, strict=True)]

    def gatherer(self, config: ModelConfig) -> Exchange:
        """The all-gather of columns by gloo, to be called by the compiled kernels (`Gather` in decoder.hpp); `check`
        raises its errors."""
        cuts: dict[tuple[int, int], list[range]] = {}

        def gather(_: int | None, what: int, address: int, stride: int, columns: int, num_rows: int) -> None:
            if self.lost is not None:
                return
            try:
                if (what, columns) not in cuts:
                    cuts[what, columns] = self.shard.columns(Columns(what), columns, config)
                bounds, size = cuts[what, columns], (num_rows - 1) * stride + columns
                memory = (ctypes.c_float * size).from_address(address)
                rows = torch.frombuffer(memory, dtype=torch.float32).as_strided((num_rows, columns), (stride, 1))
                parts = self.exchange(rows[:, : len(bounds[self.shard.rank])], bounds)
                for each, part in zip(bounds, parts, strict=True):
                    rows[:, each.start : each.stop] = part
            except BaseException as error:  # no exception may leave a call from C
                self.lost = self.lost or error

        return gather
