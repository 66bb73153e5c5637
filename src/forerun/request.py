"""Request: a prompt and all options of its answer, as a frozen value; ChatOptions: how to render a conversation.

This file decides which forms prompts and messages may have, and turns each prompt into text or token ids.
`engine/request_check.py` decides whether a model can serve the request; `text/chat.py` renders templates.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsIndex, runtime_checkable

from forerun.config import Speculation
from forerun.errors import InvalidRequest
from forerun.limits import refusal, shown
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer

SpeculationOption = bool | int | str | Speculation | None
"""How far to draft: None or True for the engine's default, False for no drafting, a depth, or a Speculation."""
Message = Mapping[str, Any]
Conversation = Seq[Message]
MESSAGE = '{"role": "user", "content": "Hello"}'
PROMPT_KEYS = ("prompt", "prompt_token_ids")
RESERVED_OPTIONS = {  # of chat templates: they are arguments of their own
    *("self", "messages", "conversation", "tokens", "tools", "tokenize"),
    *("chat_template", "add_generation_prompt", "continue_final_message"),
}
FORMS = 'use text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


@runtime_checkable
class Array(Protocol):
    """A numpy array or a tensor."""

    def tolist(self) -> Any:
        """The array's values as plain Python objects."""
        ...


Prompt = str | Seq[SupportsIndex] | Array | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, with its sampling parameters, its speculation and its tenant.

    If both `prompt`, a text, and `prompt_token_ids` are given, the tokens are used and the text is only reported.
    `sampling_params` None means the model's defaults, `speculation` None the engine's. Answers to one `tenant` are used
    to draft for that tenant only. With `draft_details` every delta lists the draft tokens. The text shows the special
    tokens `shown_special_ids` even if `skip_special_tokens` hides all others.
    """

    prompt: str | None = None
    sampling_params: SamplingParams | None = None
    speculation: SpeculationOption = None
    tenant: str = ""
    prompt_token_ids: tuple[int, ...] | None = None
    draft_details: bool = False
    shown_special_ids: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        speculation: SpeculationOption = None,
        tenant: str = "",
    ) -> Request:
        """The request for a prompt in any of its forms. Raises InvalidRequest for anything else."""
        text, ids = parsed(prompt)
        return cls(text, sampling_params, speculation, tenant, ids)


def requests_of(
    prompts: Prompt | Seq[Prompt],
    sampling_params: SamplingParams | Seq[SamplingParams] | None,
    speculation: SpeculationOption = None,
    tenant: str = "",
) -> list[Request]:
    """One request for each prompt, with one set of parameters for all of them or one for each."""
    batch = as_batch(prompts)
    if isinstance(sampling_params, Seq) and not isinstance(sampling_params, str | bytes):
        each = list(sampling_params)
    else:
        each = [sampling_params] * len(batch)  # type: ignore[list-item]
    if len(each) != len(batch):
        raise InvalidRequest(
            "sampling_params", f"{len(each)} sets of parameters for {len(batch)} prompts: give one, or one for each."
        )
    return [Request.of(prompt, params, speculation, tenant) for prompt, params in zip(batch, each, strict=True)]


def as_batch(prompts: Prompt | Seq[Prompt]) -> Seq[Prompt]:
    """One prompt or many, as a list of prompts. Invalid values stay in it; `parsed` refuses them."""
    batch = plain(prompts)
    many = isinstance(batch, Seq) and not isinstance(batch, str | bytes)
    if not many or (batch and all(is_number(item) for item in batch)):
        return [batch]
    return batch  # type: ignore[no-any-return]


def parsed(prompt: Prompt) -> tuple[str | None, tuple[int, ...] | None]:
    """A prompt's text and its token ids, one of them None unless both were given."""
    if isinstance(prompt, Mapping):
        return parsed_mapping(prompt)
    value = plain(prompt)
    if isinstance(value, str):
        return value, None
    return None, token_ids(value)


