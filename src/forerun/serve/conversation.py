"""Conversation: the messages of a body and the options of the chat template that makes a prompt of them.

This file decides which fields a message may have, whether a body may bring a template, and how much the model is to
reason. The template renders in a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.llm import LLM
from forerun.messages import ChatOptions, with_text
from forerun.request import Request
from forerun.serve.body import NameCheck, served_members
from forerun.serve.harmony import history
from forerun.serve.parts import reasons
from forerun.serve.problems import MISSING, refused
from forerun.serve.schema import MESSAGE, TEMPLATE, BodyField
from forerun.serve.settings import ServeSettings
from forerun.serve.template_forms import is_harmony
from forerun.serve.tools import with_objects
from forerun.text.tokenizer import Tokenizer

WORD = re.compile(r"\w+")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A conversation as a body gives it, and how it becomes a prompt."""

    messages: list[Any]
    options: ChatOptions

    @classmethod
    def of(cls, given: Mapping[str, Any], llm: LLM, settings: ServeSettings) -> ChatBody:
        """The conversation in the served fields of a body. Raises the ApiError for 400, naming the field at fault."""
        options = with_effort(template_of(given, settings), given, llm)
        return cls(messages_of(given, options, llm.tokenizer, settings.lenient), options)

    @property
    def continued(self) -> Any:
        """The text that the answer goes on from, if it does."""
        return with_text(self.messages[-1]).get("content") if self.options.continue_final_message else None

    def request(self, llm: LLM, field: str = "messages") -> Request:
        """The prompt as a request. Raises InvalidRequest where the template refuses the `field` that it is from."""
        try:
            return Request.of(llm.chat_prompt(self.messages, self.options))
        except InvalidRequest as error:
            if error.field != "messages":
                raise
            raise refused(field, str(error).replace("messages", field, 1)) from error


def effort_of(given: Mapping[str, Any]) -> tuple[str, object]:
    """How much the model is to reason, behind the name of the field that says it; None where none does."""
    for name in ("reasoning", "output_config"):
        if (effort := given.get(name, {}).get("effort")) is not None:
            return f"{name}.effort", effort
    if given.get("thinking", {}).get("type") == "disabled":
        return "thinking", "none"
    return "reasoning_effort", given.get("reasoning_effort")


def with_effort(options: ChatOptions, given: Mapping[str, Any], llm: LLM) -> ChatOptions:
    """The options of a template with how much its model is to reason, where the body says so and the template can."""
    name, effort = effort_of(given)
    if effort is None:
        return options
    if effort not in EFFORTS:
        raise refused(name, f"{name}: {shown(effort)} is none of {', '.join(EFFORTS)}.")
    source, extra = options.source(llm.tokenizer), dict[str, Any]()
    if "reasoning_effort" in source:
        extra = {"reasoning_effort": effort}
    elif effort == "none" and "enable_thinking" in source:
        extra = {"enable_thinking": False}
    elif effort != "none" or reasons(source):
        problem = f"{name}: the chat template has no efforts, so {shown(effort)} is not served"
        raise refused(name, f"{problem}: leave it out, or say it in chat_template_kwargs.", "unsupported_parameter")
    return replace(options, chat_template_kwargs=extra | dict(options.chat_template_kwargs))


def messages_of(given: Mapping[str, Any], options: ChatOptions, tokenizer: Tokenizer, lenient: bool) -> list[Any]:
    """The messages of a body, of which there must be some, with the fields that are served or that the template reads.

    Raises the ApiError for 400 for a message with another field; with `lenient` the field is left out.
    """
    messages = given.get("messages")
    if messages is None:
        raise refused("messages", "messages: it is missing: give a list of messages.", MISSING)
    if not messages:
        raise refused("messages", f"messages: {shown(messages)} is no list of messages.")
    words, names = set(WORD.findall(options.source(tokenizer))), {name for message in messages for name in message}
    idle = {name for name in names if name not in MESSAGE or MESSAGE[name].kind == "idle"}
    known, check = {**MESSAGE, **dict.fromkeys(idle & words, BodyField("served"))}, NameCheck(lenient)
    kept = [served_members(each, known, f"messages[{place}]", check) for place, each in enumerate(messages)]
    check.tell()
    harmony = is_harmony(tokenizer, options.chat_template)
    return history(with_objects(kept)) if harmony else with_objects(kept)


def template_of(given: Mapping[str, Any], settings: ServeSettings) -> ChatOptions:
    """The options of the chat template, which is a body's own only where such templates are trusted."""
    template, options = given.get("chat_template"), given.get("chat_template_kwargs", {})
    if not settings.trust_request_templates and (template is not None or "chat_template" in options):
        problem = "no template of a body is run here: leave it out, or start with --trust-request-templates"
        raise refused("chat_template", f"chat_template: {problem}.", "unsupported_parameter")
    reserved = {"self", "messages", "conversation", "tokens", "tools", "tokenize", *TEMPLATE} - {"documents"}
    if taken := reserved & options.keys():
        problem = f"chat_template_kwargs: {shown(min(taken))} is no option of a template here: leave it out."
        raise refused("chat_template_kwargs", problem)
    tools, goes_on = given.get("tools"), given.get("continue_final_message", False)
    return ChatOptions(
        chat_template=template,
        add_generation_prompt=given.get("add_generation_prompt", not goes_on),
        continue_final_message=goes_on,
        tools=tools if given.get("tool_choice") != "none" else None,
        chat_template_kwargs=options | ({"documents": given["documents"]} if "documents" in given else {}),
    )
