"""PastAnswers: the answers of finished sequences, by tenant, for suffix decoding; and the file that stores them.

This module limits the memory for past answers, and drops the oldest answer of all tenants first. With a file, each
answer is appended to it at once, so that answers survive the end of the process. The file has a header line, which
names the tokenizer, and one line of JSON per answer; a later line replaces an earlier one of the same name. An answer
is a single write at the end, and a hidden lock file in the same folder serializes the processes that share the file. A
file that has an invalid line is refused and not changed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock

from forerun.draft.text.suffix_tree import Leaf, Node, SuffixTree
from forerun.errors import PastFileError, VocabularyMismatch
from forerun.fields import short
from forerun.limits import shown
from forerun.store import parsed, replace_file

DEPTH = 12  # tokens of the longest context and the token after it
MAX_BYTES = 256 << 20
SLACK = 64  # a file is rewritten if it has so many lines more than twice its valid answers
FORMAT = 1  # version of the file's format
HEADER = "forerun past answers, form"
LARGEST_ID = 2**31
UNUSABLE = (OSError, RuntimeError, ValueError)  # what paths raise; the last two: an unknown user's home, a NUL
PRIVATE = partial(os.open, mode=0o600)  # for the file's user only
POLL_S = 0.01  # how often a process that waits for the lock tries again


@dataclass(frozen=True, slots=True)
class PastAnswer:
    """An answer: a unique name, its tenant, and its tokens."""

    name: str
    tenant: str
    tokens: Sequence[int]

    def line(self) -> bytes:
        return as_line({"name": self.name, "tenant": self.tenant, "tokens": list(self.tokens)})

    @classmethod
    def of(cls, entry: dict[str, Any]) -> PastAnswer | None:
        """The answer of a parsed line; None if the line is not valid."""
        name, tenant, tokens = (entry.get(key) for key in ("name", "tenant", "tokens"))
        if not isinstance(name, str) or not isinstance(tenant, str) or not isinstance(tokens, list):
            return None
        valid = all(type(token) is int and 0 <= token < LARGEST_ID for token in tokens)
        return cls(name, tenant, tokens) if valid else None


class PastFile:
    """A file of past answers, in the ids of the tokenizer with the fingerprint `vocabulary`.

    A file that does not exist is created with the first answer, readable by its user only. Raises PastFileError for a
    file that is damaged, has another format, or cannot be read and written, VocabularyMismatch for one in the ids of
    another tokenizer.
    """

    def __init__(self, path: str | Path, vocabulary: str) -> None:
        with usable_path(path):
            self.path = Path(path).expanduser().resolve()
        self.vocabulary = vocabulary
        self.broken = False
        self.restore(lambda answers: None)

    @property
    def lock_path(self) -> Path:
        """The lock file."""
        return self.path.with_name(f".{self.path.name}.lock")

    def restore(self, take: Callable[[list[PastAnswer]], list[PastAnswer] | None]) -> None:
        """Pass all stored answers to `take`, the oldest first. If it returns a list, the list replaces them."""
        with usable_path(self.path, (OSError,)):
            self.check_path()
            if not self.path.exists():
                return
        with usable_path(self.path, (OSError,)), self.locked() as file:
            shortened = take(self.read(file))
            if shortened is not None:
                with contextlib.suppress(OSError):  # the longer file is valid too
                    self.replace(shortened)

    def append(self, answer: PastAnswer) -> None:
        """Write an answer to the file. After an error a warning is issued, and nothing more is written."""
        if self.broken:
            return
        try:
            with self.locked() as file:
                self.check_unchanged(file)
                write_all(file, answer.line())
        except (OSError, PastFileError, VocabularyMismatch) as error:
            self.broken = True  # no request fails because of it
            message = f"{self.path}: past answers are no longer stored there ({error})"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def check_path(self) -> None:
        """Raise OSError if the file, or the lock in its folder, cannot be created."""
        folder = self.path.parent
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # some versions of filelock create it
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with contextlib.suppress(FileNotFoundError):
            self.lock_path.stat()  # its name may be too long

    @contextmanager
    def locked(self) -> Iterator[FileIO]:
        """The file, open at its end, while no other process reads or writes it."""
        self.check_path()
        self.lock_path.touch(mode=0o600)  # raises where it cannot be created; FileLock would try forever
        lock = FileLock(self.lock_path, mode=0o600)
        with lock.acquire(poll_interval=POLL_S), open(self.path, "ab+", buffering=0, opener=PRIVATE) as file:
            if not os.fstat(file.fileno()).st_size:
                write_all(file, self.header())
            yield file

    def read(self, file: FileIO) -> list[PastAnswer]:
        """All answers. An incomplete last line, from a write that was interrupted, is removed from the file."""
        file.seek(0)
        *lines, end = file.readall().split(b"\n")
        self.check_header(lines[0] if lines else b"")
        answers = []
        for number, line in enumerate(lines[1:], start=2):
            answer = PastAnswer.of(entry_of(line))
            if answer is None:
                fix = "delete that line, or name another file"
                raise PastFileError(f"line {number} of {self.path} is damaged: {fix}")
            answers.append(answer)
        if (answer := PastAnswer.of(entry_of(end))) is not None:  # an editor removed the last line break
            write_all(file, b"\n")
            return [*answers, answer]
        file.truncate(file.tell() - len(end))
        return answers

    def check_unchanged(self, file: FileIO) -> None:
        """Check that another process has not made the file one of another kind, or was killed while writing to it.

        An incomplete last line is removed. Raises as `read` does.
        """
        file.seek(0)
        begins_as_ours = file.read(len(self.header())) == self.header()
        file.seek(-1, os.SEEK_END)
        if not begins_as_ours or file.read() != b"\n":
            self.read(file)

    def header(self) -> bytes:
        return as_line({HEADER: FORMAT, "vocabulary": self.vocabulary})

    def check_header(self, line: bytes) -> None:
        """Raise PastFileError or VocabularyMismatch unless the line is the header of a file for this tokenizer."""
        header, fix = entry_of(line), "name another file, or one that does not exist yet"
        if HEADER not in header:
            raise PastFileError(f"{self.path} is no file of past answers: {fix}")
        if header[HEADER] != FORMAT:
            raise PastFileError(f"{self.path} has format {shown(header[HEADER])}, this version reads {FORMAT}: {fix}")
        if header.get("vocabulary") != self.vocabulary:
            raise VocabularyMismatch(f"{self.path} has answers in another tokenizer's ids: {fix}")

    def replace(self, answers: Sequence[PastAnswer]) -> None:
        """Replace the file atomically by one with only these answers."""
        replace_file(self.path, [self.header(), *(answer.line() for answer in answers)], like=self.path)


@contextmanager
def usable_path(path: str | Path, errors: tuple[type[Exception], ...] = UNUSABLE) -> Iterator[None]:
    """Raise PastFileError, with the fix, in place of these errors."""
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        fix = "name a file in a folder that exists, where you may read and write"
        raise PastFileError(f"{short(path)} cannot be used for past answers ({reason}): {fix}") from error


def as_line(entry: dict[str, Any]) -> bytes:
    """The line of an entry, with its line break."""
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def entry_of(line: bytes) -> dict[str, Any]:
    """The entry of a line; empty if the line is not a JSON object."""
    entry = parsed(line)
    return entry if isinstance(entry, dict) else {}


def write_all(file: FileIO, line: bytes) -> None:
    """Append a line completely; if that fails, restore the file's length and raise OSError."""
    before = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(before)
        raise


