"""Chat templates: turn a conversation into the prompt format of a model.

This file decides which values are a conversation, which of a checkpoint's templates is used, and whether an error of
rendering is due to the conversation or the template. Templates are read at first use, so that a model with a damaged
one can still complete text. `text/renderer.py` runs them.
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
PUT_INTO_FOLDER = f"put one into {FILE} next to tokenizer.json"
NAME_ANOTHER = "name a folder that has one with --tokenizer"
MARK = "<|forerun continues here|>"
MOST_DEPTH = 64  # of lists and objects inside a message
LONGEST_TEMPLATE = 1 << 20
LONGEST_VALUES = 1 << 24  # characters: several times what the longest context holds
ITEM = 32  # characters that each value counts as, in addition to those of its text
LONGEST_NUMBER = 1 << 10  # bits
ROLES = ("system", "user", "assistant", "tool")  # that templates know, or refuse


class ChatTemplate:
    """The templates of a checkpoint, read at first use.

    `declared` is the value in tokenizer_config.json: one template, or a list of named ones, of which "default" is used,
    or "tool_use" for a conversation with tools. If there are `files`, by template name, they are used instead.
    """

    def __init__(
        self, declared: object, origin: str, files: Mapping[str, Path] | None = None, fix: str = PUT_INTO_FOLDER
    ) -> None:
        self._declared = declared
        self._origin = origin
        self._files = files or {}
        self._cure = fix

    def __reduce__(self) -> Any:
        """Pickling, for copies in other processes, which get the texts because the files may not exist there."""
        with suppress(ChatTemplateError):
            declared = [{"name": name, "template": source} for name, source in self._named.items()]
            return ChatTemplate, (declared, self._origin, None, self._cure)
        return ChatTemplate, (self._declared, self._origin, self._files, self._cure)

    @classmethod
    def load(cls, folder: Path, declared: object, gguf_file: object = None) -> ChatTemplate:
        """The templates of a folder; its files are checked at first use.

        If the folder is the cache of a GGUF file, errors name that file.
        """
        if isinstance(gguf_file, str):
            return cls(declared, f"{gguf_file} (tokenizer.chat_template)", fix=NAME_ANOTHER)
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

        `options` are passed to the template by name: tools, documents, enable_thinking and so on. Raises
        ChatTemplateError if the template is missing or fails, InvalidRequest if the messages are invalid or the
        template refuses them, or ignores one because of its role.
        """
        talk = conversation(messages)
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message", "it excludes add_generation_prompt, which starts a new message: use one."
            )
        plain_options = {name: plain(value, name) for name, value in options.items()}
        values = {"tools": None, "documents": None, **(tokens or {}), **plain_options}
        name = "tool_use" if plain_options.get("tools") else "default"
        if continue_final_message:
            mark_end(talk)
        values |= {"messages": talk, "add_generation_prompt": add_generation_prompt}
        text = self._run(name, values)
        self._require_roles(name, values)
        return up_to_mark(text) if continue_final_message else text

    def _require_roles(self, name: str, values: dict[str, Any]) -> None:
        """Raise InvalidRequest if the contents of messages with other roles than ROLES are missing in the text."""
        turns = values["messages"]
        unusual = [i for i, each in enumerate(turns) if each["role"] not in ROLES and each.get("content") is not None]
        if not unusual:
            return
        marked = [each | {"content": f"{MARK}{i}."} if i in unusual else each for i, each in enumerate(turns)]
        try:
            text = self._run(name, values | {"messages": marked})
        except (InvalidRequest, ChatTemplateError):
            return  # other contents are refused, so they are not ignored
        for i in unusual:
            if marked[i]["content"] not in text:
                problem = f"the chat template ignores messages of the role {shown(turns[i]['role'])}"
                raise InvalidRequest(f"messages[{i}]", f"{problem}: use one of {', '.join(ROLES)}.")

    def require(self) -> None:
        """Raise ChatTemplateError if the default template is missing or does not parse."""
        self._run("default", None)

    @property
    def is_usable(self) -> bool:
        """Whether there is a template that parses."""
        try:
            self.require()
        except ChatTemplateError:
            return False
        return True

    def _run(self, name: str, values: dict[str, object] | None) -> str:
        answer = RENDERER.answer(self.source(name), values)
        if answer is None:
            problem = "takes more time or memory than a conversation needs"
            raise ChatTemplateError(f"the chat template of {self._origin} {problem}", self._origin)
        outcome, text = answer
        if outcome == "refused":
            raise InvalidRequest("messages", f"the chat template refuses them: {short(text)}")
        if outcome != "text":
            raise ChatTemplateError(f"the chat template of {self._origin} {outcome}: {short(text)}", self._origin)
        return text

    def digest(self) -> str:
        """16 hex digits that identify the template. Raises ChatTemplateError if there is none."""
        return hashlib.sha256(self.source("default").encode()).hexdigest()[:16]

    def source(self, name: str = "default") -> str:
        """The text of a template. Raises ChatTemplateError if it is missing or cannot be read."""
        named = self._named
        source = named.get(name, named.get("default"))
        if source is None:
            origin = self._origin + (f", which has {shown(sorted(named))} by name" if named else "")
            raise ChatTemplateError(
                f'no chat template in {origin}: use a chat ("instruct") model, {self._cure}, '
                "give one as chat_template, or let the model continue plain text",
                self._origin,
            )
        if len(source) > LONGEST_TEMPLATE:
            problem = f"has {len(source)} characters: use one of at most {LONGEST_TEMPLATE}"
            raise ChatTemplateError(f"the chat template of {self._origin} {problem}", self._origin)
        return source

    @cached_property
    def _named(self) -> dict[str, str]:
        """The templates by name. Raises ChatTemplateError if a declared value is not a template."""
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
                raise ChatTemplateError(f"{self._origin} is {shown(declared)}; {rule}", self._origin)
            named[name] = source
        return named


