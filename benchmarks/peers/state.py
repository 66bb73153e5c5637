"""The finished repetitions, stored so that a stopped run can continue: one JSON object per line, only ever appended.

This file decides what belongs together: every answer is kept as it comes, and a repetition is compared when it is
complete. One that was interrupted goes on with the answers that it lacks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Answer


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine's answer to one prompt, in one mode and repetition."""

    engine: str
    mode: str
    prompt: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Failure:
    """What could not be made or run, and the last lines of why. `mode` "all": the engine as a whole."""

    engine: str
    mode: str
    reason: str


class State:
    """The file of one benchmark. `run` names what must be equal for results to belong together."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run

    def repetitions(self, precision: str) -> dict[int, list[Cell]]:
        """All complete ones of a class, by number."""
        complete = [record["repetition"] for record in self.records(precision) if record.get("complete")]
        return {number: self.begun(precision, number) for number in complete}

    def begun(self, precision: str, repetition: int) -> list[Cell]:
        """What there is of a repetition, complete or not."""
        return [
            Cell(cell["engine"], cell["mode"], cell["prompt"], Answer(**cell["answer"]))
            for record in self.records(precision)
            if record.get("repetition") == repetition
            for cell in record.get("cells", ())
        ]

    def about(self, precision: str) -> dict[str, Any]:
        """Versions, failures and what else was noted when the class was last begun; empty before."""
        return next((r["about"] for r in reversed(list(self.records(precision))) if "about" in r), {})

    def keep(self, precision: str, repetition: int, cells: Sequence[Cell]) -> None:
        """Answers of a repetition."""
        self.append(precision, {"repetition": repetition, "cells": [asdict(cell) for cell in cells]})

    def close(self, precision: str, repetition: int) -> None:
        """Note that a repetition is complete."""
        self.append(precision, {"repetition": repetition, "complete": True})

    def note(self, precision: str, about: Mapping[str, Any]) -> None:
        """What to know about a class."""
        self.append(precision, {"about": dict(about)})

    def append(self, precision: str, record: Mapping[str, Any]) -> None:
        """One line, at once. It begins with a line break, which ends the half line of a run that was killed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"run": self.run, "precision": precision} | dict(record)) + "\n")

    def records(self, precision: str) -> Iterator[dict[str, Any]]:
        """The run's records of a class; the half line of a run that was killed is none."""
        if not self.path.is_file():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record["run"] == self.run and record["precision"] == precision:
                yield record
