"""Runs every contender with every number of clients; a server that fails is reported and left out of the rest.

This file decides the order. All contenders are measured with one number of clients before the next number, and each
repetition begins with another contender. A server starts at its first missing cell, and is stopped while others are
measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.processes import ServerProcess, StepFailed
from benchmarks.serving.cells import CellFile, CellKey, Load, ServedCell, measure_cell
from benchmarks.serving.contenders import Contender

from forerun.bench.material import Passage
from forerun.bench.plan import rotated
from forerun.errors import InvalidRequest

Starter = Callable[[str], tuple[ServerProcess, Mapping[str, object]]]  # starts a server; also fields for its bodies


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells of a run."""

    concurrencies: Sequence[int]
    repeats: int
    contenders: Sequence[Contender]

    def cells(self) -> Iterator[tuple[CellKey, Contender]]:
        """All cells in the order in which they are measured."""
        for concurrency in self.concurrencies:
            for repetition in range(self.repeats):
                for contender in rotated(self.contenders, repetition):
                    yield CellKey(concurrency, repetition, contender.name), contender


@dataclass(slots=True)
class ServingRace:
    """The servers of a run, which measure missing cells; a context manager that ends the servers."""

    start: Starter
    file: CellFile
    load: Load
    prompts: Sequence[Passage]
    say: Callable[[str], None]
    failures: dict[str, str] = field(default_factory=dict)  # the error of each failed server
    servers: dict[str, tuple[ServerProcess, Mapping[str, object]]] = field(default_factory=dict)
    warm: set[tuple[str, int]] = field(default_factory=set)  # contender and concurrency
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> ServingRace:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def run(self, grid: Grid, limit_s: float = float("inf")) -> int:
        """Measure the missing cells, but start none after `limit_s` seconds; returns how many are still missing.

        Cells of failed servers are not counted.
        """
        end_s, done = time.monotonic() + limit_s, set(self.file.cells())
        missing = [(key, contender) for key, contender in grid.cells() if key not in done]
        for number, (key, contender) in enumerate(missing):
            if contender.server in self.failures:
                continue
            if time.monotonic() >= end_s:
                return sum(left.server not in self.failures for _, left in missing[number:])
            try:
                cell = self.measure(key, contender)
            except (StepFailed, InvalidRequest) as failed:
                self.leave(contender.server, str(failed))
                continue
            self.file.keep(cell)
            failed_requests = f", {cell.num_failed} failed" if cell.num_failed else ""
            self.say(
                f"{key.concurrency} at once, repetition {key.repetition + 1}, {key.contender}: "
                f"{cell.tokens_per_s:.1f} tokens/s{failed_requests}"
            )
        return 0

    def measure(self, key: CellKey, contender: Contender) -> ServedCell:
        """Measure one cell, while its server runs. Raises StepFailed if the server fails."""
        if contender.server not in self.servers:
            self.servers[contender.server] = started = self.start(contender.server)
            self.stack.callback(started[0].close)
        server, extra = self.servers[contender.server]
        place = (key.contender, key.concurrency)
        requests = (key, contender.speculation, self.load, self.prompts, extra, place in self.warm)
        with server.awake():
            try:
                cell = asyncio.run(measure_cell(server.url, *requests))
            except (StepFailed, InvalidRequest) as failed:
                raise StepFailed(f"{failed}\n{server.last_words()}") from failed
        self.warm.add(place)
        return cell

    def leave(self, server: str, reason: str) -> None:
        """Record that a server has failed."""
        self.failures[server] = reason
        self.say(f"{server} FAILED: {reason.splitlines()[0]}")
