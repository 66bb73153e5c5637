"""Fields: a JSON file of a checkpoint, read with errors that name the file, the key and the value.

Checkpoints come from untrusted sources and over networks, so a file may be missing, truncated or a folder, and may have
any value under any key. This file decides how that is reported; its callers decide which keys to read. null counts as a
missing key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forerun.errors import ModelError, ModelNotFound, UnsupportedModel
from forerun.limits import shown

T = TypeVar("T")
INT32 = 2**31 - 1
SMALLEST, LARGEST = 1e-30, 1e30  # of numbers: these and their reciprocals fit into a float32
FIX = "correct it or download the file again"
WRONG_FILES = {  # the first bytes of a wrong file: what it is, and what to do
    b"version https://git-lfs": "is a pointer of Git LFS and not the file itself: run `git lfs pull` in its folder",
    b"<": "is a web page and not the file itself: download the file (`hf download owner/name FILE`)",
    b"GGUF": "is a GGUF file with another name: let its name end in .gguf",
    b"PK": "is an archive of torch.save, which forerun does not read: use the version in safetensors",
}


def short(text: object) -> str:
    """A text, such as another library's error, shortened for a message."""
    line = str(text)
    return line if len(line) <= 200 else line[:200] + "…"


def is_list_of_whole(value: object, least: int = 0, most: int = INT32) -> bool:
    """Whether a value in JSON is a list of whole numbers from `least` to `most`."""
    return isinstance(value, list) and all(type(each) is int and least <= each <= most for each in value)


def mistaken(path: Path) -> str | None:
    """What kind of wrong file this is, from its first bytes, and what to do; None if they do not tell."""
    with suppress(OSError), path.open("rb") as file:
        first_bytes = file.read(64).lstrip()
        return next((problem for start, problem in WRONG_FILES.items() if first_bytes.startswith(start)), None)
    return None


@dataclass(frozen=True, slots=True)
class Fields:
    """The object in a JSON file, or an object inside it. Unusable values raise `error`."""

    path: Path
    values: Mapping[str, Any]
    error: type[ModelError] = UnsupportedModel

    def refuse(self, key: str, fix: str) -> ModelError:
        """The error for a value that cannot be used; `fix` says which values are possible, and what to do."""
        return self.error(f"{self.path}: {key} is {shown(self.values.get(key))}; {fix}")

    def whole(self, key: str, default: int | None = None, least: int = 1, most: int = INT32) -> int:
        """A whole number from `least` to `most`."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refuse(key, f"it must be a whole number, at least {least} and at most {most}: {FIX}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0 that a float32 can hold."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not SMALLEST <= value <= LARGEST:
            raise self.refuse(key, f"it must be a number above 0, from {SMALLEST} to {LARGEST}: {FIX}")
        return float(value)

    def optional(self, key: str) -> float | None:
        """A number above 0; None if the key is missing or 0."""
        return self.number(key) if self._value(key, 0) != 0 else None

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; `default` if the key is missing."""
        return self._of_type(key, default, bool, "true or false")

    def text(self, key: str) -> str | None:
        """A text; None if the key is missing."""
        return self._of_type(key, None, str | None, "text")

    def names(self, key: str) -> list[str]:
        """A list of texts; empty if the key is missing."""
        names: list[str] = self._of_type(key, [], list, "a list of texts")
        if not all(isinstance(name, str) for name in names):
            raise self.refuse(key, f"it must be a list of texts: {FIX}")
        return names

    def inside(self, key: str) -> Fields:
        """The object under a key; an empty one if the key is missing."""
        return Fields(Path(f"{self.path}, {key}"), self._of_type(key, {}, dict, "an object"), self.error)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def _of_type(self, key: str, default: T, kind: Any, what: str) -> T:
        value: T = self._value(key, default)
        if not isinstance(value, kind):
            raise self.refuse(key, f"it must be {what}: {FIX}")
        return value


def read_fields(
    path: Path, damaged: type[ModelError] = ModelError, error: type[ModelError] = UnsupportedModel
) -> Fields:
    """The object in a JSON file. Raises ModelNotFound if the file is missing, `damaged` if it cannot be read.

    Unusable values in it raise `error`.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as missing:
        raise ModelNotFound(f"{path} is not there: name the folder that holds the model's {path.name}") from missing
    except OSError as unreadable:
        raise damaged(f"{path} cannot be read ({unreadable.strerror}): make it a readable file") from unreadable
    except (ValueError, RecursionError) as broken:
        raise damaged(f"{path} {mistaken(path) or f'is damaged ({short(broken)}): download it again'}") from broken
    if not isinstance(values, dict):
        raise damaged(f"{path} is damaged (not a JSON object): download it again")
    return Fields(path, values, error)
