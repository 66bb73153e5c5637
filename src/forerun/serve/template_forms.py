"""Template formats: detects the answer format that a chat template expects.

The format of tool calls is detected by rendering a call with the template and parsing the result with every known
format until one returns the call. Requests with tools are refused if no format does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

from forerun.errors import ForerunError, InvalidRequest
from forerun.request import ChatOptions, Message
from forerun.serve.calls import FORMS, PYTHON_TAG, CallForm, Functions, ToolCall
from forerun.serve.growing import GrowingText, result_of
from forerun.serve.harmony import MARKS, START, TAGS
from forerun.serve.parts import AnswerForm, AnswerSplitter, reasoning_tags
from forerun.serve.problems import UNSERVED, refused
from forerun.serve.tools import ToolUse
from forerun.text.tokenizer import Tokenizer

NAME, REPLY = "forerun_probe", "forerun replies"
ARGUMENTS = {"place": "Rome", "number": 7, "flag": True}
TYPES = {"place": "string", "number": "integer", "flag": "boolean"}
SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}
FUNCTIONS: Functions = {NAME: SCHEMA}
TOOLS = [{"type": "function", "function": {"name": NAME, "description": "A probe.", "parameters": SCHEMA}}]
USER = {"role": "user", "content": "Hello"}
PROBE_ID = "probe0001"  # Mistral's templates take no other length
CALL = {"id": PROBE_ID, "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": NAME, "tool_call_id": PROBE_ID, "content": "Done"}
REPLIED: Seq[Message] = [USER, {"role": "assistant", "content": REPLY}]
CONVERSATIONS: Seq[Seq[Message]] = ([USER, CALLING, RESULT], [USER, CALLING])


@lru_cache(maxsize=64)
def call_form(tokenizer: Tokenizer, template: str | None) -> CallForm:
    """The tool call format of a template (None: the checkpoint's own).

    Raises ApiError 400 if it is unknown or the template ignores tools, and ChatTemplateError if it fails without calls.
    """
    if NAME not in rendered(tokenizer, template, [USER], failing=InvalidRequest):
        problem = "the model's chat template ignores tools: use a model whose template supports them."
        raise refused("tools", problem, UNSERVED)
    reply, _, _ = rendered(tokenizer, template, REPLIED).partition(REPLY)
    for conversation in CONVERSATIONS:
        text = rendered(tokenizer, template, conversation)
        for form in FORMS:
            if any(json.loads(call.arguments) == ARGUMENTS for call in calls_in(text, form, reply)):
                return form
    known = ", ".join(form.name for form in FORMS)
    problem = "the chat template's format of calls is unknown: use a model with one of the formats"
    raise refused("tools", f"{problem} {known}.", UNSERVED)


@lru_cache(maxsize=64)
def is_harmony(tokenizer: Tokenizer, template: str | None) -> bool:
    """Whether a template (None: the checkpoint's own) uses Harmony."""
    _, user, text = rendered(tokenizer, template, REPLIED, tools=None).partition(str(USER["content"]))
    message, reply, _ = text.partition(REPLY)
    return bool(user and reply) and all(mark in message for mark in MARKS)


def answer_form(
    options: ChatOptions, prompt: str, continued: str | None, tools: ToolUse | None, tokenizer: Tokenizer
) -> AnswerForm:
    """The format of answers to a rendered prompt; `continued` is the message text that the answer continues."""
    source, calls = options.source(tokenizer), None if tools is None else tools.form
    harmony = is_harmony(tokenizer, options.chat_template) if calls is None else calls.kind == "harmony"
    begun = prompt[max(prompt.rfind(START), 0) :] if harmony else None
    reasoning = None if begun is not None else reasoning_tags(source, prompt, continued)
    tags = [*(TAGS if begun is not None else ()), *((reasoning.opening, reasoning.closing) if reasoning else ())]
    tags += calls.tags if calls else []
    known = special_tokens(tokenizer)
    special = {tag: known[tag] for tag in tags if tag in known}
    shown = {*tags, *(calls.inner_tags if calls else ())} - {PYTHON_TAG}  # this tag is optional in calls
    functions: Functions = {} if tools is None else tools.allowed
    shown_ids = frozenset(known[tag] for tag in shown & known.keys())
    return AnswerForm(reasoning, calls, functions, begun, special, shown_ids)


@lru_cache(maxsize=16)
def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens' ids by their decoded text."""
    return {text: token for token in tokenizer.special_ids if (text := tokenizer.decode([token]))}


def rendered(
    tokenizer: Tokenizer,
    template: str | None,
    conversation: Seq[Message],
    failing: type[Exception] = ForerunError,
    tools: Seq[Mapping[str, Any]] | None = TOOLS,
) -> str:
    """The rendered conversation; "" if rendering raises `failing`."""
    options = ChatOptions(template, add_generation_prompt=conversation == [USER], tools=tools)
    try:
        return options.render(tokenizer, conversation)
    except failing:
        return ""


def calls_in(text: str, form: CallForm, reply: str) -> list[ToolCall]:
    """The calls in a rendered conversation, parsed in this format; `reply` is the text before an assistant message."""
    if not form.opening and form.kind == "object":
        answer = GrowingText(text[len(reply) :] if text.startswith(reply) else "", ended=True)
        return result_of(form.calls(answer, FUNCTIONS))
    splitter = AnswerSplitter(AnswerForm(calls=form, functions=FUNCTIONS, begun="" if form.kind == "harmony" else None))
    return [part.call for part in (*splitter.feed(text), *splitter.close()) if part.call]
