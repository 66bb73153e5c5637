"""The finished repetitions, stored so that a stopped run can continue.

Every answer is stored when it is finished. Only complete repetitions are compared; an interrupted one is continued with
its missing answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers.protocol import Answer
from benchmarks.run_file import RunFile


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine's answer to one prompt, in one mode and repetition."""

    engine: str
    mode: str
    prompt: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine and mode that could not be prepared or run, with the last lines of the error; `mode` may be "all"."""

    engine: str
    mode: str
    reason: str


class State(RunFile):
    """The file of one benchmark."""

    def repetitions(self, precision: str) -> dict[int, list[Cell]]:
        """The answers of the complete repetitions of a class, by the repetition's number."""
        complete = [record["repetition"] for record in self.of(precision) if record.get("complete")]
        return {number: self.begun(precision, number) for number in complete}

    def missing(self, precision: str, repeats: int) -> list[int]:
        """The numbers of repetitions that are not complete."""
        return sorted(set(range(repeats)) - set(self.repetitions(precision)))

    def begun(self, precision: str, repetition: int) -> list[Cell]:
        """The stored answers of a repetition, complete or not."""
        return [
            Cell(cell["engine"], cell["mode"], cell["prompt"], Answer(**cell["answer"]))
            for record in self.of(precision)
            if record.get("repetition") == repetition
            for cell in record.get("cells", ())
        ]

    def about(self, precision: str) -> dict[str, Any]:
        """The latest notes about a class, such as versions and failures; empty if there are none."""
        return next((r["about"] for r in reversed(self.of(precision)) if "about" in r), {})

    def of(self, precision: str) -> list[dict[str, Any]]:
        """The records of this class in the run's file."""
        return [record for record in self.records() if record["precision"] == precision]

    def keep(self, precision: str, repetition: int, cells: Sequence[Cell]) -> None:
        """Store answers of a repetition."""
        self.add(precision=precision, repetition=repetition, cells=[asdict(cell) for cell in cells])

    def close(self, precision: str, repetition: int) -> None:
        """Record that a repetition is complete."""
        self.add(precision=precision, repetition=repetition, complete=True)

    def note(self, precision: str, about: Mapping[str, Any]) -> None:
        """Store notes about a class, such as versions and failures."""
        self.add(precision=precision, about=dict(about))
