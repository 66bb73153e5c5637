"""Chat templates: a conversation as the text that a model was trained to read.

This file decides what a conversation is, which of a checkpoint's templates is used, and whether an error while
rendering is due to the conversation or the template. Templates are read when they are first needed, so that a damaged
one does not keep a model from completing text. `text/renderer.py` runs them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from forerun.errors import ChatTemplateError, InvalidRequest
from forerun.fields import short
from forerun.limits import shown
from forerun.text.renderer import RENDERER

FILE = "chat_template.jinja"
OTHER_FILES = "additional_chat_templates/*.jinja"
PUT_BESIDE = f"put one into {FILE} beside tokenizer.json"
NAME_ANOTHER = "name a folder that has one with --tokenizer"
MARK = "<|forerun goes on here|>"
MOST_DEPTH = 64  # of lists and objects inside a message
LONGEST_TEMPLATE = 1 << 20
LONGEST_VALUES = 1 << 24  # characters: several times what the longest context holds
ITEM = 32  # characters that an item of a list or an object counts as
LONGEST_NUMBER = 1 << 10  # bits


class ChatTemplate:
    """One checkpoint's templates, read when one is first needed.

    `declared` is what tokenizer_config.json says: one template, or a list of them with names, of which "default" is
    used, and "tool_use" where there are tools. Where the folder has `files`, by name, they count instead of it.
    """

    def __init__(
        self, declared: object, origin: str, files: Mapping[str, Path] | None = None, cure: str = PUT_BESIDE
    ) -> None:
        self._declared = declared
        self._origin = origin
        self._files = files or {}
        self._cure = cure

    def __reduce__(self) -> Any:
        """What a copy in another process is made of: the texts of the files, which may not be there."""
        with suppress(ChatTemplateError):
            declared = [{"name": name, "template": source} for name, source in self._named.items()]
            return ChatTemplate, (declared, self._origin, None, self._cure)
        return ChatTemplate, (self._declared, self._origin, self._files, self._cure)

    @classmethod
    def load(cls, folder: Path, declared: object, gguf_file: object = None) -> ChatTemplate:
        """The templates of a folder; its files are checked when one is used.

        Where the folder stands for a GGUF file, errors name that file.
        """
        if isinstance(gguf_file, str):
            return cls(declared, f"{gguf_file} (tokenizer.chat_template)", cure=NAME_ANOTHER)
        files = {"default": folder / FILE} if (folder / FILE).exists() else {}
        files |= {file.name.removesuffix(".jinja"): file for file in sorted(folder.glob(OTHER_FILES))}
        if files:
            return cls(declared, str(files.get("default", folder / OTHER_FILES)), files)
        return cls(declared, f"{folder / 'tokenizer_config.json'} (chat_template)")

    def render(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokens: Mapping[str, str] | None = None,
        **options: object,
    ) -> str:
        """The prompt of a conversation; `tokens` are the special tokens by name (bos_token, eos_token, ...).

        `options` are given to the template under their names: tools, documents, enable_thinking and so on. Raises
        ChatTemplateError where the template is missing or fails, InvalidRequest where it refuses the conversation or
        where that is none.
        """
        talk = conversation(messages)
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message", "it excludes add_generation_prompt, which begins another message: use one."
            )
        plain_options = {name: plain(value, name) for name, value in options.items()}
        values = {"tools": None, "documents": None, **(tokens or {}), **plain_options}
        name = "tool_use" if plain_options.get("tools") else "default"
        if continue_final_message:
            mark_end(talk)
        text = self._run(name, values | {"messages": talk, "add_generation_prompt": add_generation_prompt})
        return up_to_mark(text) if continue_final_message else text

    def require(self, name: str = "default") -> None:
        """Raise ChatTemplateError where a template is missing or does not parse."""
        self._run(name, None)

    @property
    def is_usable(self) -> bool:
        """Whether conversations can be held: there is a template, and it parses."""
        try:
            self.require()
        except ChatTemplateError:
            return False
        return True

    def _run(self, name: str, values: dict[str, object] | None) -> str:
        answer = RENDERER.answer(self.source(name), values)
        if answer is None:
            problem = "takes more time or memory than a conversation needs"
            raise ChatTemplateError(f"the chat template of {self._origin} {problem}")
        outcome, text = answer
        if outcome == "refused":
            raise InvalidRequest("messages", f"the chat template refuses them: {short(text)}")
        if outcome != "text":
            raise ChatTemplateError(f"the chat template of {self._origin} {outcome}: {short(text)}")
        return text

    def digest(self) -> str:
        """16 hex digits that tell the template apart from others. Raises ChatTemplateError where there is none."""
        return hashlib.sha256(self.source("default").encode()).hexdigest()[:16]

    def source(self, name: str = "default") -> str:
        """The text of a template. Raises ChatTemplateError where there is none, or none that can be read."""
        named = self._named
        source = named.get(name, named.get("default"))
        if source is None:
            origin = self._origin + (f", which has {shown(sorted(named))} by name" if named else "")
            raise ChatTemplateError(
                f'no chat template in {origin}: use a chat ("instruct") model, {self._cure}, '
                "give one as chat_template, or let the model go on from plain text"
            )
        if len(source) > LONGEST_TEMPLATE:
            raise ChatTemplateError(f"the chat template of {self._origin} is longer than {LONGEST_TEMPLATE} letters")
        return source

    @cached_property
    def _named(self) -> dict[str, str]:
        """The templates by name. Raises ChatTemplateError for what is not a template."""
        if self._files:
            return {name: text_of(file) for name, file in self._files.items()}
        declared = self._declared
        if declared is None or isinstance(declared, str):
            return {} if declared is None else {"default": declared}
        named: dict[str, str] = {}
        for entry in declared if isinstance(declared, list) else [None]:
            name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(source, str):
                rule = "it must be text, or a list of objects with name and template: download the file again"
                raise ChatTemplateError(f"{self._origin} is {shown(declared)}; {rule}")
            named[name] = source
        return named


def text_of(file: Path) -> str:
    """The text of a template's file. Raises ChatTemplateError where it cannot be read."""
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ChatTemplateError(f"{file} cannot be read ({short(error)}): download it again") from error


