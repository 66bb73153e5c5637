"""Measurements by name, which are kept in a file, so that a run that was stopped goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.errors import InvalidRequest
from forerun.machine import disturbs
from forerun.progress import LoadingBar
from forerun.store import Journal
from forerun.streams import show_note

FORM = 3  # of the file
SIGNS = {"benchmark": "forerun_bench", "tuning": "forerun_tune"}  # by which its first line is known


@dataclass(slots=True)
class Measurements:
    """What is measured so far, in memory and on disk; for messages, the `option` that names a `place` for the file."""

    path: Path
    option: str
    place: str
    values: dict[str, Any] = field(default_factory=dict)
    journal: Journal = field(init=False)

    @classmethod
    def open(
        cls, path: Path, about: Mapping[str, Any], what: str, option: str, place: str, fresh: bool = False
    ) -> Measurements:
        """Those of a run like this, with the file ready to go on; `fresh` starts over.

        `about` is everything that decides a measurement. Raises InvalidRequest, with the file as it was, for one that
        holds something else or cannot be used.
        """
        kept, head = cls(path, option, place), {SIGNS[what]: FORM, "about": about}
        with kept.writable():
            kept.journal = Journal.of_run(path, head, what, option, place, fresh)
        for number, entry in enumerate(kept.journal.entries[1:], start=2):
            if not isinstance(entry, dict) or set(entry) != {"of", "value"}:
                raise InvalidRequest(option, f"{path}:{number} is damaged: start over with --fresh")
            kept.values[entry["of"]] = entry["value"]
        return kept

    def holds(self, of: str) -> bool:
        """Whether it need not be measured any more: it is there, and no other program disturbed it."""
        value = self.values.get(of)
        return of in self.values and not (isinstance(value, dict) and disturbs(value.get("num_busy")))

    def add(self, of: str, value: Any) -> Any:
        """A finished measurement, on disk when this returns; in the form that a later run will read."""
        with self.writable():
            self.journal.add({"of": of, "value": value})
        self.values[of] = self.journal.entries[-1]["value"]
        return self.values[of]

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Within it, a system that refuses the file raises InvalidRequest."""
        try:
            yield
        except OSError as error:
            fix = f"name another {self.place} with --{self.option}"
            raise InvalidRequest(self.option, f"{self.path} cannot be used ({error}): {fix}") from error

    @contextmanager
    def continued(self, bar: LoadingBar) -> Iterator[None]:
        """Within it measurements are added; a person is told what is there, and how an interrupted run goes on."""
        if self.values:
            show_note(f"{len(self.values)} measurements are there already ({self.path}); --fresh makes them again.")
        try:
            yield
        except KeyboardInterrupt:
            bar.stop()
            behind = f"behind {len(self.values)} measurements ({self.path})"
            show_note(f"Interrupted. The same command goes on {behind}.")
            raise
