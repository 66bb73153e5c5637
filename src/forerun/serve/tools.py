"""Tools: the functions of a body that an answer may call, and the calls of its earlier messages.

`calls.py` has the forms of calls and `parts.py` tells them apart from the text around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from forerun.errors import InvalidGrammar
from forerun.limits import shown
from forerun.sampling.grammar import Grammar
from forerun.serve.call_grammar import call_grammar, of_object
from forerun.serve.calls import CallForm, arguments_of
from forerun.serve.harmony import calling
from forerun.serve.problems import refused

MOST_TOOLS = 128
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}  # the parameters of who has none
ToolMode = Literal["auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one body: which are offered, in which form they are called, and whether one must be.

    `allowed` are the functions that may be called, by name, with the schemas of their arguments; those of the `strict`
    ones hold whether or not a function must be called.
    """

    tools: Seq[Mapping[str, Any]]
    allowed: Mapping[str, Mapping[str, Any]]
    form: CallForm
    mode: ToolMode
    several: bool
    strict: frozenset[str] = frozenset()

    def grammar(self, special: Mapping[str, int], begun: str = "") -> Grammar | None:
        """What makes an answer call, or the calls of an answer match; None where neither is asked for.

        `special` are the tokens that are no text, and `begun` is what the prompt has of a message in Harmony.
        """
        free = self.mode == "auto"
        if free and not self.strict & self.allowed.keys():
            return None
        kept = {n: schema if not free or n in self.strict else None for n, schema in self.allowed.items()}
        try:
            if self.form.kind == "harmony":
                return calling({name: of_object(schema) for name, schema in kept.items()}, begun, free=free)
            return call_grammar(self.form, kept, special, free=free, several=self.several)
        except InvalidGrammar as error:
            raise refused("tools", str(error).replace("grammar:", "tools:", 1)) from error


def tools_of(given: Mapping[str, Any], form_of: Callable[[], CallForm]) -> ToolUse | None:
    """The tools of a body whose template writes calls in this form; None where none may be called."""
    tools, choice = given.get("tools"), given.get("tool_choice")
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
    return ToolUse(tools, allowed, form_of(), mode, given.get("parallel_tool_calls", True) and not one, strict)


def function_of(tool: Mapping[str, Any], name: str) -> tuple[str, Mapping[str, Any]]:
    """A tool's name, and the schema of its arguments."""
    function = tool.get("function") if tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise refused("tools", f'{name}: {shown(tool)} is no function: give {{"type": "function", "function": ...}}.')
    function_name, schema = function.get("name"), function.get("parameters")
    if not isinstance(function_name, str) or not function_name:
        raise refused("tools", f"{name}: {shown(function_name)} is no name of a function.")
    if not isinstance(schema, dict | None):
        raise refused("tools", f"{name}: the parameters {shown(schema)} are no JSON schema.")
    if not isinstance(function.get("strict"), bool | None):
        raise refused("tools", f"{name}: strict: {shown(function['strict'])} must be true or false.")
    return function_name, NOTHING if schema is None else schema


def choice_of(choice: Any, schemas: Mapping[str, Any]) -> tuple[ToolMode, Mapping[str, Mapping[str, Any]], bool]:
    """Whether a function must be called, which may be, and whether that is one call of a function that was named."""
    if choice in (None, "none", "auto", "required"):
        return ("required" if choice == "required" else "auto"), schemas, False
    kind = choice.get("type") if isinstance(choice, dict) else None
    chosen = choice.get(kind) if kind in ("function", "allowed_tools") else None
    if kind == "allowed_tools" and isinstance(chosen, dict) and chosen.get("mode") in ("auto", "required"):
        listed = chosen.get("tools")
        names = [named(each) for each in listed] if isinstance(listed, list) else []
        if names and all(name in schemas for name in names):
            return chosen["mode"], {name: schemas[name] for name in names if name is not None}, False
    elif kind == "function" and (name := named(choice)) is not None and name in schemas:
        return "required", {name: schemas[name]}, True
    known = '"none", "auto", "required", allowed_tools'
    problem = f"tool_choice: {shown(choice)} is none of {known} and the functions {shown([*schemas])}."
    raise refused("tool_choice", problem)


def named(tool: Any) -> str | None:
    """The name of the function that an object names; None for any other value."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def with_objects(messages: Seq[Any]) -> list[Any]:
    """Messages whose calls have their arguments as objects, as templates know them; in bodies they are text.

    Raises the ApiError for 400 where arguments are no object.
    """
    return [with_calls(message, f"messages[{i}]") for i, message in enumerate(messages)]


def with_calls(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One message so; without `tool_calls` if it has none."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None):
        raise refused("messages", f"{name}.tool_calls: {shown(calls)} is no list of calls.")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if not calls:
        return rest
    made = [with_object(call, f"{name}.tool_calls[{j}]") for j, call in enumerate(calls)]
    return {**rest, "content": message.get("content") or "", "tool_calls": made}


def with_object(call: Any, name: str) -> dict[str, Any]:
    """One call so; empty or without arguments they are an empty object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused("messages", f"{name}: {shown(call)} is no call of a function with a name.")
    try:
        return {**call, "function": {**function, "arguments": arguments_of(function.get("arguments"))}}
    except ValueError as error:
        problem = f"{name}: the arguments {shown(function['arguments'])} are no JSON object"
        raise refused("messages", f'{problem}: give an object as text, such as "{{}}".') from error
