"""Team: data-parallel training with one process per GPU, as started by `accelerate launch`.

Each process generates its share of a step's answers and computes their gradients. All processes apply the sum of the
gradients, so their weights stay equal. The first process evaluates and writes checkpoints; the others use temporary
folders. A single process is a team of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from torch import Tensor, distributed

from forerun.errors import InvalidRequest
from forerun.models.spec import ModelSpec
from forerun.train.settings import TrainSettings

T = TypeVar("T")
NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")  # environment variables of a process group
PATIENCE = timedelta(hours=2)  # timeout of the processes that wait while the first one measures


@dataclass(frozen=True, slots=True)
class Team:
    """`size` processes; this one has number `rank`, and `local_rank` on its machine."""

    size: int = 1
    rank: int = 0
    local_rank: int = 0

    @classmethod
    @contextmanager
    def joined(cls) -> Iterator[Team]:
        """Join the process group that the environment describes, for the duration of the context."""
        values = [os.environ.get(name) for name in NAMES]
        if None in values or values[0] == "1":
            yield cls()
            return
        size, rank, local, _ = (int(value or 0) for value in values)
        if torch.cuda.is_available():
            torch.cuda.set_device(local % torch.cuda.device_count())
        distributed.init_process_group(timeout=PATIENCE)
        try:
            yield cls(size, rank, local)
        finally:
            distributed.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this process evaluates and writes files."""
        return self.rank == 0

    def placed(self, spec: ModelSpec) -> ModelSpec:
        """The model on this process's own GPU, if it runs on GPUs."""
        return replace(spec, device=f"cuda:{self.local_rank}") if self.size > 1 and spec.device == "cuda" else spec

    def own_share(self, settings: TrainSettings) -> TrainSettings:
        """The settings with this process's share of a batch. Raises InvalidRequest if it cannot be divided evenly."""
        if settings.batch % self.size:
            raise InvalidRequest(
                "batch",
                f"{settings.batch} answers cannot be shared evenly by {self.size} processes: use --batch "
                f"{-(-settings.batch // self.size) * self.size}.",
            )
        return replace(settings, batch=settings.batch // self.size)

    def numbers(self, own: Iterable[int]) -> Sequence[int]:
        """Global answer numbers for this process's local ones."""
        return [number * self.size + self.rank for number in own]

    @contextmanager
    def folder(self, wanted: Path) -> Iterator[Path]:
        """The output folder of this process: `wanted` for the first, a temporary one for others."""
        if self.is_first:
            yield wanted
        else:
            with TemporaryDirectory() as other:
                yield Path(other) / wanted.name

    def of_first(self, find: Callable[[], T]) -> T:
        """The result of `find` in the first process, broadcast to all."""
        if self.size == 1:
            return find()
        box: list[T | None] = [find() if self.is_first else None]
        distributed.broadcast_object_list(box)
        return box[0]  # type: ignore[return-value]

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sum of each number over all processes."""
        if self.size == 1:
            return list(values)
        added = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(added)
        return added.tolist()

    def add_gradients(self, weights: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over all processes."""
        if self.size == 1:
            return
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            distributed.all_reduce(weight.grad)
