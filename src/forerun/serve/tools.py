"""Tools: functions that an answer may call, and the calls in its text.

This file decides how a body describes tools, in which form a template asks for calls, which grammar makes an answer
call, and how calls are told apart from the text around them, whole and in a stream. A call that is no JSON, or of a
function that was not offered, stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

from forerun.limits import shown
from forerun.sampling.grammar import Grammar, quoted
from forerun.serve.problems import refused

MOST_TOOLS = 128
MOST_CALLS = 16  # of one answer that must call
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}  # the parameters of who has none
ToolMode = Literal["auto", "required"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes a call: a JSON object with the name and the `arguments`, between `opening` and `closing`.

    A template that contains `mark` asks for it. Without an opening text the whole answer is one call, or none.
    """

    mark: str
    arguments: str
    opening: str = ""
    closing: str = ""


FORMATS = (
    CallFormat("<tool_call>", "arguments", "<tool_call>", "</tool_call>"),  # Hermes, Qwen
    CallFormat('"parameters"', "parameters"),  # Llama 3
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` are JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def described(self, index: int | None = None) -> dict[str, Any]:
        """The call as OpenAI's object; with its number in a stream."""
        own = {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return own if index is None else {"index": index, **own}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one body: which are offered, in which format they are called, and whether one must be.

    `allowed` are the functions that may be called, by name, with the schemas of their arguments; those of the `strict`
    ones hold whether or not a function must be called.
    """

    tools: Seq[Mapping[str, Any]]
    allowed: Mapping[str, Mapping[str, Any]]
    format: CallFormat
    mode: ToolMode
    several: bool
    strict: frozenset[str] = frozenset()

    @property
    def grammar(self) -> Grammar | None:
        """What makes an answer call, or the calls of an answer match; None where neither is asked for."""
        free = self.mode == "auto"
        if free and not self.strict & self.allowed.keys():
            return None
        own, names = self.format, list(self.allowed)
        heads = [f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{own.arguments}": ' for name in names]
        calls = [f'call_{i}: {quoted(head)} @arguments_{i} "}}"' for i, head in enumerate(heads)]
        call, more, newline = "which", "", "\n"
        if own.opening:
            call = f"{quoted(own.opening + newline)} which {quoted(newline + own.closing)}"
            more = f" ({quoted(newline)} call){{0,{MOST_CALLS - 1}}}" if self.several else ""
        which = " | ".join(f"call_{i}" for i in range(len(names)))
        start = self.text_and_calls() if free else [f"start: call{more}", f"call: {call}"]
        lark = newline.join([*start, f"which: {which}", *calls])
        any_object = Grammar.json_object()
        schemas = {
            f"arguments_{i}": any_object if free and name not in self.strict else Grammar.json(self.allowed[name])
            for i, name in enumerate(names)
        }
        return Grammar.lark(lark, **schemas)

    def text_and_calls(self) -> list[str]:
        """The rules of an answer that is any text, in which what begins as a call is one."""
        opening, closing = self.format.opening, self.format.closing
        if not opening:
            return ["start: which | TEXT?", r"TEXT: /[ \n\t]*[^ \n\t{](.|\n)*/"]
        return [
            f"start: call{'*' if self.several else '?'} TEXT?",
            f"call: begun {quoted(chr(10))} which {quoted(chr(10) + closing)}",
            f"begun[lazy]: ANY {quoted(opening)}",
            r"ANY: /(.|\n)*/",
            rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{re.escape(opening)}(.|\n)*/",
        ]

    def call_of(self, text: str) -> ToolCall | None:
        """The call that a text is; None for any other text."""
        try:
            found = json.loads(text, parse_constant=no_constant)
        except (ValueError, RecursionError):
            return None
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or name not in self.allowed:
            return None
        arguments = found.get(self.format.arguments, {})
        return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def no_constant(name: str) -> None:
    """NaN and infinities, which Python reads, are no JSON."""
    raise ValueError(f"{name} is no number of JSON")


class CallSplitter:
    """Tells calls and text of one growing answer apart. Without tools all of it is text."""

    def __init__(self, use: ToolUse | None) -> None:
        self.use = use
        self.held = ""
        self.inside = False  # of a call
        self.bare = False  # whether blanks at the front of what comes next belong to the call before them
        self.begun = False  # whether anything but blanks was said
        self.num_calls = 0  # that were told in a stream

    def feed(self, text: str) -> list[str | ToolCall]:
        """The text and the calls that are certain with this text, in order."""
        if self.use is None:
            return [text] if text else []
        self.held += text
        own = self.use.format
        if not own.opening:
            return self.feed_alone()
        found: list[str | ToolCall] = []
        while True:
            if self.inside:
                at = self.held.find(own.closing)
                if at < 0:
                    return found
                body, self.held = self.held[:at], self.held[at + len(own.closing) :]
                call = self.use.call_of(body)
                found.append(call or f"{own.opening}{body}{own.closing}")
                self.inside, self.bare = False, call is not None
            at = self.held.find(own.opening)
            if at < 0:
                return [*found, *self.take(certain(self.held, own.opening))]
            found += self.take(len(self.held[:at].rstrip()))
            self.held, self.inside = self.held.lstrip()[len(own.opening) :], True

    def feed_alone(self) -> list[str | ToolCall]:
        """The same where an answer is a call as a whole: what begins as one waits for its end."""
        said = self.held.lstrip()
        if not self.begun and (not said or said.startswith("{")):
            return []
        self.begun = True
        return self.take(len(self.held))

    def take(self, length: int) -> list[str | ToolCall]:
        """So much of the held text."""
        text, self.held = self.held[:length], self.held[length:]
        if self.bare:
            text = text.lstrip()
            self.bare = not text
        return [text] if text else []

    def close(self) -> list[str | ToolCall]:
        """The rest, once the answer has ended: a call may lack its closing text."""
        if self.use is None:
            return []
        alone = not self.use.format.opening and not self.begun
        call = self.use.call_of(self.held) if self.inside or alone else None
        if call is not None:
            return [call]
        self.held = (self.use.format.opening if self.inside else "") + self.held
        return self.take(len(self.held))

    def whole(self, text: str) -> tuple[str, list[ToolCall]]:
        """A whole answer's text and calls."""
        parts = [*self.feed(text), *self.close()]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        return "".join(part for part in parts if isinstance(part, str)), calls


def certain(text: str, opening: str) -> int:
    """How much of a text cannot belong to an opening, nor be the blanks in front of it."""
    begun = next((i for i in range(min(len(opening), len(text)), 0, -1) if opening.startswith(text[-i:])), 0)
    return len(text[: len(text) - begun].rstrip())


def tools_of(given: Mapping[str, Any], template: str) -> ToolUse | None:
    """The tools of a body whose prompt this template makes; None where none may be called."""
    tools, choice = tool_list(given), given.get("tool_choice")
    several = given.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise refused("parallel_tool_calls", f"parallel_tool_calls: {shown(several)} must be true or false.")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice", f"tool_choice: {shown(choice)} needs tools, and there are none.")
        return None
    if len(tools) > MOST_TOOLS:
        raise refused("tools", f"tools: these are {len(tools)}: give at most {MOST_TOOLS}.")
    schemas = dict(function_of(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True)
    if len(schemas) < len(tools):
        raise refused("tools", "tools: two functions have the same name.")
    mode, allowed, one = choice_of(choice, schemas)
    if choice == "none":
        return None
    if "tools" not in template:
        problem = "tools: the chat template does not show tools to the model: use a model whose template does"
        raise refused("tools", f"{problem}, or give one as chat_template.", "unsupported_parameter")
    own = next((each for each in FORMATS if each.mark in template), None)
    if own is None:
        problem = "tools: the template asks for calls in a form that is not known here"
        raise refused("tools", f"{problem}: known are those of Hermes and Llama 3.", "unsupported_parameter")
    return ToolUse(tools, allowed, own, mode, several and not one, strict)


def tool_list(given: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a body, of which nothing is known but that they are objects; None without the field."""
    tools = given.get("tools")
    if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
        raise refused("tools", f"tools: {shown(tools)} is no list of tools.")
    return tools


def function_of(tool: Any, name: str) -> tuple[str, Mapping[str, Any]]:
    """A tool's name, and the schema of its arguments."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise refused("tools", f'{name}: {shown(tool)} is no function: give {{"type": "function", "function": ...}}.')
    own, schema = function.get("name"), function.get("parameters")
    if not isinstance(own, str) or not own:
        raise refused("tools", f"{name}: {shown(own)} is no name of a function.")
    if not isinstance(schema, dict | None):
        raise refused("tools", f"{name}: the parameters {shown(schema)} are no JSON schema.")
    return own, NOTHING if schema is None else schema


def choice_of(choice: Any, schemas: Mapping[str, Any]) -> tuple[ToolMode, Mapping[str, Mapping[str, Any]], bool]:
    """Whether a function must be called, which may be, and whether that is one call of a function that was named."""
    if choice in (None, "none", "auto", "required"):
        return ("required" if choice == "required" else "auto"), schemas, False
    kind = choice.get("type") if isinstance(choice, dict) else None
    own = choice.get(kind) if kind in ("function", "allowed_tools") else None
    if kind == "allowed_tools" and isinstance(own, dict) and own.get("mode") in ("auto", "required"):
        listed = own.get("tools")
        names = [named(each) for each in listed] if isinstance(listed, list) else []
        if names and all(name in schemas for name in names):
            return own["mode"], {name: schemas[name] for name in names if name is not None}, False
    elif kind == "function" and (name := named(choice)) is not None and name in schemas:
        return "required", {name: schemas[name]}, True
    known = '"none", "auto", "required", allowed_tools'
    problem = f"tool_choice: {shown(choice)} is none of {known} and the functions {', '.join(schemas)}."
    raise refused("tool_choice", problem)


def named(tool: Any) -> str | None:
    """The name of the function that an object names; None for any other value."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def with_objects(messages: Seq[Any]) -> list[Any]:
    """Messages whose calls have their arguments as objects, as templates know them; in bodies they are text."""
    return [with_object_calls(message) if isinstance(message, dict) else message for message in messages]


def with_object_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """One message so."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "content": message.get("content") or "", "tool_calls": [with_object(call) for call in calls]}


def with_object(call: Any) -> Any:
    """One call so; what is no JSON stays text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call
