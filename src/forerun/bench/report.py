"""Report: everything that a benchmark found, and its form as JSON.

This file decides names and units: times in seconds, sizes in bytes, shares between 0 and 1, and null where a value is
not known. `show.py` writes the report for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.bench.figures import CellFigures, GroupFigures, Mismatch, over
from forerun.bench.plan import CHOSEN
from forerun.config import AUTO
from forerun.device import CPU, Placement
from forerun.prove.proof import jsonable


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """How fast the device's memory was read before and after the runs, in bytes per second."""

    start: float
    end: float

    @property
    def best(self) -> float:
        """What counts as the limit: the faster of the two, since neither can have been too fast."""
        return max(self.start, self.end)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The whole benchmark.

    `about` says what was run, on which models and machine; `pass_bytes` are the weights that one pass of the target
    reads; `places[workload]` says where each of its prompts is from.
    """

    about: Mapping[str, Any]
    bandwidth: Bandwidth
    pass_bytes: int
    places: Mapping[str, Sequence[str]]
    groups: tuple[GroupFigures, ...]
    placement: Placement = CPU

    @property
    def same_tokens(self) -> bool:
        """Whether every depth gave the same tokens in every group."""
        return all(figures.same_tokens for figures in self.groups)

    @property
    def peak_bytes(self) -> int | None:
        """The most memory held in any run."""
        peaks = [c.peak_bytes for figures in self.groups for c in figures.cells if c.peak_bytes is not None]
        return max(peaks, default=None)

    def limit_share(self, figures: GroupFigures) -> float | None:
        """The least time in which memory gives the weights that a pass reads, over that of this group's plain one."""
        return over(self.pass_bytes / self.bandwidth.best, figures.plain_pass_s)

    def place(self, figures: GroupFigures, difference: Mismatch) -> str:
        """Where the prompt of a request that differs is from."""
        places = self.places[figures.group.workload]
        return places[difference.request % len(places)]

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        values: dict[str, Any] = jsonable(
            {
                **self.about,
                "bandwidth_bytes_per_s": asdict(self.bandwidth),
                "weights_bytes_per_pass": self.pass_bytes,
                "peak_rss_bytes": self.peak_bytes,
                "same_tokens": self.same_tokens,
                "groups": [self.group_object(figures) for figures in self.groups],
                "cells": [cell_object(figures, cell) for figures in self.groups for cell in figures.cells],
            }
        )
        return values

    def group_object(self, figures: GroupFigures) -> dict[str, Any]:
        """A group without its cells."""
        differences = [asdict(d) | {"prompt": self.place(figures, d)} for d in figures.differences]
        return {
            **asdict(figures.group),
            "same_tokens": figures.same_tokens,
            "differences": differences,
            "distinct_8grams": figures.distinct_ngrams,
            "plain_pass_s": figures.plain_pass_s,
            "memory_limit_share": self.limit_share(figures),
        }


def cell_object(figures: GroupFigures, cell: CellFigures) -> dict[str, Any]:
    """A cell with its group's names."""
    return {**asdict(figures.group), **asdict(cell), "depth": AUTO if cell.depth == CHOSEN else cell.depth}