def text_of(file: Path) -> str:
    """The text of a template's file. Raises ChatTemplateError if it cannot be read."""
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ChatTemplateError(f"{file} cannot be read ({short(error)}): download it again", str(file)) from error


def mark_end(talk: list[dict[str, Any]]) -> None:
    """Append a mark to the last message, to find its end in the rendered text; a blank shows whether it is trimmed."""
    content = talk[-1].get("content") if talk else None
    if not isinstance(content, str):
        problem = f"the content of the last message is {shown(content)}, which cannot be continued: use text."
        raise InvalidRequest("continue_final_message", problem)
    talk[-1]["content"] = f"{content}{MARK} "


def up_to_mark(text: str) -> str:
    """The text before the mark; without the blanks at its end, if the template trims messages."""
    at = text.rfind(MARK)
    if at < 0:
        problem = "the template changes the last message, so it cannot be continued: leave this option out."
        raise InvalidRequest("continue_final_message", problem)
    return text[:at] if text.startswith(f"{MARK} ", at) else text[:at].rstrip()


def conversation(messages: object) -> list[dict[str, Any]]:
    """Messages as plain values.

    Raises InvalidRequest for anything but a list of objects with a role, and for a user's or system's without content.
    """
    turns = plain(messages, "messages")
    example = '{"role": "user", "content": text}'
    if not isinstance(turns, list):
        raise InvalidRequest("messages", f"{shown(messages)} is not a list of messages: use a list of {example}.")
    for i, message in enumerate(turns):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest("messages", f"{shown(message)} is not a message: use {example}.")
        if not isinstance(message.get("content"), str | list | None):
            raise InvalidRequest("messages", f"the content {shown(message['content'])} is not text: use text.")
        if message["role"] in ("user", "system") and message.get("content") is None:
            raise InvalidRequest(f"messages[{i}].content", "it is missing: give text.")
    return turns


def plain(value: object, field: str) -> Any:
    """A copy of JSON-like values as plain dicts and lists. Raises InvalidRequest, naming the field, for others."""
    room = LONGEST_VALUES

    def copied(value: object, depth: int) -> Any:
        nonlocal room
        room -= ITEM + (len(value) if isinstance(value, str) else 0)
        if room < 0:
            raise InvalidRequest(field, f"the values have more than {LONGEST_VALUES} characters: shorten them.")
        if depth > MOST_DEPTH:
            raise InvalidRequest(
                field, f"the values are nested more than {MOST_DEPTH} deep, or contain themselves: flatten them."
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
