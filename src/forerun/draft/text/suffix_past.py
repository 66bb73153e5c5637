"""Past: the answers of finished sequences, separate for each tenant, for suffix decoding; and the file that keeps them.

This module decides how much is kept and what is forgotten first: the oldest answer of all tenants. Where there is a
file, every answer is written to it as soon as it is held here: one line of JSON each, after a line that says which
tokenizer they belong to. Answers survive the end of a process without harm to other files. An answer is one write at
the end of the file; a hidden lock file beside it keeps several processes apart. A file that is not understood to its
last line is refused and not changed. A later line replaces an earlier one of the same name.
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
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock

from forerun.draft.text.suffix_tree import Leaf, Node, SuffixTree
from forerun.errors import PastFileError, VocabularyMismatch
from forerun.store import parsed, replace_file

DEPTH = 12  # longest context, what followed it included
MAX_BYTES = 256 << 20
SLACK = 64  # lines of a file that may be dead before it is written anew
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
        replace_file(self.path, [self.head(), *(kept.line() for kept in wanted)], like=self.path)


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


class Past:
    """Contexts of past answers, by tenant: at most about `max_bytes` in all. Not thread-safe, as drafters are not.

    `answers` are what is kept, the oldest first. With a file, what it holds is read now, as far as there is room; the
    newest first. Raises what PastFile raises.
    """

    def __init__(self, depth: int = DEPTH, max_bytes: int = MAX_BYTES, file: PastFile | None = None) -> None:
        self.depth, self.max_bytes, self.file = depth, max_bytes, file
        self.trees: dict[str, SuffixTree] = {}
        self.answers: OrderedDict[str, PastAnswer] = OrderedDict()
        self.num_bytes = 0
        self.origin = secrets.token_hex(8)  # other processes number their sequences too
        if file is not None:
            file.restore(self.restore)

    def restore(self, found: Sequence[PastAnswer]) -> list[PastAnswer] | None:
        """Take over what a file holds; what it should hold instead, if much of it is dead."""
        for kept in reversed(found):
            if self.num_bytes > self.max_bytes:
                break
            if kept.name not in self.answers:  # or else it was said again later, and longer
                self.enter(kept)
        self.answers = OrderedDict(reversed(self.answers.items()))
        self.shrink()
        return list(self.answers.values()) if len(found) > 2 * len(self.answers) + SLACK else None

    def add(self, seq_id: int, tenant: str, answer: Sequence[int]) -> None:
        """Keep a sequence's answer, if it said anything, in the place of an earlier one of it."""
        self.drop(self.name(seq_id))
        if not answer:
            return
        kept = PastAnswer(self.name(seq_id), tenant, answer)
        self.enter(kept)
        self.shrink()
        if self.file is not None and kept.name in self.answers:
            self.file.append(kept)

    def reopen(self, seq_id: int) -> None:
        """A sequence was resumed: its answer so far is no past answer."""
        self.drop(self.name(seq_id))

    def clear(self) -> None:
        """Forget all answers. The file stays as it is."""
        self.trees.clear()
        self.answers.clear()
        self.num_bytes = 0

    def name(self, seq_id: int) -> str:
        """The name of a sequence's answer, here and in files."""
        return f"{self.origin}-{seq_id}"

    def enter(self, kept: PastAnswer) -> None:
        """Add an answer to its tenant's tree."""
        tree = self.trees.setdefault(kept.tenant, SuffixTree(self.depth))
        before = tree.num_bytes
        self.answers[kept.name] = PastAnswer(kept.name, kept.tenant, tree.add(kept.tokens))
        self.num_bytes += tree.num_bytes - before

    def shrink(self) -> None:
        """Drop the oldest answers until there is room."""
        while self.num_bytes > self.max_bytes:
            self.drop(next(iter(self.answers)))

    def drop(self, name: str) -> None:
        """Forget an answer; unknown ones are ignored."""
        kept = self.answers.pop(name, None)
        if kept is None:
            return
        tree = self.trees[kept.tenant]
        before = tree.num_bytes
        tree.remove(kept.tokens)
        self.num_bytes += tree.num_bytes - before
        if not tree.num_bytes:
            del self.trees[kept.tenant]


@dataclass(slots=True)
class Reader:
    """Where a growing text stands in its tenant's past, so that each token of it is looked up once.

    `places` is what is stored for its last 1, 2, ... tokens, when it had `length` of them and the tree was as it was.
    """

    tree: SuffixTree | None = None
    num_changes: int = 0
    length: int = 0
    places: list[Node | Leaf] = field(default_factory=list)

    def read(self, tree: SuffixTree | None, text: Sequence[int]) -> list[Node | Leaf]:
        """Go on to the text's end; from a little before it where the past has changed, or much is unread."""
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
