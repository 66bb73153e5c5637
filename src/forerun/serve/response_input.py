"""What a body of /v1/responses is to be answered to: its input items and its tools as those of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.limits import shown, whole
from forerun.serve.calls import arguments_of
from forerun.serve.problems import MISSING, ApiError, refused

MOST_TOP_LOGPROBS = 20
LOGPROBS = "message.output_text.logprobs"
WITHOUT_EFFECT = ("reasoning.encrypted_content",)  # of reasoning that is told in plain text here
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
OF_FUNCTIONS = ("name", "description", "parameters")
OF_TOOLS = ("type", "strict")
TEXT_PARTS = ("input_text", "output_text", "text")


def input_messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages that `instructions` and `input` stand for. Raises the ApiError for 400, naming the field."""
    instructions, items = given.get("instructions"), given.get("input")
    if items is None:
        raise refused("input", "input: there is none: give text, or a list of items.", MISSING)
    if not isinstance(instructions, str | None):
        raise refused("instructions", f"instructions: {shown(instructions)} is no text.")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise refused("input", f"input: {shown(items)} is no text and no list of items.")
    return messages + joined([message_of(item, place) for place, item in enumerate(items)])


def message_of(item: object, place: int) -> dict[str, Any]:
    """One item as a message, or as what belongs to the assistant's message beside it."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(kind, str) or kind not in ITEMS:
        what = f"the type {shown(kind)}" if isinstance(item, dict) else shown(item)
        problem = f"input[{place}]: {what} is not served here: give items of the types {', '.join(ITEMS)}."
        raise refused("input", problem, "invalid_value" if not isinstance(kind, str) else "unsupported_parameter")
    return ITEMS[kind](item, f"input[{place}]")


def said(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A message."""
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refused("input", f"{name}: the role {shown(role)} is none of {', '.join(ROLES)}.")
    return {"role": ROLES[role], "content": text_of(item.get("content"), name)}


def reasoned(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Reasoning of an earlier answer; templates decide whether it is read again."""
    content = item.get("content")
    return {"role": "assistant", "reasoning_content": text_of([] if content is None else content, name)}


def called(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A function that an earlier answer called."""
    function, arguments = item.get("name"), item.get("arguments")
    if not isinstance(function, str):
        raise refused("input", f"{name}: a function_call has a name, which is text.")
    try:
        values = arguments_of(arguments)
    except ValueError as error:
        raise refused("input", f"{name}: the arguments {shown(arguments)} are no JSON object as text.") from error
    call = {"id": item.get("call_id"), "type": "function", "function": {"name": function, "arguments": values}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def returned(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a function gave."""
    return {"role": "tool", "content": text_of(item.get("output"), name), "tool_call_id": item.get("call_id")}


ITEMS: Mapping[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "message": said,
    "reasoning": reasoned,
    "function_call": called,
    "function_call_output": returned,
}


def input_tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """The `tools` and the `tool_choice` of a body as a chat has them, where each names its function inside."""
    found: dict[str, Any] = {}
    tools, choice = given.get("tools"), given.get("tool_choice")
    if isinstance(tools, list):
        found["tools"] = [tool_of(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "function":
        found["tool_choice"] = {"type": kind, kind: {"name": choice.get("name")}}
    elif isinstance(choice, dict) and kind == "allowed_tools":
        listed = choice.get("tools")
        names = [{"type": "function", "function": each} for each in listed] if isinstance(listed, list) else listed
        found["tool_choice"] = {"type": kind, kind: {"mode": choice.get("mode"), "tools": names}}
    return found


def tool_of(tool: Any, name: str) -> dict[str, Any]:
    """One tool so. What would change when it is called, or what is said of it, is not left out but refused."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        problem = f'{name}: {shown(tool)} is no function: give {{"type": "function", "name": ..., "parameters": ...}}'
        raise refused("tools", f"{problem}; other kinds are not served here.", "unsupported_parameter")
    for key, value in tool.items():
        if key not in (*OF_FUNCTIONS, *OF_TOOLS) and value is not None and value is not False:
            problem = f"{name}: {shown(key)} is not served here: a function has {', '.join(OF_FUNCTIONS)}"
            raise refused("tools", f"{problem}.", "unsupported_parameter")
    strict = {"strict": tool["strict"]} if tool.get("strict") not in (None, False) else {}
    own = {key: tool[key] for key in OF_FUNCTIONS if tool.get(key) is not None}
    return {"type": "function", "function": own | strict}


def text_of(content: object, name: str) -> str:
    """Content as text: itself, or its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused("input", f"{name}: {shown(content)} is no text and no list of parts.")
    return "\n".join(part_text(part, name) for part in content)


def part_text(part: object, name: str) -> str:
    """The text of one part."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in (*TEXT_PARTS, "reasoning_text", "refusal") or not isinstance(text, str):
        raise refused("input", f"{name}: {shown(part)} is not text, which is all that is read.")
    return text


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with reasoning and function calls as parts of the assistant's message that they belong to."""
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {}
        both = last.get("role") == message["role"] == "assistant"
        if both and ("content" not in last or ("tool_calls" in message and "content" in last)):
            calls = last.get("tool_calls", [])
            calls += message.get("tool_calls", [])  # in place: there may be very many
            content = last.get("content") or message.get("content") or ""
            last |= {**message, "content": content, **({"tool_calls": calls} if calls else {})}
        else:
            found.append(dict(message))
    return [{"content": "", **message} for message in found]


def response_logprobs(given: Mapping[str, Any]) -> int | None:
    """How many alternatives are wanted; None for no log-probabilities."""
    include, top = given.get("include", []), given.get("top_logprobs")
    if not isinstance(include, list):
        raise refused("include", f"include: {shown(include)} is no list.")
    for each in include:
        if each not in (LOGPROBS, *WITHOUT_EFFECT):
            raise ApiError(
                400,
                f"include: {shown(each)} is not served here: {LOGPROBS} is.",
                code="unsupported_parameter",
                param="include",
            )
    if top is not None:
        top = whole("top_logprobs", top, f"use a number up to {MOST_TOP_LOGPROBS}", 0, MOST_TOP_LOGPROBS)
    return top if top is not None or LOGPROBS not in include else 0
