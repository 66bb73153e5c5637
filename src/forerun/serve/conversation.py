"""Conversations: the messages of a body and the options of the chat template that renders them.

This file decides which fields a message may have, whether a body may have its own template, and how a body's reasoning
effort is passed to the template. The template is rendered in a separate process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.llm import LLM
from forerun.request import ChatOptions, Request, with_text
from forerun.serve.body import NameCheck, served_members
from forerun.serve.harmony import history
from forerun.serve.parts import reasons
from forerun.serve.problems import UNSERVED, missing, refused, renamed
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
    def of(cls, given: Mapping[str, Any], llm: LLM, settings: ServeSettings) -> ChatBody:
        """Build it from the served fields of a body. Raises ApiError 400, naming the invalid field."""
        options = with_effort(template_of(given, settings), given, llm)
        return cls(messages_of(given, options, llm.tokenizer, settings.lenient), options)

    @property
    def continued(self) -> Any:
        """The text of the last message that the answer continues; None if it continues none."""
        return with_text(self.messages[-1]).get("content") if self.options.continue_final_message else None

    def request(self, llm: LLM, field: str = "messages") -> Request:
        """The rendered prompt as a request. If the template rejects the messages, the error names `field`."""
        try:
            return Request.of(llm.chat_prompt(self.messages, self.options))
        except InvalidRequest as error:
            if error.field != "messages":
                raise
            raise renamed(error, field) from error


def effort_of(given: Mapping[str, Any]) -> tuple[str, object]:
    """(field name, reasoning effort) of a body; the effort is None if no field has one."""
    for name in ("reasoning", "output_config"):
        if (effort := given.get(name, {}).get("effort")) is not None:
            return f"{name}.effort", effort
    if given.get("thinking", {}).get("type") == "disabled":
        return "thinking", "none"
    return "reasoning_effort", given.get("reasoning_effort")


def with_effort(options: ChatOptions, given: Mapping[str, Any], llm: LLM) -> ChatOptions:
    """The template options with the body's reasoning effort, if any. Raises ApiError if the template ignores it."""
    name, effort = effort_of(given)
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
        problem = f"the chat template has no efforts, so {shown(effort)} is not served"
        raise refused(name, f"{problem}: leave it out, or say it in chat_template_kwargs.", UNSERVED)
    return replace(options, chat_template_kwargs=extra | dict(options.chat_template_kwargs))


def messages_of(given: Mapping[str, Any], options: ChatOptions, tokenizer: Tokenizer, lenient: bool) -> list[Any]:
    """The messages of a body, with the fields that are served or that the template uses.

    Raises ApiError 400 if there are none, or for any other field; with `lenient` such a field is ignored.
    """
    messages = given.get("messages")
    if messages is None:
        raise missing("messages", "give a list of messages")
    if not messages:
        raise refused("messages", "it is an empty list: give at least one message.")
    words, names = set(WORD.findall(options.source(tokenizer))), {name for message in messages for name in message}
    idle = {name for name in names if name not in MESSAGE or MESSAGE[name].kind == "idle"}
    known, check = {**MESSAGE, **dict.fromkeys(idle & words, BodyField("served"))}, NameCheck(lenient)
    kept = [served_members(each, known, f"messages[{place}]", check) for place, each in enumerate(messages)]
    check.log_ignored()
    talk = with_objects(kept)
    return history(talk) if is_harmony(tokenizer, options.chat_template) else talk


def template_of(given: Mapping[str, Any], settings: ServeSettings) -> ChatOptions:
    """The template options of a body. Raises ApiError for a template of its own unless the server trusts those."""
    template, options = given.get("chat_template"), given.get("chat_template_kwargs", {})
    if not settings.trust_request_templates and (template is not None or "chat_template" in options):
        problem = "no template of a body is run here: leave it out, or start with --trust-request-templates."
        raise refused("chat_template", problem, UNSERVED)
    reserved = {"self", "messages", "conversation", "tokens", "tools", "tokenize", *TEMPLATE} - {"documents"}
    if taken := reserved & options.keys():
        problem = f"{shown(min(taken))} is no option of a template here: leave it out."
        raise refused("chat_template_kwargs", problem)
    tools, goes_on = given.get("tools"), given.get("continue_final_message", False)
    return ChatOptions(
        chat_template=template,
        add_generation_prompt=given.get("add_generation_prompt", not goes_on),
        continue_final_message=goes_on,
        tools=tools if given.get("tool_choice") != "none" else None,
        chat_template_kwargs=options | ({"documents": given["documents"]} if "documents" in given else {}),
    )