class PastAnswers:
    """Past answers, the oldest first, and a suffix tree of them per tenant: at most about `max_bytes` in all.

    With a file, its newest answers that fit are loaded at once. Not thread-safe, like all drafters. Raises the errors
    of PastFile.
    """

    def __init__(self, depth: int = DEPTH, max_bytes: int = MAX_BYTES, file: PastFile | None = None) -> None:
        self.depth, self.max_bytes, self.file = depth, max_bytes, file
        self.trees: dict[str, SuffixTree] = {}
        self.answers: OrderedDict[str, PastAnswer] = OrderedDict()
        self.num_bytes = 0
        self.origin = secrets.token_hex(8)  # distinguishes equal sequence numbers of several processes
        if file is not None:
            file.restore(self.restore)

    def restore(self, stored: Sequence[PastAnswer]) -> list[PastAnswer] | None:
        """Load the answers of a file; returns its new content if most of its lines are obsolete, else None."""
        for answer in reversed(stored):
            if self.num_bytes > self.max_bytes:
                break
            if answer.name not in self.answers:  # a later line of the same name replaces this one
                self.enter(answer)
        self.answers = OrderedDict(reversed(self.answers.items()))
        self.shrink()
        return list(self.answers.values()) if len(stored) > 2 * len(self.answers) + SLACK else None

    def add(self, seq_id: int, tenant: str, tokens: Sequence[int]) -> None:
        """Store the answer of a sequence, unless it is empty, in place of an earlier one of this sequence."""
        self.drop(self.name(seq_id))
        if not tokens:
            return
        answer = PastAnswer(self.name(seq_id), tenant, tokens)
        self.enter(answer)
        self.shrink()
        if self.file is not None and answer.name in self.answers:
            self.file.append(answer)

    def reopen(self, seq_id: int) -> None:
        """Drop the answer of a sequence that resumes after preemption."""
        self.drop(self.name(seq_id))

    def clear(self) -> None:
        """Drop all answers from memory. The file does not change."""
        self.trees.clear()
        self.answers.clear()
        self.num_bytes = 0

    def name(self, seq_id: int) -> str:
        """The unique name of a sequence's answer."""
        return f"{self.origin}-{seq_id}"

    def enter(self, answer: PastAnswer) -> None:
        """Add an answer to its tenant's tree."""
        tree = self.trees.setdefault(answer.tenant, SuffixTree(self.depth))
        before = tree.num_bytes
        self.answers[answer.name] = PastAnswer(answer.name, answer.tenant, tree.add(answer.tokens))
        self.num_bytes += tree.num_bytes - before

    def shrink(self) -> None:
        """Drop the oldest answers until the rest fits `max_bytes`."""
        while self.num_bytes > self.max_bytes:
            self.drop(next(iter(self.answers)))

    def drop(self, name: str) -> None:
        """Drop an answer; unknown names are ignored."""
        answer = self.answers.pop(name, None)
        if answer is None:
            return
        tree = self.trees[answer.tenant]
        before = tree.num_bytes
        tree.remove(answer.tokens)
        self.num_bytes += tree.num_bytes - before
        if not tree.num_bytes:
            del self.trees[answer.tenant]


@dataclass(slots=True)
class PastCursor:
    """The places of a growing text's end in its tenant's tree, updated so that each token is looked up once.

    `places` are those of the last 1, 2, ... tokens when the text had `length` tokens and the tree `num_changes`.
    """

    tree: SuffixTree | None = None
    num_changes: int = 0
    length: int = 0
    places: list[Node | Leaf] = field(default_factory=list)

    def read(self, tree: SuffixTree | None, text: Sequence[int]) -> list[Node | Leaf]:
        """Advance to the text's end and return the places; start from its last tokens if the tree has changed."""
        if tree is None:
            self.tree, self.places = None, []
            return self.places
        first = len(text) - tree.depth
        if tree is not self.tree or tree.num_changes != self.num_changes or self.length < first:
            self.tree, self.num_changes, self.length, self.places = tree, tree.num_changes, max(0, first), []
        for token in text[self.length :]:
            self.places = tree.follow(self.places, token)
        self.length = len(text)
        return self.places
