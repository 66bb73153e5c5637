"""Messages: conversations as prompts, in the form of a model's chat template.

This file decides which forms messages may have and how template options reach the template. `text.chat` renders the
template.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Conversation = Seq[Message]
EXAMPLE = '{"role": "user", "content": "Hello"}'


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt.

    `chat_template` is used in place of the model's own. `add_generation_prompt` opens the model's turn;
    `continue_final_message` leaves the last message open instead, so that the model goes on with it. `tools` are
    descriptions of functions; `chat_template_kwargs` are further options of the template, such as `enable_thinking`.
    """

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Seq[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def source(self, tokenizer: Tokenizer) -> str:
        """The text of the template. Raises ChatTemplateError where there is none."""
        return tokenizer.template(self.chat_template).source("tool_use" if self.tools else "default")

    def render(self, tokenizer: Tokenizer, conversation: Conversation) -> str:
        """The prompt of a conversation. Raises InvalidRequest and TokenizerError as the template does."""
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
            raise InvalidRequest("messages", f"{shown(each)} is not a conversation: use a list such as [{EXAMPLE}].")
    return conversations  # type: ignore[no-any-return]


def with_text(message: object) -> Message:
    """A message with one text as its content. Raises InvalidRequest for what is no message, or not text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("messages", f"{shown(message)} is not a message: write it as {EXAMPLE}.")
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
            "messages", f'{shown(part)} is not text, which is all that is read: write {{"type": "text", "text": ...}}.'
        )
    return text
