"""The plan of a benchmark: its groups and cells (workload, batch, temperature, depth), and the order of repetitions."""

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
SHIPPED = (*GENERATED, *REPLAYED)  # the bundled workloads
CHOSEN = -1  # the depth "auto": the controller chooses it in each round


@dataclass(frozen=True, slots=True)
class Group:
    """A workload at one batch size and temperature; its depths are compared with each other."""

    workload: str
    batch: int
    temperature: float

    @property
    def name(self) -> str:
        """The group as a phrase."""
        return f"{self.workload}, batch {self.batch}, temperature {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One repetition of one cell."""

    repetition: int
    depth: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The cells: `batches` x `depths` x `temperatures` for every workload, each `repeats` times.

    Depth 0, plain decoding, is always included; CHOSEN may be. At most `num_prompts` prompts of a workload are used,
    and `num_tokens` tokens are generated for each, except for replayed answers. Drafts are chains, or a `tree`, cut to
    each depth; depths above that of the tree are reduced to it.
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
                "depth", "auto chooses the length of chains, but a tree has a fixed shape: leave out one of the two."
            )
        object.__setattr__(self, "depths", tuple(in_order({0, *(min(depth, deepest) for depth in self.depths)})))

    def groups(self, replayed: Mapping[str, bool]) -> list[Group]:
        """All groups of the workloads, by name; replayed workloads, which do not sample, run at temperature 0 only."""
        return [
            Group(name, batch, temperature)
            for name, recorded in replayed.items()
            for batch in self.batches
            for temperature in ((0.0,) if recorded else self.temperatures)
        ]

    def speculation(self, depth: int) -> Speculation:
        """The speculation of requests at a depth."""
        if depth == CHOSEN:
            return Speculation()
        tree = None if self.tree is None else self.tree.cut(depth)
        return Speculation(depth) if tree is None else Speculation(tree=tree)

    def turns(self) -> list[Turn]:
        """The order within a group: all depths in rotation, each repetition starting one depth later."""
        return [Turn(r, depth) for r in range(self.repeats) for depth in rotated(self.depths, r)]


def require_different(name: str, values: Sequence[object]) -> None:
    """Raise InvalidRequest for duplicates or an empty list."""
    if not values or len(set(values)) < len(values):
        raise InvalidRequest(name, f"{values!r} must be different values, at least one.")


def in_order(depths: Iterable[int]) -> list[int]:
    """Depths in ascending order, CHOSEN last."""
    return sorted(depths, key=lambda depth: (depth == CHOSEN, depth))


def depth_name(depth: int) -> str:
    """A depth as an option value."""
    return AUTO if depth == CHOSEN else str(depth)


def rotated(values: Sequence[T], by: int) -> list[T]:
    """The values, rotated by `by` places."""
    start = by % len(values) if values else 0
    return [*values[start:], *values[:start]]
