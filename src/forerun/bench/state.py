"""The state file: finished runs, a JSON line each, so that an interrupted benchmark goes on where it was.

Decides what belongs to one benchmark: its first line holds a key made of all that decides the result, and a file with
another key is refused. A last line that was cut off is dropped. Knows nothing of how runs are made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forerun.bench.plan import Group, Turn
from forerun.bench.run import Run
from forerun.errors import InvalidRequest

FORM = 1  # of the file


def key_of(about: Mapping[str, Any]) -> str:
    """16 hex digits for everything that decides the result."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def default_path(key: str) -> Path:
    """Where the state of a benchmark lies unless a place is given: in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "forerun" / "bench" / f"{key}.jsonl"


@dataclass(slots=True)
class State:
    """The runs that are done, in memory and on disk."""

    path: Path
    runs: dict[tuple[Group, Turn], Run]

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], fresh: bool = False) -> State:
        """What is there of this benchmark, and the file made ready to go on. `fresh` begins anew.

        Raises InvalidRequest for a file that holds something else.
        """
        key, state = key_of(about), cls(path, {})
        lines = [] if fresh or not path.exists() else whole_lines(path)
        if lines:
            state.check_head(lines[0], key, about)
            for number, line in enumerate(lines[1:], start=2):
                run = run_of(line, f"{path}:{number}")
                state.runs[run.group, run.turn] = run
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"forerun_bench": FORM, "key": key, "about": about}) + "\n", encoding="utf-8")
        return state

    def check_head(self, line: str, key: str, about: Mapping[str, Any]) -> None:
        """Raise InvalidRequest unless the file is of this benchmark, saying what is not the same."""
        head = parsed(line)
        if not isinstance(head, dict) or "forerun_bench" not in head:
            raise InvalidRequest("state", f"{self.path} is no state of a benchmark: name another file")
        if head.get("key") == key and head["forerun_bench"] == FORM:
            return
        before = head.get("about") or {}
        differing = [name for name in about if before.get(name) != about[name]] or ["its form"]
        raise InvalidRequest(
            "state",
            f"{self.path} is of a benchmark with other settings ({', '.join(differing)}): name another file, or begin "
            "anew with --fresh",
        )

    def add(self, run: Run) -> None:
        """A finished run, on disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.runs[run.group, run.turn] = run


def whole_lines(path: Path) -> list[str]:
    """The file's lines. A last one that was cut off is taken off the file too."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    last = data.rfind(b"\n", 0, max(0, end - 1)) + 1
    if end and parsed(data[last:end].decode("utf-8", "replace")) is None:
        end = last
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)
    return data[:end].decode("utf-8", "replace").splitlines()


def parsed(line: str) -> Any:
    """A line's JSON; None where it is none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def run_of(line: str, place: str) -> Run:
    """The run that a line holds."""
    entry = parsed(line)
    names = {field.name for field in fields(Run)}
    if not isinstance(entry, dict) or set(entry) != names:
        raise InvalidRequest("state", f"{place} is damaged: begin anew with --fresh")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in entry.items()}
    return Run(**values)
