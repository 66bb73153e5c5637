"""Tool calls: the formats in which models write them, and parsing them from the text of an answer.

One table has all formats. `template_forms.py` detects which one a chat template uses, and `call_grammar.py` constrains
answers to calls. Text with invalid JSON, or with a function that was not offered, is not a call but plain text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

from forerun.limits import finite
from forerun.serve.growing import BLANKS, GrowingText, Scan, unbroken
from forerun.serve.parameters import types_of

Functions = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by function name
CallKind = Literal["object", "named", "tagged", "harmony"]
KEYS = ("arguments", "parameters")  # of the arguments in JSON; both are accepted, since models confuse them
KEY = re.compile(r"[^<>\n]*")
WORD = re.compile(r"\w*")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # \u escapes in JSON can produce it
PYTHON_TAG, CALL_ID = "<|python_tag|>", "[CALL_ID]"
CALL_MEMBERS = {"name", "id", "type"}  # members that a call without arguments may have
INVALID = object()
ALPHANUMERIC = string.ascii_letters + string.digits


def new_id() -> str:
    """A call's id: 9 letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call; `arguments` is a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=new_id)

    def described(self, index: int | None = None) -> dict[str, Any]:
        """The call as OpenAI's object; in streams with its index."""
        call = {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if index is None else {"index": index, **call}


@dataclass(frozen=True, slots=True)
class CallForm:
    """A format of tool calls, each between `opening` and `closing`; without an opening, the whole answer is calls.

    "object": a JSON object with the name and, under `key`, the arguments; `listed` formats put several into a list.
    "named": the name, `key` and the arguments as JSON. "tagged": the name between the two texts of `function`, then
    the parameters, each name and value between two texts, and `last`. "harmony" is parsed in `harmony.py`. The blanks
    at the ends of these texts are the ones that models write; the parser accepts any.
    """

    name: str
    kind: CallKind
    opening: str = ""
    closing: str = ""
    key: str = "arguments"
    function: tuple[str, str] = ("", "")
    parameter: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    last: str = ""
    listed: bool = False

    @property
    def tag(self) -> str:
        """The opening tag without surrounding blanks."""
        return self.opening.strip()

    @property
    def tags(self) -> Seq[str]:
        """The tags around calls and between a name and its arguments, without blanks."""
        return [self.tag, self.closing.strip(), self.key, CALL_ID, PYTHON_TAG]

    @property
    def inner_tags(self) -> Seq[str]:
        """The tags of tagged formats around names, parameters and values, without blanks."""
        return [text.strip() for text in (*self.function, *self.parameter, *self.value, self.last)]

    def calls(self, text: GrowingText, functions: Functions) -> Scan[list[ToolCall]]:
        """Parse the calls after an opening, and the closing; no calls if the text is something else."""
        yield from text.run(BLANKS)
        calls = yield from READERS[self.kind](self, text, functions)
        closing = self.closing.strip()
        if calls and closing:
            yield from text.run(BLANKS)
            closed = yield from text.one_of((closing,))
            return calls if closed or (text.is_over and self.kind == "object") else []
        return calls


@dataclass(frozen=True, slots=True)
class ValueEnd:
    """A cached search: values that start between `begin` and `end` end at `end`; the `tag` after them at `tag_end`.

    All are positions in the entire answer. The tag is empty if no end was found.
    """

    begin: int
    end: int
    tag_end: int
    tag: str


HERMES = CallForm("Hermes", "object", "<tool_call>\n", "\n</tool_call>")
QWEN_CODER = CallForm(
    "Qwen3-Coder", "tagged", "<tool_call>\n", "\n</tool_call>", function=("<function=", ">\n"),
    parameter=("<parameter=", ">"), value=("\n", "\n</parameter>\n"), last="</function>",
)  # fmt: skip
GLM = CallForm(
    "GLM-4.5", "tagged", "<tool_call>", "</tool_call>", function=("", "\n"),
    parameter=("<arg_key>", "</arg_key>\n"), value=("<arg_value>", "</arg_value>\n"),
)  # fmt: skip
MISTRAL = CallForm("Mistral", "named", "[TOOL_CALLS]", key="[ARGS]")
MISTRAL_LIST = CallForm("Mistral's list", "object", "[TOOL_CALLS]", listed=True)
NEMOTRON = CallForm("Nemotron Nano 2", "object", "<TOOLCALL>", "</TOOLCALL>", listed=True)
HARMONY = CallForm("Harmony", "harmony")
LLAMA = CallForm("Llama 3", "object", key="parameters")
FORMS = (HERMES, QWEN_CODER, GLM, MISTRAL, MISTRAL_LIST, NEMOTRON, HARMONY, LLAMA)


def read_objects(form: CallForm, text: GrowingText, functions: Functions) -> Scan[list[ToolCall]]:
    """Parse JSON objects or lists of them: one between tags, or a whole answer of several, separated by semicolons."""
    calls: list[ToolCall] = []
    if not form.opening:
        yield from text.one_of((PYTHON_TAG,))
        yield from text.run(BLANKS)
    while True:
        calls += (more := calls_of((yield from text.json()), functions))
        if not more or form.opening:
            return more
        yield from text.run(BLANKS)
        if not (yield from text.one_of(";")):
            return calls
        yield from text.run(BLANKS)


def read_named(form: CallForm, text: GrowingText, functions: Functions) -> Scan[list[ToolCall]]:
    """Parse the name, an optional id, and the arguments."""
    name = yield from text.one_of(functions)
    if name and (yield from text.one_of((CALL_ID,))):
        yield from text.run(WORD)
    if not name or not (yield from text.one_of((form.key,))):
        return []
    call = call_of(name, parse_json((yield from text.json())), functions)
    return [call] if call else []


def read_tagged(form: CallForm, text: GrowingText, functions: Functions) -> Scan[list[ToolCall]]:
    """Parse the name and the tagged parameters.

    Positions after which no call was found are cached, so that the work stays linear in the length of the text.
    """
    names = {f"{form.function[0]}{name}{form.function[1].strip()}": name for name in functions}
    name = names.get((yield from text.one_of(names)))
    if name is None:
        return []
    passed: list[int] = []
    call = yield from read_parameters(form, text, name, functions, passed)
    if call is None:
        text.memory["failed", name].update(passed)
    return [call] if call else []


def read_parameters(
    form: CallForm, text: GrowingText, name: str, functions: Functions, passed: list[int]
) -> Scan[ToolCall | None]:
    """Parse the parameters and the end of a call; the end positions of its values are appended to `passed`."""
    first, last, closing = form.parameter[0], form.last or form.closing.strip(), form.closing.strip()
    types: dict[str, set[str]] = text.cached(("types", name), lambda: types_of(functions[name]))
    failed: set[int] = text.cached(("failed", name), set)
    values: dict[str, slice] = {}
    yield from text.run(BLANKS)
    tag = yield from text.one_of((first, last))
    while tag == first:
        key = unbroken((yield from text.run(KEY)))
        if not (yield from text.one_of((form.parameter[1].strip(),))):
            return None
        values[key], tag = yield from read_value(form, text, types.get(key, set()))
        if text.place in failed:
            return None
        passed.append(text.place)
    text.at -= 0 if form.last else len(tag)  # the tag was the closing, which is read below
    end = text.at
    yield from text.run(BLANKS)
    if not tag or not (yield from text.one_of((closing,))):
        return None
    text.at = end
    written = {key: unbroken(text.text[span]) for key, span in values.items()}
    if not form.value[0].strip():
        written = {key: value.removeprefix("\n").removesuffix("\n") for key, value in written.items()}
    return call_of(name, {key: typed(value, types.get(key, set())) for key, value in written.items()}, functions)


def read_value(form: CallForm, text: GrowingText, types: set[str]) -> Scan[tuple[slice, str]]:
    """A value's slice of the text, and the tag after it: of the next parameter or of the call's end, "" if neither.

    The end tag of a value that is followed by neither, or is inside a JSON string, is part of the value.
    """
    first, last, ending = form.parameter[0], form.last or form.closing.strip(), form.value[1].strip()
    if opening := form.value[0].strip():
        yield from text.run(BLANKS)
        if not (yield from text.one_of((opening,))):
            return slice(0), ""
    start = text.at
    if types and "string" not in types:
        yield from text.run(BLANKS)
        text.at = text.at if (yield from text.json()) else start
    value_end: ValueEnd | None = text.memory.get(ValueEnd)
    if value_end is None or not value_end.begin <= text.place <= value_end.end:
        value_end = text.memory[ValueEnd] = yield from next_end(text, ending, (first, last))
    text.at = value_end.tag_end - text.num_forgotten
    return slice(start, value_end.end - text.num_forgotten), value_end.tag


def next_end(text: GrowingText, ending: str, tags: tuple[str, str]) -> Scan[ValueEnd]:
    """Search the end of the value that contains the current position."""
    begin = text.place
    while (yield from text.upto(ending)):
        place = text.place
        yield from text.run(BLANKS)
        if tag := (yield from text.one_of(tags)):
            return ValueEnd(begin, place - len(ending), text.place, tag)
        text.at = place - text.num_forgotten
    return ValueEnd(begin, text.place, text.place, "")


def typed(written: str, types: set[str]) -> Any:
    """A parameter's value: the text itself, or the JSON in it if the schema excludes strings and it can be parsed."""
    plain = written.strip()
    if "null" in types and plain in ("null", "None"):
        return None
    if not types or "string" in types:
        return written
    value = parse_json(plain.lower() if plain in ("True", "False") else plain)
    return written if value is INVALID else value


def calls_of(text: str, functions: Functions) -> list[ToolCall]:
    """The calls in a JSON object or list of objects; empty for any other text."""
    value = parse_json(text)
    calls = [object_call(each, functions) for each in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call] if all(calls) else []


def object_call(value: Any, functions: Functions) -> ToolCall | None:
    """The call in a JSON object; arguments may be missing if there are no members other than name, id and type."""
    if not isinstance(value, dict):
        return None
    arguments = [value[key] for key in KEYS if key in value]
    if len(arguments) > 1 or (not arguments and value.keys() - CALL_MEMBERS):
        return None
    return call_of(value.get("name"), arguments[0] if arguments else {}, functions)


def call_of(name: object, arguments: Any, functions: Functions) -> ToolCall | None:
    """A call of one of the functions; None for an unknown function, or arguments that are not a JSON object."""
    try:
        values = arguments_of(arguments)
        if not isinstance(name, str) or name not in functions:
            return None
        written = json.dumps(values, ensure_ascii=False)
        return ToolCall(name, json.dumps(values) if LONE_SURROGATE.search(written) else written)
    except (ValueError, RecursionError):
        return None


def arguments_of(arguments: Any) -> dict[str, Any]:
    """Arguments as an object; null and empty text count as an empty object. Raises ValueError for other values."""
    value = arguments
    if isinstance(arguments, str):
        value = parse_json(arguments) if arguments.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("arguments must be an object")
    return value


def parse_json(text: str) -> Any:
    """Parse JSON, allowing line breaks in strings; INVALID if it is invalid."""
    try:
        return json.loads(unbroken(text), strict=False, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError):
        return INVALID


READERS: Mapping[CallKind, Callable[[CallForm, GrowingText, Functions], Scan[list[ToolCall]]]] = {
    "object": read_objects,
    "named": read_named,
    "tagged": read_tagged,
}
