"""Tools: which may be called, how earlier calls reach a template, and what is refused."""

from typing import Any

import pytest

from forerun.serve.problems import ApiError
from forerun.serve.tools import ToolUse, tools_of, with_objects
from kit.servers import Running, serving
from serve.call_templates import HERMES, NAMED

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": 'say "hi"'}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


def allowing(mode: str, *names: str) -> Any:
    """A choice among some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def use(**given: Any) -> ToolUse:
    found = tools_of({"tools": TOOLS, **given}, lambda: NAMED["Hermes"])
    assert found is not None
    return found


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "not the name of a function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools", "not a JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "true"}}]}, "tools", "true or false"),
        ({"tools": TOOLS[:1] * 2}, "tools", "same name"),
        ({"tools": TOOLS * 65}, "tools", "at most 128"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": allowing("auto", "x")}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": allowing("none", "weather")}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": allowing("auto")}, "tool_choice", "weather"),
        ({"tool_choice": "required"}, "tool_choice", "requires tools"),
    ],
)
def test_an_invalid_tool_is_refused_by_its_field(given: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refusal:
        tools_of(given, lambda: NAMED["Hermes"])
    assert refusal.value.param == field


def test_tools_that_are_allowed_are_those_of_the_choice() -> None:
    some = use(tool_choice=allowing("required", "weather"))
    assert (some.mode, list(some.allowed), some.several) == ("required", ["weather"], True)
    assert use().form is NAMED["Hermes"]
    for given in ({"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        assert tools_of(given, lambda: pytest.fail("no form is needed")) is None


def earlier(**function: Any) -> Any:
    """A message with two calls, of which the second is of this function."""
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("now", "weather")]
    calls[1]["function"] |= function
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ({"city": "Rome"}, {"city": "Rome"}),
        ("", {}),
        (" ", {}),
        (None, {}),
        ("null", {}),
    ],
)
def test_arguments_of_earlier_calls_are_objects_for_the_template(arguments: Any, read: Any) -> None:
    (message,) = with_objects([earlier(arguments=arguments)])
    assert message["content"] == ""
    assert message["tool_calls"][1]["function"] == {"name": "weather", "arguments": read}
    (without,) = with_objects(
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather"}}]}]
    )
    assert without["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["{", "no JSON", "[1]", [1], 3, True, '"{}"x', "NaN", '{"a": NaN}', "[" * 9000])
def test_arguments_of_earlier_calls_that_are_no_object_are_refused_by_their_place(arguments: Any) -> None:
    with pytest.raises(
        ApiError, match=r"messages\[1\]\.tool_calls\[1\]: the arguments .* are not a JSON object"
    ) as refusal:
        with_objects([*MESSAGES, earlier(arguments=arguments)])
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("calls", [3, {}, "", [3], [{}], [{"function": 3}], [{"function": {"name": 3}}]])
def test_invalid_earlier_calls_are_refused_by_their_place(calls: Any) -> None:
    with pytest.raises(ApiError, match=r"messages\[0\]\.tool_calls"):
        with_objects([{"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.parametrize("calls", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_a_message_without_calls_has_no_field_of_them(calls: Any) -> None:
    message = {"role": "assistant", "content": "Hi"}
    assert with_objects([{**message, **calls}]) == [message]


server = serving()


def test_tools_are_in_the_prompt_unless_none_may_be_called(server: Running) -> None:
    body = {"messages": MESSAGES, "chat_template": HERMES, "max_tokens": 3, "seed": 1}
    with_tools = server.post("/v1/chat/completions", **body, tools=TOOLS).json()["usage"]["prompt_tokens"]
    without = [
        server.post("/v1/chat/completions", **body, **own).json()["usage"]["prompt_tokens"]
        for own in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []})
    ]
    assert len(set(without)) == 1
    assert with_tools > without[0] + 9
    counted = server.post("/tokenize", messages=MESSAGES, chat_template=HERMES, tools=TOOLS).json()["count"]
    assert counted == with_tools
