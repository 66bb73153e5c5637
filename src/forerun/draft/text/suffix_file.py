"""PastFile: past answers on disk, one line of JSON each, after a line that says which tokenizer they belong to.

This file decides how answers survive the end of a process without harm to other files. An answer is one write at the
end of the file; a hidden lock file beside it keeps several processes apart. A file that is not understood to its last
line is refused and not changed. A later line replaces an earlier one of the same name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock

from forerun.errors import PastFileError, VocabularyMismatch
from forerun.store import parsed, replace_file

FORM = 1
HEAD = "forerun past answers, form"
LARGEST_ID = 2**31
POLL_S = 0.01  # how often a process that waits for another one looks


@dataclass(frozen=True, slots=True)
class PastAnswer:
    """An answer: a unique name, its tenant, and its tokens."""

    name: str
    tenant: str
    tokens: Sequence[int]

    def line(self) -> bytes:
        """The line of a file that holds it."""
        return as_line({"name": self.name, "tenant": self.tenant, "tokens": list(self.tokens)})

    @classmethod
    def of(cls, entry: dict[str, Any]) -> PastAnswer | None:
        """The answer of a line; None where the line is not valid."""
        name, tenant, tokens = (entry.get(key) for key in ("name", "tenant", "tokens"))
        if not isinstance(name, str) or not isinstance(tenant, str) or not isinstance(tokens, list):
            return None
        sound = all(type(token) is int and 0 <= token < LARGEST_ID for token in tokens)
        return cls(name, tenant, tokens) if sound else None


class PastFile:
    """A file of past answers, in the ids of the tokenizer with the fingerprint `vocabulary`.

    One that does not exist is created with the first answer, readable by its user only. Raises PastFileError for a file
    that is damaged, is something else, or cannot be read and written here, VocabularyMismatch for one in the ids of
    another tokenizer.
    """

    def __init__(self, path: str | Path, vocabulary: str) -> None:
        self.path = Path(path).expanduser().resolve()
        self.vocabulary = vocabulary
        self.broken = False
        self.restore(lambda found: None)

    def restore(self, take: Callable[[list[PastAnswer]], list[PastAnswer] | None]) -> None:
        """Hand over all that is kept, the oldest first. What `take` returns, unless None, replaces it."""
        with self.reachable():
            self.check_place()
            if not self.path.exists():
                return
        with self.reachable(), self.alone() as file:
            shortened = take(self.read(file))
            if shortened is not None:
                with contextlib.suppress(OSError):  # a long file is as good as a short one
                    self.replace(shortened)

    def append(self, kept: PastAnswer) -> None:
        """Write an answer down: it survives the process from here on. Where it fails, it warns and gives up."""
        if self.broken:
            return
        try:
            with self.alone() as file:
                write_all(file, kept.line())
        except OSError as error:
            self.broken = True  # drafting goes on, and no request fails for it
            warnings.warn(f"{self.path}: past answers are no longer kept there ({error})", RuntimeWarning, stacklevel=2)

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Errors of the system about the file become PastFileError, which says what to do."""
        try:
            yield
        except OSError as error:
            fix = "name a file in a folder that exists, where you may read and write"
            raise PastFileError(f"{self.path} cannot be used for past answers ({error.strerror}): {fix}") from error

    def check_place(self) -> None:
        """Raise OSError where no file can be, or none can be made."""
        folder = self.path.parent
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # some versions of filelock would make it
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")
        if not os.access(folder, os.W_OK | os.X_OK):  # the lock is beside the file
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    @contextmanager
    def alone(self) -> Iterator[FileIO]:
        """The file, open at its end, while no other process reads or writes it."""
        self.check_place()
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), mode=0o600)
        with lock.acquire(poll_interval=POLL_S), open(self.path, "ab+", buffering=0, opener=for_its_user) as file:
            if not os.fstat(file.fileno()).st_size:
                write_all(file, self.head())
            yield file

    def read(self, file: FileIO) -> list[PastAnswer]:
        """All answers. What a write that was cut short left behind the last one is taken away."""
        file.seek(0)
        *lines, end = file.readall().split(b"\n")
        self.check_head(lines[0] if lines else b"")
        answers = []
        for number, line in enumerate(lines[1:], start=2):
            kept = PastAnswer.of(entry_of(line))
            if kept is None:
                fix = "delete that line, or name another file"
                raise PastFileError(f"line {number} of {self.path} is damaged: {fix}")
            answers.append(kept)
        if (kept := PastAnswer.of(entry_of(end))) is not None:  # somebody's editor took the end of the line
            write_all(file, b"\n")
            return [*answers, kept]
        file.truncate(file.tell() - len(end))
        return answers

    def head(self) -> bytes:
        """The first line of the file."""
        return as_line({HEAD: FORM, "vocabulary": self.vocabulary})

    def check_head(self, line: bytes) -> None:
        """Refuse other files, and other tokenizers' answers."""
        head, fix = entry_of(line), "name another file, or one that does not exist yet"
        if HEAD not in head:
            raise PastFileError(f"{self.path} is no file of past answers: {fix}")
        if head[HEAD] != FORM:
            raise PastFileError(f"{self.path} is of form {head[HEAD]!r}, and form {FORM} is understood: {fix}")
        if head.get("vocabulary") != self.vocabulary:
            raise VocabularyMismatch(f"{self.path} holds answers in another tokenizer's ids: {fix}")

    def replace(self, wanted: Sequence[PastAnswer]) -> None:
        """Replace this file by one with only these answers, completely or not at all."""
        replace_file(self.path, [self.head(), *(kept.line() for kept in wanted)])


def as_line(entry: dict[str, Any]) -> bytes:
    """An entry as it stands in the file."""
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def entry_of(line: bytes) -> dict[str, Any]:
    """A line's entry; an empty one where it has none."""
    entry = parsed(line)
    return entry if isinstance(entry, dict) else {}


def for_its_user(path: str, flags: int) -> int:
    """Open, or make, a file that others may not read."""
    return os.open(path, flags, 0o600)


def write_all(file: FileIO, line: bytes) -> None:
    """Write a line at the end, whole or not at all."""
    before = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(before)
        raise
