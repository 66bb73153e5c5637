"""The finished repetitions, stored so that a stopped run can continue.

This file decides what belongs together: every answer is kept as it comes, and a repetition is compared when it is
complete. One that was interrupted goes on with the answers that it lacks.
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
    """What could not be made or run, and the last lines of why. `mode` "all": the engine as a whole."""

    engine: str
    mode: str
    reason: str


class State(RunFile):
    """The file of one benchmark."""

    def repetitions(self, precision: str) -> dict[int, list[Cell]]:
        """All complete ones of a class, by number."""
        complete = [record["repetition"] for record in self.of(precision) if record.get("complete")]
        return {number: self.begun(precision, number) for number in complete}

    def missing(self, precision: str, repeats: int) -> list[int]:
        """The numbers of repetitions that are not complete."""
        return sorted(set(range(repeats)) - set(self.repetitions(precision)))

    def begun(self, precision: str, repetition: int) -> list[Cell]:
        """What there is of a repetition, complete or not."""
        return [
            Cell(cell["engine"], cell["mode"], cell["prompt"], Answer(**cell["answer"]))
            for record in self.of(precision)
            if record.get("repetition") == repetition
            for cell in record.get("cells", ())
        ]

    def about(self, precision: str) -> dict[str, Any]:
        """Versions, failures and what else was noted when the class was last begun; empty before."""
        return next((r["about"] for r in reversed(self.of(precision)) if "about" in r), {})

    def of(self, precision: str) -> list[dict[str, Any]]:
        """The records of a class."""
        return [record for record in self.records() if record["precision"] == precision]

    def keep(self, precision: str, repetition: int, cells: Sequence[Cell]) -> None:
        """Answers of a repetition."""
        self.add(precision=precision, repetition=repetition, cells=[asdict(cell) for cell in cells])

    def close(self, precision: str, repetition: int) -> None:
        """Note that a repetition is complete."""
        self.add(precision=precision, repetition=repetition, complete=True)

    def note(self, precision: str, about: Mapping[str, Any]) -> None:
        """What to know about a class."""
        self.add(precision=precision, about=dict(about))