def parsed_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    """The text and the token ids of a prompt that is a dict; None for a missing one."""
    fields = {key: value for key, value in prompt.items() if value is not None}
    for key in fields:
        if key not in PROMPT_KEYS:
            raise InvalidRequest("prompt", f"the key {shown(key)} is not supported; {FORMS}.")
    text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if not isinstance(text, str | None) or not fields:
        raise InvalidRequest("prompt", f"{shown(prompt)} has no prompt; {FORMS}.")
    return text, None if ids is None else token_ids(plain(ids))


def token_ids(values: object) -> tuple[int, ...]:
    """Whole numbers of any kind as plain ints."""
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Seq):
        raise InvalidRequest("prompt", f"{shown(values)} is not a prompt; {FORMS}.")
    if set(map(type, values)) <= {int}:
        return tuple(values)
    for value in values:
        if isinstance(value, bool) or not is_number(value):
            meant = f"; if {shown(value)} is one of several prompts, pass each alone" if isinstance(value, str) else ""
            raise InvalidRequest("prompt", f"{shown(value)} is not a token id: ids are whole numbers{meant}.")
    return tuple(map(operator.index, values))


def is_number(value: object) -> bool:
    """Whether this is an integer of Python, numpy or torch."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def plain(value: Any) -> Any:
    """Arrays as lists, anything else unchanged. Raises InvalidRequest for a tensor without values, as on "meta"."""
    try:
        return value.tolist() if isinstance(value, Array) else value
    except RuntimeError as error:
        raise InvalidRequest("prompt", f"{shown(value)} has no list of values ({error}); {FORMS}.") from error


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is rendered as a prompt.

    `chat_template` replaces the model's own. `add_generation_prompt` starts the model's answer;
    `continue_final_message` leaves the last message open instead, so that the model continues it. `tools` are
    descriptions of functions; `chat_template_kwargs` are further options of the template, such as `enable_thinking`.
    """

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Seq[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = self.chat_template_kwargs
        if not isinstance(options, Mapping):
            raise refusal("chat_template_kwargs", options, "use a mapping from the template's options to their values")
        for name in options:
            if not isinstance(name, str) or name in RESERVED_OPTIONS:
                raise refusal("chat_template_kwargs", name, "use names of options that are not set otherwise")

    def source(self, tokenizer: Tokenizer) -> str:
        """The text of the template. Raises ChatTemplateError if there is none."""
        return tokenizer.template(self.chat_template).source("tool_use" if self.tools else "default")

    def render(self, tokenizer: Tokenizer, conversation: Conversation) -> str:
        """The prompt of a conversation. Raises InvalidRequest if it is refused, TokenizerError for template errors."""
        return tokenizer.apply_chat_template(
            [with_text(message) for message in conversation],
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=self.tools,
            tokenize=False,
            **self.chat_template_kwargs,
        )


def as_conversations(messages: Conversation | Seq[Conversation]) -> Seq[Conversation]:
    """One conversation or many, as a list of conversations."""
    one = isinstance(messages, Seq) and messages and isinstance(messages[0], Mapping)
    conversations: Any = [messages] if one or isinstance(messages, str | bytes) else messages
    for each in conversations if isinstance(conversations, Seq) else [conversations]:
        if isinstance(each, str | bytes) or not isinstance(each, Seq):
            raise InvalidRequest("messages", f"{shown(each)} is not a conversation: use a list such as [{MESSAGE}].")
    return conversations  # type: ignore[no-any-return]


def with_text(message: object) -> Message:
    """A message whose content is one text. Raises InvalidRequest for an invalid message or content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("messages", f"{shown(message)} is not a message: write it as {MESSAGE}.")
    content = message.get("content")
    if isinstance(content, str | None):
        return message
    if isinstance(content, bytes) or not isinstance(content, Seq):
        raise InvalidRequest("messages", f"{shown(content)} is not the content of a message: write text.")
    return {**message, "content": "\n".join(map(text_of, content))}


def text_of(part: object) -> str:
    """The text of a content part. Raises InvalidRequest for anything else, such as an image."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(
            "messages", f'{shown(part)} is not text; only text is supported: write {{"type": "text", "text": ...}}.'
        )
    return text