def mark_end(talk: list[dict[str, Any]]) -> None:
    """Put a mark behind the last message, to be found in the rendered text. The blank shows whether it is trimmed."""
    content = talk[-1].get("content") if talk else None
    if not isinstance(content, str):
        raise InvalidRequest(
            "continue_final_message", f"the last message has {shown(content)} to go on from: use text."
        )
    talk[-1]["content"] = f"{content}{MARK} "


def up_to_mark(text: str) -> str:
    """The text in front of the mark; without the blanks at its end, if the template trims messages."""
    at = text.rfind(MARK)
    if at < 0:
        raise InvalidRequest(
            "continue_final_message", "the template does not show the last message as it is: leave it."
        )
    return text[:at] if text.startswith(f"{MARK} ", at) else text[:at].rstrip()


def conversation(messages: object) -> list[dict[str, Any]]:
    """Messages as plain values. Raises InvalidRequest for anything but a list of objects with a role."""
    turns = plain(messages, "messages")
    if not isinstance(turns, list):
        raise InvalidRequest("messages", f'{shown(messages)} is no list of messages such as {{"role": "user", ...}}.')
    for message in turns:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                "messages", f'{shown(message)} is no message: use {{"role": "user", "content": text}}.'
            )
        if not isinstance(message.get("content"), str | list | None):
            raise InvalidRequest("messages", f"the content {shown(message['content'])} is no text: use text.")
    return turns


def plain(value: object, field: str) -> Any:
    """A copy of JSON-like values as plain dicts and lists. Raises InvalidRequest, naming the field, for all others."""
    room = LONGEST_VALUES

    def copied(value: object, depth: int) -> Any:
        nonlocal room
        room -= ITEM + (len(value) if isinstance(value, str) else 0)
        if room < 0:
            raise InvalidRequest(field, f"they are longer than {LONGEST_VALUES} letters: shorten them.")
        if depth > MOST_DEPTH:
            raise InvalidRequest(
                field, f"values are nested more than {MOST_DEPTH} deep, or hold themselves: flatten them."
            )
        if value is None or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, int) and value.bit_length() <= LONGEST_NUMBER:
            return value
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: copied(item, depth + 1) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [copied(item, depth + 1) for item in value]
        raise InvalidRequest(field, f"{shown(value)} cannot be written as JSON: use texts, numbers, lists and objects.")

    return copied(value, 0)
