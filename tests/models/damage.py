"""Damage to the files of a checkpoint: values of any type, truncated files, folders in place of files, random bytes."""

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ModelError

NESTED: Any = "deep"
for _ in range(60):
    NESTED = [NESTED]
ABSENT = object()
LONGEST_S = 120.0  # processor time, far more than any case takes
LONGEST_MESSAGE = 1500
VALUES: dict[str, Any] = {  # values for a key, by a name for the test
    "absent": ABSENT,
    "null": None,
    "true": True,
    "zero": 0,
    "one": 1,
    "negative": -1,
    "billion": 10**9,
    "2**31": 2**31,
    "2**64": 2**64,
    "digits": 10**400,
    "small": 1e-300,
    "large": 1e300,
    "nan": float("nan"),
    "inf": float("inf"),
    "empty": "",
    "text": "strange",
    "surrogate": "\ud800",
    "nul": "a\0b",
    "long": "x" * 5000,
    "list": [],
    "number list": [3, -4, 2**70],
    "mixed list": ["full_attention", 5, None],
    "nested": NESTED,
    "object": {},
    "text object": {"content": 5, "type": "strange", "0": {"content": []}},
}
TEXTS: dict[str, bytes] = {  # contents in place of a JSON file
    "empty": b"",
    "cut": b'{"a": [1, 2',
    "utf-8": b'{"a": "\xff\xfe"}',
    "list": b"[]",
    "number": b"5",
    "null": b"null",
    "deep": b"[" * 200_000,
    "deep object": b'{"a":' * 100_000,
    "deep and whole": b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "nul": b"\0" * 100,
}


@dataclass(frozen=True, slots=True)
class Place:
    """A value inside a JSON file: the keys and indices that lead to it."""

    path: tuple[str | int, ...]

    def replaced(self, document: Any, value: Any) -> Any:
        """A copy of the document with another value here, or with none."""
        result = copy.deepcopy(document)
        inside = result
        for key in self.path[:-1]:
            inside = inside[key]
        if value is ABSENT:
            del inside[self.path[-1]]
        else:
            inside[self.path[-1]] = value
        return result


def places(document: Any, depth: int, path: tuple[str | int, ...] = ()) -> Iterator[Place]:
    """Every value of a document down to `depth`; of lists only the first and the last."""
    if not depth:
        return
    if isinstance(document, dict):
        keys: list[Any] = list(document)
        keys = keys if len(keys) < 40 else [*keys[:2], keys[-1]]
    elif isinstance(document, list):
        keys = sorted({0, len(document) - 1}) if document else []
    else:
        return
    for key in keys:
        yield Place((*path, key))
        yield from places(document[key], depth - 1, (*path, key))


def judged(work: Callable[[], object], kind: type[ModelError] = ModelError) -> ModelError | None:
    """The readable error of this kind that the work raises, or None; asserts that it raises no other error."""
    begin, error = time.process_time(), None
    try:
        work()
    except kind as raised:
        error = raised
        assert len(str(error)) < LONGEST_MESSAGE, f"{len(str(error))} characters"
    assert time.process_time() - begin < LONGEST_S, "it hangs"
    return error


def copied(source: Path, folder: Path) -> Path:
    """The checkpoint's files in another folder."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8", errors="surrogatepass")
