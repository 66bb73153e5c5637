"""The plan of a benchmark: which workloads, batch sizes, depths and temperatures are run, and in which order.

This file defines groups and cells, and how repetitions alternate between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from forerun.config import AUTO, Speculation, require_whole
from forerun.errors import InvalidRequest
from forerun.limits import real
from forerun.shape import StaticTree

T = TypeVar("T")
GENERATED, REPLAYED = ("code", "prose"), ("edits",)
SHIPPED = (*GENERATED, *REPLAYED)  # the workloads that come with the package
CHOSEN = -1  # stands for the depth that the controller chooses, round by round


@dataclass(frozen=True, slots=True)
class Group:
    """What is compared with each other: one text at one batch size and temperature, at every depth."""

    workload: str
    batch: int
    temperature: float

    @property
    def name(self) -> str:
        """For a reader."""
        return f"{self.workload}, batch {self.batch}, temperature {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One repetition of one cell."""

    repetition: int
    depth: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The cells: `batches` x `depths` x `temperatures` for every workload, each `repeats` times.

    Depth 0, plain decoding, is always among the depths; CHOSEN may be. `num_tokens` are generated per request, after at
    most `num_prompts` prompts of a workload; a replayed answer is as long as it is. Drafts are chains, or a `tree`, cut
    to each depth; no depth is more than the tree's own.
    """

    batches: tuple[int, ...] = (1,)
    depths: tuple[int, ...] = (0, 2, 4)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_tokens: int = 48
    num_prompts: int = 4
    repeats: int = 3
    seed: int = 0
    tree: StaticTree | None = None

    def __post_init__(self) -> None:
        for name, values, least in (("batch", self.batches, 1), ("depth", self.depths, CHOSEN)):
            for value in values:
                require_whole(name, value, least)
        for name, least in (("num_tokens", 2), ("num_prompts", 1), ("repeats", 1), ("seed", 0)):
            require_whole(name, getattr(self, name), least)
        for temperature in self.temperatures:
            real("temperature", temperature, "use a number from 0 on", 0.0)
        require_different("batch", self.batches)
        require_different("depth", self.depths)
        require_different("temperature", self.temperatures)
        deepest = max(self.depths) if self.tree is None else self.tree.depth
        if self.tree is not None and CHOSEN in self.depths:
            raise InvalidRequest(
                "depth", "auto chooses lengths of chains, and a tree has its own: leave out one of both."
            )
        object.__setattr__(self, "depths", tuple(in_order({0, *(min(depth, deepest) for depth in self.depths)})))

    def groups(self, replayed: Mapping[str, bool]) -> list[Group]:
        """All groups of the workloads, by name. What is replayed is drawn at no temperature: it runs once, at 0."""
        return [
            Group(name, batch, temperature)
            for name, recorded in replayed.items()
            for batch in self.batches
            for temperature in ((0.0,) if recorded else self.temperatures)
        ]

    def speculation(self, depth: int) -> Speculation:
        """The speculation at a depth."""
        if depth == CHOSEN:
            return Speculation()
        tree = None if self.tree is None else self.tree.cut(depth)
        return Speculation(depth) if tree is None else Speculation(tree=tree)

    def turns(self) -> list[Turn]:
        """The order within a group: all depths by turns, each repetition beginning one depth later."""
        return [Turn(r, depth) for r in range(self.repeats) for depth in rotated(self.depths, r)]


def require_different(name: str, values: Sequence[object]) -> None:
    """Raise InvalidRequest unless there are values, each of them once."""
    if not values or len(set(values)) < len(values):
        raise InvalidRequest(name, f"{values!r} must be values that differ, at least one.")


def in_order(depths: Iterable[int]) -> list[int]:
    """Depths from small to large, the chosen one behind them."""
    return sorted(depths, key=lambda depth: (depth == CHOSEN, depth))


def depth_name(depth: int) -> str:
    """For a reader."""
    return AUTO if depth == CHOSEN else str(depth)


def rotated(values: Sequence[T], by: int) -> list[T]:
    """The values in order, beginning with another one."""
    start = by % len(values)
    return [*values[start:], *values[:start]]
