"""Notes: everything that was measured, one JSON line each, so that a tuning that was stopped goes on where it was.

This file decides which measurements belong together: the first line holds all that affects every one of them, and a
file with another first line is refused. Candidates, the number of repetitions and the time limit may change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.bench.state import flat, parsed, whole_lines
from forerun.errors import InvalidRequest

FORM = 1  # of the file


@contextmanager
def writable_folder(folder: Path) -> Iterator[None]:
    """Within it, a system that refuses to write there raises InvalidRequest."""
    try:
        yield
    except OSError as error:
        problem = error.strerror or error
        raise InvalidRequest("out", f"{folder} cannot be written ({problem}): name another folder") from error


def require_folder(folder: Path) -> None:
    """Make the folder. Raises InvalidRequest where nothing can be written in it."""
    with writable_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.part"
        probe.touch()
        probe.unlink()


@dataclass(slots=True)
class Notes:
    """What is measured so far, by name, in memory and on disk."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], fresh: bool = False) -> Notes:
        """The measurements of this tuning, with the file ready to continue. `fresh` starts over.

        Raises InvalidRequest, with the file as it was, for one that holds something else or cannot be used.
        """
        notes, head = cls(path), {"forerun_tune": FORM, "about": json.loads(json.dumps(about))}
        with writable_folder(path.parent):
            data = path.read_bytes() if path.exists() else b""
            lines = whole_lines(data)
            if lines:
                notes.check_head(parsed(lines[0]), head, fresh)
            if fresh or not lines:
                path.write_text(json.dumps(head) + "\n", encoding="utf-8")
                return notes
            for number, line in enumerate(lines[1:], start=2):
                entry = parsed(line)
                if not isinstance(entry, dict) or set(entry) != {"of", "value"}:
                    raise InvalidRequest("out", f"{path}:{number} is damaged: start over with --fresh")
                notes.values[entry["of"]] = entry["value"]
            with path.open("r+b") as file:
                file.truncate(sum(map(len, lines)))
        return notes

    def check_head(self, found: Any, head: Mapping[str, Any], fresh: bool) -> None:
        """Raise InvalidRequest unless the file is of this tuning, or of any that is to be forgotten."""
        if not isinstance(found, dict) or "forerun_tune" not in found:
            raise InvalidRequest("out", f"{self.path} holds something else: name another folder")
        if fresh or found == head:
            return
        before, now = flat(found.get("about")), flat(head["about"])
        differing = [name for name in {**before, **now} if before.get(name) != now.get(name)] or ["its form"]
        raise InvalidRequest(
            "out",
            f"{self.path} is of a tuning with other settings ({', '.join(differing)}): name another folder, or start "
            "over with --fresh",
        )

    def add(self, of: str, value: Any) -> Any:
        """A finished measurement, on disk when this returns; in the form that a later run will read."""
        line = json.dumps({"of": of, "value": value})
        with writable_folder(self.path.parent), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.values[of] = json.loads(line)["value"]
        return self.values[of]
