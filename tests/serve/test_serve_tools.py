"""Tools: calls are told apart from text wherever it is cut, and an answer that must call does, as the schema says."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from forerun.serve.problems import ApiError
from forerun.serve.tools import ToolUse, tools_of, with_objects
from kit.servers import Running, serving
from serve.call_templates import HERMES, LLAMA, NAMED

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
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "no name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools", "no JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "true"}}]}, "tools", "true or false"),
        ({"tools": TOOLS[:1] * 2}, "tools", "same name"),
        ({"tools": TOOLS * 65}, "tools", "at most 128"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": allowing("auto", "x")}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": allowing("none", "weather")}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": allowing("auto")}, "tool_choice", "weather"),
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_field(given: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refusal:
        tools_of(given, lambda: NAMED["Hermes"])
    assert refusal.value.param == field


def test_tools_that_are_allowed_are_those_of_the_choice() -> None:
    some = use(tool_choice=allowing("required", "weather"))
    assert (some.mode, list(some.allowed), some.several, len(some.tools)) == ("required", ["weather"], True, 2)
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
        ApiError, match=r"messages\[1\]\.tool_calls\[1\]: the arguments .* are no JSON object"
    ) as refusal:
        with_objects([*MESSAGES, earlier(arguments=arguments)])
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("calls", [3, {}, "", [3], [{}], [{"function": 3}], [{"function": {"name": 3}}]])
def test_earlier_calls_that_are_none_are_refused_by_their_place(calls: Any) -> None:
    with pytest.raises(ApiError, match=r"messages\[0\]\.tool_calls"):
        with_objects([{"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.parametrize("calls", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_a_message_without_calls_has_no_field_of_them(calls: Any) -> None:
    message = {"role": "assistant", "content": "Hi"}
    assert with_objects([{**message, **calls}]) == [message]


server = serving()


def check(name: str, arguments: str) -> None:
    """A call is one of TOOLS as its schema says."""
    if name == "weather":
        jsonschema.validate(json.loads(arguments), WEATHER)
    else:
        assert (name, json.loads(arguments)) == ('say "hi"', {})


@pytest.mark.short("hermes")
@pytest.mark.parametrize("template", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_an_answer_that_must_call_a_tool_does(server: Running, template: str) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": "stories", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 400}
    extra = {"chat_template": template}
    weather: Any = {"type": "function", "function": {"name": "weather"}}
    names = set()
    for seed in range(4):
        choices: list[dict[str, Any]] = [
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": weather},
        ]
        for choice in choices:
            answer = client.chat.completions.create(**asked, **choice, seed=seed, extra_body=extra).choices[0]
            assert answer.finish_reason == "tool_calls", answer
            assert answer.message.content is None
            (call,) = answer.message.tool_calls
            assert call.type == "function"
            assert len(call.id) == 9
            check(call.function.name, call.function.arguments)
            names.add(call.function.name)
            assert choice["tool_choice"] == "required" or call.function.name == "weather"
    assert names == {"weather", 'say "hi"'}


STRICT: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    *({"type": "function", "function": {"name": name}} for name in ("free", "never")),
]


@pytest.mark.parametrize("template", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_a_strict_function_leaves_the_tokens_to_the_seed_alone(server: Running, template: str) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "chat_template": template, "tools": STRICT, "max_tokens": 30}
    answers = [
        server.post("/v1/chat/completions", **asked, seed=3, temperature=1.2, speculation=own).json()["choices"]
        for own in (True, False)
    ]
    assert answers[0] == answers[1]


def test_a_stream_has_the_calls_of_the_whole_answer(server: Running) -> None:
    client, extra = server.client(), {"chat_template": HERMES}
    form = f"Well\\. ({CALL.replace('Rome', '(Rome|Oslo)')}){{1,2}}".replace('{"', r'\{"').replace('"}}', r'"\}\}')
    bodies: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tool_choice": "required", "max_tokens": 90}, {}),
        ({"max_tokens": 200, "n": 2}, {"structured_outputs": {"regex": form}}),
        ({"max_tokens": 12}, {}),
    ]
    for seed, (body, more) in itertools.product(range(2), bodies):
        asked: Any = {"model": "stories", "messages": MESSAGES, "tools": TOOLS, "seed": seed, **body}
        whole = client.chat.completions.create(**asked, extra_body=extra | more)
        told: dict[int, list[Any]] = {choice.index: ["", [], None] for choice in whole.choices}
        for chunk in client.chat.completions.create(**asked, stream=True, extra_body=extra | more):
            for choice in chunk.choices:
                own = told[choice.index]
                own[0] += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    assert call.index == len(own[1])
                    own[1].append((call.function.name, call.function.arguments))
                own[2] = choice.finish_reason or own[2]
        for choice in whole.choices:
            calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
            assert told[choice.index] == [choice.message.content or "", calls, choice.finish_reason]
            if "structured_outputs" in more:
                assert choice.message.content == "Well."
                assert 1 <= len(calls) <= 2
                assert choice.finish_reason == "tool_calls"


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


def test_refusals_name_their_field(server: Running) -> None:
    body = {"messages": MESSAGES, "chat_template": HERMES, "tools": TOOLS, "max_tokens": 3}
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"chat_template": "{{ messages[0].content }}"}, "tools", "does not show tools"),
        ({"chat_template": "{{ tools }}{{ messages[0].content }}"}, "tools", "form that is not known"),
        ({"messages": [earlier(arguments="[]")]}, "messages", "messages[0].tool_calls[1]: the arguments"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format", "leave out one"),
        ({"tools": [{}]}, "tools", "is no function"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "Unimplemented keys",
        ),
    ]
    for own, field, why in wrong:
        answer = server.post("/v1/chat/completions", **{**body, **own})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
        assert why in answer.json()["error"]["message"]
