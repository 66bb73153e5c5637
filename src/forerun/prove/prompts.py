"""Reads files of prompts: one JSON object per line (.jsonl) or one prompt per line (.txt).

`bench/material.py` reads other fields of a line.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.errors import InvalidRequest, TokenizerError
from forerun.limits import shown, strict_json, values_in_json

FIELDS = ("prompt", "text", "turns")


@contextmanager
def at_line(place: object) -> Iterator[None]:
    """Context in which errors of a prompt name its location, "FILE:LINE"."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest("prompts", f"{place}: {str(error).removeprefix('prompts: ')}") from error
    except TokenizerError as error:
        raise TokenizerError(f"{place} has messages, but {error}") from error


def prompt_lines(path: Path, most: int | None = None) -> Iterator[tuple[str, str]]:
    """(location, text) of the first `most` non-empty lines of a file.

    Raises InvalidRequest, naming file and line, for a file that cannot be read or is empty.
    """
    lines = enumerate(file_lines(path, "prompts"), start=1)
    places = [(f"{path}:{number}", line) for number, line in lines if line.strip()]
    if not places:
        raise InvalidRequest("prompts", f"{path}: it contains no prompts: write one per line")
    for place, line in places[:most]:
        with at_line(place):
            text = text_of(line)
        yield place, text


def file_lines(path: Path, field: str) -> list[bytes]:
    """All lines of a .jsonl or .txt file. Raises InvalidRequest, naming the field, for other or unreadable files."""
    if path.suffix not in (".jsonl", ".txt"):
        raise InvalidRequest(field, f"{path}: its name does not end in .jsonl or .txt: give such a file")
    try:
        return path.read_bytes().removeprefix(BOM_UTF8).split(b"\n")
    except OSError as error:
        message = f"{path}: it cannot be read ({error.strerror}): give the path of a file"
        raise InvalidRequest(field, message) from error


def text_of(line: bytes) -> str:
    """Decode a line. Raises InvalidRequest if it is not UTF-8."""
    try:
        return line.decode("utf-8").rstrip("\r")
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompts", f"not UTF-8 ({error.reason}): save the file as UTF-8") from error


def object_of(line: str) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises InvalidRequest."""
    with values_in_json():
        try:
            entry = strict_json(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("prompts", f"not JSON ({error}): write one object per line") from error
        if not isinstance(entry, dict):
            raise InvalidRequest("prompts", f'{shown(entry)} is not an object: write {{"prompt": ...}}')
    return entry


def prompt_of(entry: Mapping[str, Any]) -> str:
    """The prompt in a line's object. Raises InvalidRequest without one."""
    name = next((name for name in FIELDS if name in entry), None)
    if name is None:
        present = ", ".join(entry) or "none"
        raise InvalidRequest("prompts", f'there is no prompt among its fields ({present}): add "prompt"')
    text = entry[name]
    if name == "turns" and isinstance(text, list) and text:
        text = text[0]
    if not isinstance(text, str) or not text:
        raise InvalidRequest("prompts", f'"{name}" is {json.dumps(entry[name])[:40]}: it must be a non-empty text')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = (
            f'"{name}" is not Unicode ({error.reason} at character {error.start}): correct the escape sequence there'
        )
        raise InvalidRequest("prompts", problem) from error
    return text
