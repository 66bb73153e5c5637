"""Prompts from a file: one JSON object per line (.jsonl) or one prompt per line (.txt).

This file decides which fields hold a prompt, and which error a line without one raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidRequest
from forerun.limits import shown_as_json
from forerun.request import Request

FIELDS = ("prompt", "text", "turns")


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """A prompt and its place: "FILE:LINE"."""

    text: str
    place: str


def read_prompts(path: str | Path, most: int | None = None) -> list[FilePrompt]:
    """The first `most` prompts of a file; empty lines are skipped.

    A JSON line has its prompt in "prompt" or "text", or "turns", a list whose first entry it is. Raises
    InvalidRequest, with file and line, for a file that cannot be read or a line without a prompt.
    """
    path = Path(path)
    lines = prompt_lines(path)[:most]
    txt = path.suffix == ".txt"
    return [FilePrompt(line if txt else prompt_of(object_of(line, place), place), place) for place, line in lines]


def prompt_lines(path: Path) -> list[tuple[str, str]]:
    """The lines of a file of prompts that are not empty, each behind its place; at least one.

    Raises InvalidRequest, with file and line, for a file that cannot be read or holds nothing.
    """
    lines = enumerate(file_lines(path, "prompts"), start=1)
    places = [(f"{path}:{number}", line) for number, line in lines if line.strip()]
    if not places:
        raise _invalid(path, "there is no prompt in it: write one a line")
    return [(place, text_of(line, place)) for place, line in places]


def file_lines(path: Path, field: str) -> list[bytes]:
    """All lines of a .jsonl or .txt file. Raises InvalidRequest, naming the field, for another or an unreadable one."""
    if path.suffix not in (".jsonl", ".txt"):
        raise InvalidRequest(field, f"{path}: the name ends in {path.suffix!r}: give a .jsonl or a .txt file")
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        message = f"{path}: it cannot be read ({error.strerror}): give the path of a file"
        raise InvalidRequest(field, message) from error


def text_of(line: bytes, place: str) -> str:
    """A line as text."""
    try:
        return line.decode("utf-8").rstrip("\r")
    except UnicodeDecodeError as error:
        raise _invalid(place, f"not UTF-8 ({error.reason}): save the file as UTF-8") from error


def object_of(line: str, place: str) -> dict[str, Any]:
    """The object of one JSON line."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _invalid(place, f"not JSON ({error}): write one object a line") from error
    if not isinstance(entry, dict):
        raise _invalid(place, f'{shown_as_json(entry)} is not an object: write {{"prompt": ...}}')
    return entry


def prompt_of(entry: Mapping[str, Any], place: str) -> str:
    """The prompt of the object of one line."""
    name = next((name for name in FIELDS if name in entry), None)
    if name is None:
        raise _invalid(place, f'no field {", ".join(FIELDS)} (it has {", ".join(entry) or "none"}): add "prompt"')
    text = entry[name]
    if name == "turns" and isinstance(text, list) and text:
        text = text[0]
    if not isinstance(text, str) or not text:
        raise _invalid(place, f'"{name}" is {json.dumps(entry[name])[:40]}: it must hold some text')
    return text


def check_lengths(encode: Callable[[Request], object], prompts: Sequence[FilePrompt]) -> None:
    """Raise InvalidRequest, with file and line, for a prompt that the model cannot be given: `encode` refuses it."""
    for prompt in prompts:
        try:
            encode(Request.of(prompt.text))
        except InvalidRequest as error:
            raise _invalid(prompt.place, str(error)) from error


def _invalid(place: str | Path, message: str) -> InvalidRequest:
    return InvalidRequest("prompts", f"{place}: {message}")
