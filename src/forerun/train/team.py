"""Team: the processes that train one drafter together, one for each GPU, as `accelerate launch` starts them.

Each writes and learns from its share of a step's answers, and all move by the sum of their gradients, so the weights
are the same everywhere. What the first one measures counts for all, and what it keeps on disk is what a training goes
on from; the others have a folder that is thrown away. A process alone is a team of one.
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

Told = TypeVar("Told")
NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")  # in the environment of a process of a team
PATIENCE = timedelta(hours=2)  # for a process that measures while the others wait


@dataclass(frozen=True, slots=True)
class Team:
    """So many processes, of which this is number `rank`; `local_rank` is its number on its machine."""

    size: int = 1
    rank: int = 0
    local_rank: int = 0

    @classmethod
    @contextmanager
    def joined(cls) -> Iterator[Team]:
        """The team that the environment names, within the block."""
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
        """Whether this process is the one whose figures and files count."""
        return self.rank == 0

    def placed(self, spec: ModelSpec) -> ModelSpec:
        """The model on this process's own GPU, where it is to run on GPUs."""
        return replace(spec, device=f"cuda:{self.local_rank}") if self.size > 1 and spec.device == "cuda" else spec

    def own_share(self, settings: TrainSettings) -> TrainSettings:
        """Settings with this process's part of a batch. Raises InvalidRequest for one that has no such parts."""
        if settings.batch % self.size:
            raise InvalidRequest(
                "batch",
                f"{settings.batch} answers cannot be shared evenly by {self.size} processes: use --batch "
                f"{-(-settings.batch // self.size) * self.size}.",
            )
        return replace(settings, batch=settings.batch // self.size)

    def numbers(self, own: Iterable[int]) -> Sequence[int]:
        """The numbers in the whole training of this process's own answers, which it counts from 0."""
        return [number * self.size + self.rank for number in own]

    @contextmanager
    def folder(self, wanted: Path) -> Iterator[Path]:
        """Where this process keeps its training."""
        if self.is_first:
            yield wanted
        else:
            with TemporaryDirectory() as other:
                yield Path(other) / wanted.name

    def of_first(self, find: Callable[[], Told]) -> Told:
        """What the first process finds."""
        if self.size == 1:
            return find()
        box: list[Told | None] = [find() if self.is_first else None]
        distributed.broadcast_object_list(box)
        return box[0]  # type: ignore[return-value]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each number, added up over all processes."""
        if self.size == 1:
            return list(values)
        added = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(added)
        return added.tolist()

    def add_gradients(self, weights: Iterable[Tensor]) -> None:
        """Give every weight the sum of its gradients in all processes."""
        if self.size == 1:
            return
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            distributed.all_reduce(weight.grad)
