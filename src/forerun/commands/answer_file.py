"""The file of answers: a JSON object on each line, written as answers come, so that a stopped batch can continue.

Every line names the line of the input that it answers, a digest of that prompt, and the settings that affect the
answer. A file with other settings or from another input is refused and not changed. At most the line that was being
written can be lost: an incomplete line is cut off when the file is opened again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from forerun.commands.running import Destination
from forerun.errors import InvalidRequest
from forerun.store import parsed

BEGINNING = b'{"line": '  # the start of every line
SYNC_S = 1.0  # between calls of fsync: a power failure loses at most the answers since the last, a killed process none
REQUIRED_KEYS = {"line", "prompt_digest", "seed", "settings"}


def digest_of(prompt: object) -> str:
    """A digest of a prompt (text or token ids), 16 hex digits."""
    return blake2b(json.dumps(prompt).encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class AnswerFile:
    """An open answer file. `digests` and `seeds` are those of the answered lines, by their number in the input."""

    path: Path
    descriptor: int
    size: int = 0
    settings: Mapping[str, Any] | None = None
    digests: dict[int, str] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)
    synced_s: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, path: Path, fresh: bool = False) -> AnswerFile:
        """Open a file to append answers; with `fresh` earlier answers are discarded.

        Raises InvalidRequest for a file with other content, or one that another process is writing.
        """
        if os.path.exists(path) and not os.path.isfile(path):  # unlike Path's methods these raise no PermissionError
            raise _invalid(f"{path} is not a regular file: omit --output to print the answers.")
        Destination("output", path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise _invalid(f"{path} cannot be opened ({error.strerror}): name another file.") from error
        file = cls(path, descriptor)
        try:
            file._lock()
            file._read()
            if fresh:
                file.digests, file.seeds, file.settings, file.size = {}, {}, None, 0
            os.ftruncate(descriptor, file.size)
        except BaseException:
            os.close(descriptor)
            raise
        return file

    def check(self, settings: Mapping[str, Any], digests: Mapping[int, str]) -> None:
        """Raise InvalidRequest unless all answers in the file belong to this input and these settings."""
        if self.settings is not None and self.settings != settings:
            differing = [name for name in settings if self.settings.get(name) != settings[name]] or ["their names"]
            raise _invalid(
                f"{self.path} holds answers with other settings ({', '.join(differing)}): name another file, or start "
                "over with --fresh."
            )
        for line, digest in self.digests.items():
            if digests.get(line) != digest:
                raise _invalid(
                    f"{self.path} holds an answer to line {line} of the input, whose prompt has changed since: name "
                    "another file, or start over with --fresh."
                )

    def add(self, answer: Mapping[str, Any]) -> None:
        """Append an answer, completely or not at all. Raises InvalidRequest if it cannot be written."""
        data = json.dumps(answer).encode() + b"\n"
        assert data.startswith(BEGINNING), "an incomplete line must be recognisable"
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self.descriptor, left) :]
            self._sync()
        except OSError as error:
            os.ftruncate(self.descriptor, self.size)
            raise _invalid(
                f"{self.path} cannot be written ({error.strerror}). The {len(self.digests)} answers in it are "
                "complete: free some space and run the same command again."
            ) from error
        self.size += len(data)
        self.digests[answer["line"]], self.seeds[answer["line"]] = answer["prompt_digest"], answer["seed"]

    def close(self, finished: bool) -> None:
        """Close the file. If the batch is `finished`, sort the answers in the order of the input first."""
        try:
            os.fsync(self.descriptor)
            lines = list(self.digests)
            if finished and lines != sorted(lines):
                content = self.path.read_bytes().splitlines(keepends=True)
                in_order = sorted(zip(lines, content, strict=True))
                Destination("output", self.path).write(b"".join(line for _, line in in_order))
        finally:
            os.close(self.descriptor)

    def _sync(self) -> None:
        if time.monotonic() - self.synced_s >= SYNC_S:
            os.fsync(self.descriptor)
            self.synced_s = time.monotonic()

    def _lock(self) -> None:
        """Lock the file against other writers while it is open."""
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _invalid(f"{self.path} is being written by another process: wait for it.") from error

    def _read(self) -> None:
        """Read the answers in the file; an incomplete last line is dropped."""
        lines = self.path.read_bytes().split(b"\n")
        tail = lines.pop()
        if not (tail.startswith(BEGINNING) or BEGINNING.startswith(tail)):
            raise _invalid(f"{self.path} ends with something that is not an answer: name another file.")
        for count, line in enumerate(lines, start=1):
            answer = answer_of(line)
            if answer is None:
                raise _invalid(f"{self.path}:{count} is not an answer to a prompt: name another file.")
            if answer["line"] in self.digests:
                raise _invalid(f"{self.path}:{count} answers line {answer['line']} again: remove it.")
            self.settings = answer["settings"] if self.settings is None else self.settings
            self.digests[answer["line"]], self.seeds[answer["line"]] = answer["prompt_digest"], answer["seed"]
            self.size += len(line) + 1


def answer_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line as an answer; None if it is not one."""
    answer = parsed(line)
    if not isinstance(answer, dict) or not answer.keys() >= REQUIRED_KEYS:
        return None
    numbers = isinstance(answer["line"], int) and isinstance(answer["seed"], int)
    return answer if numbers and isinstance(answer["settings"], dict) else None


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest("output", message)
