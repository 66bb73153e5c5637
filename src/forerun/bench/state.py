"""The state file: one JSON line for each finished run, so that an interrupted benchmark can continue.

This file decides which runs belong to one benchmark: the first line holds a key made of everything that affects the
result, and a file with another key is refused. A last line that is cut off is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forerun.bench.plan import Group, Turn
from forerun.bench.run import BenchRun
from forerun.errors import InvalidRequest
from forerun.store import cache_folder

FORM = 2  # of the file


def key_of(about: Mapping[str, Any]) -> str:
    """16 hex digits for everything that decides the result."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def default_path(key: str) -> Path:
    """Where the state of a benchmark lies unless a place is given: in the user's cache folder.

    Raises InvalidRequest where the user has none.
    """
    try:
        return cache_folder("bench") / f"{key}.jsonl"
    except OSError as error:
        raise InvalidRequest("state", f"{error}, or name a file with --state") from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Within it, a system that refuses the file raises InvalidRequest."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest("state", f"{path} cannot be used ({error}): name another file with --state") from error


@dataclass(slots=True)
class State:
    """The runs that are done, in memory and on disk."""

    path: Path
    runs: dict[tuple[Group, Turn], BenchRun]

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], fresh: bool = False) -> State:
        """The finished runs of this benchmark, with the file ready to continue. `fresh` starts over.

        Raises InvalidRequest, with the file as it was, for one that holds something else or cannot be used.
        """
        with writable(path):
            return cls.read(path, about, fresh)

    @classmethod
    def read(cls, path: Path, about: Mapping[str, Any], fresh: bool) -> State:
        """The same, where the system lets us."""
        state = cls(path, {})
        head = {"forerun_bench": FORM, "key": key_of(about), "about": json.loads(json.dumps(about))}
        data = path.read_bytes() if path.exists() else b""
        lines = whole_lines(data)
        if lines or not json.dumps(head).encode().startswith(data):
            state.check_head(parsed(lines[0]) if lines else None, head, fresh)
        if fresh or not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")
            return state
        for number, line in enumerate(lines[1:], start=2):
            run = run_of(line, f"{path}:{number}")
            state.runs[run.group, run.turn] = run
        with path.open("r+b") as file:
            file.truncate(sum(map(len, lines)))
        return state

    def check_head(self, found: Any, head: Mapping[str, Any], fresh: bool) -> None:
        """Raise InvalidRequest unless the file is of this benchmark, or of any that is to be forgotten."""
        if not isinstance(found, dict) or "forerun_bench" not in found:
            raise InvalidRequest("state", f"{self.path} is no state of a benchmark: name another file")
        if fresh or found == head:
            return
        before, now = flat(found.get("about")), flat(head["about"])
        differing = [name for name in now if before.get(name) != now[name]] or ["its form"]
        raise InvalidRequest(
            "state",
            f"{self.path} is of a benchmark with other settings ({', '.join(differing)}): name another file, or start "
            "over with --fresh",
        )

    def add(self, run: BenchRun) -> None:
        """A finished run, on disk when this returns."""
        with writable(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.runs[run.group, run.turn] = run


def whole_lines(data: bytes) -> list[bytes]:
    """A file's lines, each with its end, without a last one that was cut off."""
    lines = data.splitlines(keepends=True)
    while lines and (not lines[-1].endswith(b"\n") or (len(lines) > 1 and parsed(lines[-1]) is None)):
        lines.pop()
    return lines


def flat(about: Any) -> dict[str, Any]:
    """Values by name, those within a group as "group.name"."""
    found: dict[str, Any] = {}
    for name, value in about.items() if isinstance(about, dict) else ():
        found |= {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
    return found


def parsed(line: bytes) -> Any:
    """A line's JSON; None where it does not parse."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def run_of(line: bytes, place: str) -> BenchRun:
    """The run that a line holds."""
    entry = parsed(line)
    names = {field.name for field in fields(BenchRun)}
    if not isinstance(entry, dict) or set(entry) != names:
        raise InvalidRequest("state", f"{place} is damaged: start over with --fresh")
    return BenchRun(**{name: as_tuple(value) for name, value in entry.items()})


def as_tuple(value: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value
