"""Tools: the functions of a body that an answer may call, and the calls in its earlier messages."""

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
from forerun.serve.harmony import calls_grammar
from forerun.serve.problems import refused, renamed

MOST_TOOLS = 128
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}  # the default
ToolMode = Literal["auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one body, the format of calls, and whether a tool must be called.

    `allowed`: schemas of the arguments of the functions that may be called, by name. The schemas of `strict` functions
    are enforced even if no call is required.
    """

    allowed: Mapping[str, Mapping[str, Any]]
    form: CallForm
    mode: ToolMode
    several: bool
    strict: frozenset[str] = frozenset()

    def grammar(self, special: Mapping[str, int], begun: str = "") -> Grammar | None:
        """The grammar that enforces a call or strict schemas; None if neither is requested.

        `special`: ids of special tokens by text; `begun`: in Harmony, the beginning of the answer in the prompt.
        """
        free = self.mode == "auto"
        if free and not self.strict & self.allowed.keys():
            return None
        kept = {n: schema if not free or n in self.strict else None for n, schema in self.allowed.items()}
        try:
            if self.form.kind == "harmony":
                return calls_grammar({name: of_object(schema) for name, schema in kept.items()}, begun, free=free)
            return call_grammar(self.form, kept, special, free=free, several=self.several)
        except InvalidGrammar as error:
            raise renamed(error, "tools") from error


def tools_of(body: Mapping[str, Any], form_of: Callable[[], CallForm]) -> ToolUse | None:
    """The tools of a body; None if none may be called. `form_of` returns the call format of the template."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice", f"{shown(choice)} requires tools: give some in tools.")
        return None
    if len(tools) > MOST_TOOLS:
        raise refused("tools", f"it is a list of {len(tools)} tools: give at most {MOST_TOOLS}.")
    schemas = dict(function_of(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True)
    if len(schemas) < len(tools):
        raise refused("tools", "two functions have the same name.")
    mode, allowed, one = choice_of(choice, schemas)
    if choice == "none":
        return None
    return ToolUse(allowed, form_of(), mode, body.get("parallel_tool_calls", True) and not one, strict)


def function_of(tool: Mapping[str, Any], name: str) -> tuple[str, Mapping[str, Any]]:
    """A function's name, and the schema of its arguments."""
    function = tool.get("function") if tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise refused(name, f'{shown(tool)} is not a function: give {{"type": "function", "function": ...}}.')
    function_name, schema = function.get("name"), function.get("parameters")
    if not isinstance(function_name, str) or not function_name:
        raise refused(name, f"{shown(function_name)} is not the name of a function.")
    if not isinstance(schema, dict | None):
        raise refused(name, f"the parameters {shown(schema)} are not a JSON schema.")
    if not isinstance(function.get("strict"), bool | None):
        raise refused(name, f"strict: {shown(function['strict'])} must be true or false.")
    return function_name, NO_PARAMETERS if schema is None else schema


def choice_of(choice: Any, schemas: Mapping[str, Any]) -> tuple[ToolMode, Mapping[str, Mapping[str, Any]], bool]:
    """(mode, allowed functions, whether exactly one call of a named function is required) from `tool_choice`."""
    if choice in (None, "none", "auto", "required"):
        return ("required" if choice == "required" else "auto"), schemas, False
    kind = choice.get("type") if isinstance(choice, dict) else None
    chosen = choice.get(kind) if kind in ("function", "allowed_tools") else None
    if kind == "allowed_tools" and isinstance(chosen, dict) and chosen.get("mode") in ("auto", "required"):
        listed = chosen.get("tools")
        names = [function_name_of(each) for each in listed] if isinstance(listed, list) else []
        if names and all(name in schemas for name in names):
            return chosen["mode"], {name: schemas[name] for name in names if name is not None}, False
    elif kind == "function" and (name := function_name_of(choice)) is not None and name in schemas:
        return "required", {name: schemas[name]}, True
    known = '"none", "auto", "required", allowed_tools'
    raise refused("tool_choice", f"{shown(choice)} must be {known} or one of the functions {shown([*schemas])}.")


def function_name_of(tool: Any) -> str | None:
    """The function name of a tool object; None if it is malformed."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def with_objects(messages: Seq[Any]) -> list[Any]:
    """Messages with the arguments of calls parsed from text to objects, as chat templates expect them.

    An empty `tool_calls` is removed. Raises ApiError 400 if arguments are not a JSON object.
    """
    parsed = []
    for i, message in enumerate(messages):
        calls, name = message.get("tool_calls"), f"messages[{i}].tool_calls"
        if not isinstance(calls, list | None):
            raise refused(name, f"{shown(calls)} is not a list of calls.")
        parsed.append({key: value for key, value in message.items() if key != "tool_calls"})
        if calls:
            with_arguments = [with_object(call, f"{name}[{j}]") for j, call in enumerate(calls)]
            parsed[-1] |= {"content": message.get("content") or "", "tool_calls": with_arguments}
    return parsed


def with_object(call: Any, name: str) -> dict[str, Any]:
    """One call with parsed arguments; missing or empty arguments become an empty object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused(name, f"{shown(call)} is not a call of a function with a name.")
    try:
        return {**call, "function": {**function, "arguments": arguments_of(function.get("arguments"))}}
    except ValueError as error:
        problem = f"the arguments {shown(function['arguments'])} are not a JSON object"
        raise refused(name, f'{problem}: give an object as text, such as "{{}}".') from error
