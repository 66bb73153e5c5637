"""Training data: reads the user's files as prompts.

A `.jsonl` has an object per line, a `.txt` a prompt per line; any other file is one text, which is cut into prompts.
Bad lines are logged and skipped; more than one in a hundred raise an error. Some prompts are held out for evaluation.
"""

from __future__ import annotations

import hashlib
import json
import logging
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidRequest, UnusableData
from forerun.limits import shown
from forerun.prove.prompts import at_line, object_of, text_of
from forerun.request import ChatOptions
from forerun.text.tokenizer import Tokenizer
from forerun.train.settings import TrainSettings

FIELDS = ("prompt", "messages", "text")
MOST_BAD = 100  # at most one line in so many may be bad
MOST_LOGGED = 10  # bad lines that are logged individually
log = logging.getLogger(__name__)
PromptIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Prompts as token ids: the training prompts and the held-out ones, without duplicates."""

    train: Sequence[PromptIds]
    held_out: Sequence[PromptIds]
    num_lines: int
    bad: Sequence[str]  # "FILE:LINE: problem"

    @property
    def digest(self) -> str:
        """A hash of all prompts."""
        return hashlib.sha256(json.dumps([self.train, self.held_out]).encode()).hexdigest()[:16]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(map(len, (*self.train, *self.held_out)))


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Converts lines to prompts. `limit` is the context length; `chat`: whether the chat template is applied to all."""

    tokenizer: Tokenizer
    limit: int
    settings: TrainSettings
    chat: bool = False

    def of_entry(self, line: str) -> list[PromptIds]:
        """The prompts of a JSON line: one for "prompt" or "messages", several for "text"."""
        entry = object_of(line)
        name = next((name for name in FIELDS if entry.get(name) is not None), None)
        if name is None:
            raise InvalidRequest(
                "prompts", f'no field {", ".join(FIELDS)} (it has {", ".join(map(str, entry)) or "none"}): add "prompt"'
            )
        value = entry[name]
        if name == "messages":
            return [self.of_talk(value)]
        if not isinstance(value, str) or not value:
            raise InvalidRequest("prompts", f'"{name}" is {shown(value)}: it must be a text that is not empty')
        return self.of_text(value) if name == "text" else [self.of_prompt(value)]

    def of_prompt(self, text: str) -> PromptIds:
        """A prompt, as plain text or as the user's message of a chat."""
        if self.chat:
            return self.of_talk([{"role": "user", "content": text}])
        return self.fitting(self.tokenizer.encode(text))

    def of_talk(self, messages: Any) -> PromptIds:
        """A conversation as a prompt; a last message of the assistant is removed, since the target will answer."""
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("prompts", f'"messages" is {shown(messages)}: it must be a list of messages')
        if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant" and len(messages) > 1:
            messages = messages[:-1]
        text = ChatOptions().render(self.tokenizer, messages)
        return self.fitting(self.tokenizer.encode(text, add_special_tokens=False))

    def of_text(self, text: str) -> list[PromptIds]:
        """Prompts of `prompt_tokens` tokens, cut from a text at intervals that leave room for an answer each."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        whole = self.tokenizer.encode(text)
        lead = whole[: len(whole) - len(ids)] if whole[len(whole) - len(ids) :] == ids else []
        size = self.settings.prompt_tokens
        starts = range(0, len(ids), size + self.settings.max_tokens)
        return [self.fitting([*lead, *ids[start : start + size]]) for start in starts]

    def fitting(self, ids: Sequence[int]) -> PromptIds:
        """Check that a prompt is not empty and leaves room for an answer. Raises InvalidRequest."""
        if not ids:
            raise InvalidRequest("prompts", "it has no tokens: write some text")
        if len(ids) + 2 > self.limit:
            raise InvalidRequest(
                "prompts", f"{len(ids)} tokens leave no room for an answer in a context of {self.limit}: shorten it"
            )
        return tuple(ids)


def read_data(paths: Sequence[Path], reader: PromptReader) -> TrainingData:
    """The distinct prompts of these files, split by a hash into training and held-out prompts.

    Bad lines are logged. Raises UnusableData if they are more than one in MOST_BAD, and InvalidRequest for a file that
    cannot be read, or fewer than two prompts.
    """
    prompts, bad, num_lines = dict[PromptIds, None](), list[str](), 0
    for path in paths:
        for place, line in lines_of(path):
            num_lines += 1
            try:
                with at_line(place):
                    prompts |= dict.fromkeys(prompts_of(line, path, reader))
            except InvalidRequest as error:
                bad.append(str(error).removeprefix("prompts: "))
    refuse_bad(bad, num_lines)
    if len(prompts) < 2:
        names = ", ".join(map(str, paths)) or "none"
        raise InvalidRequest(
            "data", f"{names}: different prompts in all: {len(prompts)}; give at least 2, one is held out."
        )
    by_hash = sorted(prompts, key=lambda ids: hashlib.sha256(repr(ids).encode()).digest())
    num_held_out = max(1, min(reader.settings.held_out, len(by_hash) // 4))
    held_out = by_hash[:num_held_out]
    apart = set(held_out)
    return TrainingData([ids for ids in prompts if ids not in apart], held_out, num_lines, bad)


def refuse_bad(bad: Sequence[str], num_lines: int) -> None:
    """Log bad lines; raise UnusableData if there are too many."""
    for message in bad[:MOST_LOGGED]:
        log.warning("skipped: %s", message)
    if len(bad) > MOST_LOGGED:
        log.warning("skipped: %d further lines", len(bad) - MOST_LOGGED)
    if len(bad) * MOST_BAD > num_lines:
        raise UnusableData(
            f"{len(bad)} of {num_lines} lines cannot be used, more than 1 %: correct or remove them. "
            f"The first is {bad[0]}"
        )


def lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """(location, text) of every non-empty line of a .jsonl or .txt file, or of the entire file for other endings."""
    try:
        data = path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise InvalidRequest("data", f"{path} cannot be read ({error.strerror}): name a readable file.") from error
    if path.suffix not in (".jsonl", ".txt"):
        yield str(path), data
        return
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line


def prompts_of(line: bytes, path: Path, reader: PromptReader) -> list[PromptIds]:
    """The prompts of a line or of a text. Raises InvalidRequest for invalid content."""
    text = text_of(line)
    if path.suffix == ".jsonl":
        return reader.of_entry(text)
    if path.suffix == ".txt":
        return [reader.of_prompt(text)]
    return reader.of_text(text)
