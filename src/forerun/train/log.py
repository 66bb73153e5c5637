"""The log of a training: one JSON object a line, of steps and of looks at held-out answers.

A kill may leave lines behind the checkpoint that a training goes on from, or half a line. These are dropped when it
goes on, since the same steps are taken, and told, again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.store import writable, write_whole


@dataclass(slots=True)
class TrainLog:
    """The lines so far, in memory and in the file."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def up_to(cls, path: Path, step: int) -> TrainLog:
        """The log of the steps before this one, with the file cut there."""
        log = cls(path)
        with writable(path.parent):
            for line in path.read_text("utf-8").splitlines() if path.exists() else ():
                try:
                    entry = json.loads(line)
                except ValueError:
                    break
                if not isinstance(entry, dict) or entry.get("step", step + 1) > step:
                    break
                log.lines.append(entry)
            text = "".join(json.dumps(entry) + "\n" for entry in log.lines)
            write_whole(path, lambda part: part.write_text(text, "utf-8"))
        return log

    def add(self, entry: Mapping[str, Any]) -> None:
        """One more line."""
        self.lines.append(dict(entry))
        with writable(self.path.parent), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def series(self, *keys: str) -> list[tuple[int, Any]]:
        """(step, value) of every line that has a value under these keys, one inside the other."""
        found = []
        for line in self.lines:
            value: Any = line
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                found.append((line["step"], value))
        return found
