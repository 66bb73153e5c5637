"""Conversations: the messages of a body and the options of the chat template that renders them.

This file decides which fields a message may have, whether a body may have its own template, and how a body's reasoning
effort is passed to the template. The template is rendered in a separate process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.limits import shown
from forerun.llm import LLM
from forerun.request import RESERVED_OPTIONS, ChatOptions, with_text
from forerun.serve.body import NameCheck, served_members
from forerun.serve.harmony import harmony_messages
from forerun.serve.parts import reasons
from forerun.serve.problems import UNSERVED, missing, refused
from forerun.serve.schema import MESSAGE, TEMPLATE, BodyField
from forerun.serve.settings import ServeSettings
from forerun.serve.template_forms import is_harmony
from forerun.serve.tools import with_objects
from forerun.text.tokenizer import Tokenizer

WORD = re.compile(r"\w+")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ChatBody:
    """The messages of a body, and the template options for them."""

    messages: list[Any]
    options: ChatOptions

    @classmethod
    def of(cls, body: Mapping[str, Any], llm: LLM, settings: ServeSettings) -> ChatBody:
        """Build it from the served fields of a body. Raises ApiError 400, naming the invalid field."""
        options = with_effort(template_of(body, settings), body, llm)
        return cls(messages_of(body, options, llm.tokenizer, settings.lenient), options)

    @property
    def continued(self) -> Any:
        """The text of the last message if the answer continues it; else None."""
        return with_text(self.messages[-1]).get("content") if self.options.continue_final_message else None


def effort_of(body: Mapping[str, Any]) -> tuple[str, object]:
    """(field name, reasoning effort) of a body; the effort is None if no field has one."""
    for name in ("reasoning", "output_config"):
        if (effort := body.get(name, {}).get("effort")) is not None:
            return f"{name}.effort", effort
    if body.get("thinking", {}).get("type") == "disabled":
        return "thinking", "none"
    return "reasoning_effort", body.get("reasoning_effort")


def with_effort(options: ChatOptions, body: Mapping[str, Any], llm: LLM) -> ChatOptions:
    """The template options with the body's reasoning effort, if any. Raises ApiError if the template ignores it."""
    name, effort = effort_of(body)
    if effort is None:
        return options
    if effort not in EFFORTS:
        raise refused(name, f"{shown(effort)} must be one of {', '.join(EFFORTS)}.")
    source, extra = options.source(llm.tokenizer), dict[str, Any]()
    if "reasoning_effort" in source:
        extra = {"reasoning_effort": effort}
    elif effort == "none" and "enable_thinking" in source:
        extra = {"enable_thinking": False}
    elif effort != "none" or reasons(source):
        problem = f"{shown(effort)} has no effect, since the chat template has no reasoning efforts"
        raise refused(name, f"{problem}: leave it out, or use chat_template_kwargs.", UNSERVED)
    return replace(options, chat_template_kwargs=extra | dict(options.chat_template_kwargs))


def messages_of(body: Mapping[str, Any], options: ChatOptions, tokenizer: Tokenizer, lenient: bool) -> list[Any]:
    """The messages of a body, with the fields that are served or that the template uses.

    Raises ApiError 400 if there are none, or for any other field; with `lenient` such a field is ignored.
    """
    messages = body.get("messages")
    if messages is None:
        raise missing("messages", "give a list of messages")
    if not messages:
        raise refused("messages", "it is an empty list: give at least one message.")
    words, names = set(WORD.findall(options.source(tokenizer))), {name for message in messages for name in message}
    idle = {name for name in names if name not in MESSAGE or MESSAGE[name].kind == "idle"}
    known, check = {**MESSAGE, **dict.fromkeys(idle & words, BodyField("served"))}, NameCheck(lenient)
    kept = [served_members(each, known, f"messages[{i}]", check) for i, each in enumerate(messages)]
    check.log_ignored()
    conversation = with_objects(kept)
    return harmony_messages(conversation) if is_harmony(tokenizer, options.chat_template) else conversation


def template_of(body: Mapping[str, Any], settings: ServeSettings) -> ChatOptions:
    """The template options of a body. Raises ApiError for a template in the body, unless the server allows those."""
    template, options = body.get("chat_template"), body.get("chat_template_kwargs", {})
    if not settings.trust_request_templates and (template is not None or "chat_template" in options):
        problem = "templates in requests are not run: leave it out, or start with --trust-request-templates."
        raise refused("chat_template", problem, UNSERVED)
    if taken := (RESERVED_OPTIONS | TEMPLATE.keys() - {"documents"}) & options.keys():
        problem = f"{shown(min(taken))} is set by the server and cannot be an option: leave it out."
        raise refused("chat_template_kwargs", problem)
    tools, continues = body.get("tools"), body.get("continue_final_message", False)
    return ChatOptions(
        chat_template=template,
        add_generation_prompt=body.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        tools=tools if body.get("tool_choice") != "none" else None,
        chat_template_kwargs=options | ({"documents": body["documents"]} if "documents" in body else {}),
    )
