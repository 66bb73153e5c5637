"""Chat templates: a conversation as the text that a model was trained to read.

The checkpoint brings the template, so it runs in jinja's immutable sandbox, with the names and filters that
transformers offers to templates. It knows nothing of token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.errors import InvalidRequest, TokenizerError

_FILE = "chat_template.jinja"
MARK = "<|forerun goes on here|>"


class _Refused(jinja2.TemplateError):
    """The template called raise_exception: it does not take this conversation."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the model's own words, for training; for a prompt it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """One checkpoint's template, compiled when it is first needed."""

    def __init__(self, source: str | None, origin: str) -> None:
        self._source = source
        self._origin = origin
        self._compiled: jinja2.Template | None = None

    @classmethod
    def load(cls, folder: Path, declared: str | Sequence[Mapping[str, str]] | None) -> ChatTemplate:
        """The folder's chat_template.jinja, else the one declared in tokenizer_config.json.

        Of several named templates it is the one named "default".
        """
        path = folder / _FILE
        if path.is_file():
            return cls(path.read_text("utf-8"), str(path))
        origin = f"{folder / 'tokenizer_config.json'} (chat_template)"
        if declared is None or isinstance(declared, str):
            return cls(declared, origin)
        named = {entry["name"]: entry["template"] for entry in declared}
        return cls(named.get("default"), f"{origin}, which has {', '.join(sorted(named)) or 'nothing'} by name")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tokens: Mapping[str, str],
        continue_final_message: bool = False,
        **options: object,
    ) -> str:
        """The prompt of a conversation; `tokens` are the special tokens by name (bos_token, eos_token, ...).

        `continue_final_message` leaves the last message open; `options` are given to the template under their names.
        Raises TokenizerError where the template is missing or broken, InvalidRequest where it refuses.
        """
        template = self.compile()
        settings = {"tools": None, "documents": None, **tokens, **options}
        talk = with_mark(messages, add_generation_prompt) if continue_final_message else messages
        try:
            text = template.render(messages=talk, add_generation_prompt=add_generation_prompt, **settings)
        except _Refused as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TokenizerError(f"the chat template of {self._origin} fails: {error}") from error
        return up_to_mark(text) if continue_final_message else text

    def compile(self) -> jinja2.Template:
        """The template, ready to render. Raises TokenizerError where it is missing or does not parse."""
        if self._source is None:
            raise TokenizerError(
                f'no chat template in {self._origin}: use a chat ("instruct") model, put one into '
                f"{_FILE} beside tokenizer.json, or complete plain text with `forerun generate`"
            )
        if self._compiled is None:
            try:
                self._compiled = _environment().from_string(self._source)
            except jinja2.TemplateError as error:
                raise TokenizerError(f"the chat template of {self._origin} does not parse: {error}") from error
        return self._compiled


def with_mark(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> Sequence[Mapping[str, Any]]:
    """The conversation with a mark behind its last message, to be found in what the template writes."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message", "it needs a last message of text, and excludes add_generation_prompt: use one."
        )
    return [*messages[:-1], {**messages[-1], "content": content + MARK}]


def up_to_mark(text: str) -> str:
    """The text in front of the mark."""
    if MARK not in text:
        raise InvalidRequest("continue_final_message", "the template does not show the last message as it is.")
    return text[: text.rindex(MARK)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """Plain JSON; jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)
