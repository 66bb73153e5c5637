"""Tools: calls are told apart from text wherever it is cut, and an answer that must call does, as the schema says."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from forerun.serve.problems import ApiError
from forerun.serve.tools import FORMATS, CallSplitter, ToolCall, ToolUse, tools_of, with_objects
from serve.servers import Running, drafting, running

HERMES = (
    "{% if tools %}{{ tools | length }} tools. Answer with <tool_call> and </tool_call>. {% endif %}"
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %} {% endfor %}"
)
LLAMA = (
    '{% if tools %}{{ tools | length }} tools. Respond with {"name": ..., "parameters": ...}. {% endif %}'
    "{{ messages[0].content }}"
)
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


def use(template: str = HERMES, **given: Any) -> ToolUse:
    found = tools_of({"tools": TOOLS, **given}, template)
    assert found is not None
    return found


def called(parts: list[str | ToolCall]) -> list[object]:
    """Texts joined, calls as names and arguments."""
    found: list[object] = []
    for part in parts:
        if isinstance(part, ToolCall):
            found.append((part.name, json.loads(part.arguments)))
        elif found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = ("weather", {"city": "Rome"})
HERMES_TEXTS = [
    ("Sure.", ["Sure."]),
    (CALL, [ROME]),
    (f"Let me see. \n{CALL}\n{CALL}\n", ["Let me see.", ROME, ROME]),
    (f"{CALL} and", [ROME, "and"]),
    (CALL.removesuffix("\n</tool_call>"), [ROME]),
    (CALL[:30], [CALL[:30]]),
    ("a < b <tool <tool_cal", ["a < b <tool <tool_cal"]),
    ("<tool_call>{no}</tool_call> x", ["<tool_call>{no}</tool_call> x"]),
    (CALL.replace("weather", "other"), [CALL.replace("weather", "other")]),
    (CALL.replace('"Rome"', "NaN"), [CALL.replace('"Rome"', "NaN")]),
    ('<tool_call>{"name": "weather"}</tool_call>', [("weather", {})]),
]
LLAMA_TEXTS = [
    ("Sure, {", ["Sure, {"]),
    (' {"name": "weather", "parameters": {"city": "Rome"}}', [ROME]),
    ('{"name": "other", "parameters": {}}', ['{"name": "other", "parameters": {}}']),
    ('{"name": "weather"', ['{"name": "weather"']),
]


@pytest.mark.parametrize(
    ("template", "text", "parts"),
    [(t, *case) for t, own in ((HERMES, HERMES_TEXTS), (LLAMA, LLAMA_TEXTS)) for case in own],
)
def test_calls_are_told_apart_wherever_the_text_is_cut(template: str, text: str, parts: list[object]) -> None:
    rng = random.Random(text)
    cuts = [[at] for at in range(len(text) + 1)] + [list(range(len(text)))]
    cuts += [sorted(rng.choices(range(len(text) + 1), k=3)) for _ in range(20)]
    for each in cuts:
        splitter = CallSplitter(use(template))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *each, len(text)])]
        found = [part for piece in pieces for part in splitter.feed(piece)] + splitter.close()
        assert called(found) == parts, pieces
    assert called([*CallSplitter(None).feed(text), *CallSplitter(None).close()]) == [text]


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({"tools": {}}, "tools", "no list"),
        ({"tools": [3]}, "tools", "no list of tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "no name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools", "no JSON schema"),
        ({"tools": TOOLS[:1] * 2}, "tools", "same name"),
        ({"tools": TOOLS * 65}, "tools", "at most 128"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": allowing("auto", "x")}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": allowing("none", "weather")}, "tool_choice", "weather"),
        ({"tools": TOOLS, "tool_choice": allowing("auto")}, "tool_choice", "weather"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_field(given: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refusal:
        tools_of(given, HERMES)
    assert refusal.value.param == field


def test_templates_without_tools_or_with_another_form_are_refused() -> None:
    for template, why in (("{{ messages }}", "does not show tools"), ("{{ tools }}", "form that is not known")):
        with pytest.raises(ApiError, match=why):
            tools_of({"tools": TOOLS}, template)
        assert tools_of({"tools": TOOLS, "tool_choice": "none"}, template) is None
    some = use(tool_choice=allowing("required", "weather"))
    assert (some.mode, list(some.allowed), some.several, len(some.tools)) == ("required", ["weather"], True, 2)
    assert use().format is FORMATS[0]
    assert use(LLAMA).format is FORMATS[1]
    assert tools_of({"tools": []}, "") is None


def test_arguments_of_earlier_calls_are_objects_for_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    (found,) = with_objects([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert found["content"] == ""
    assert found["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    broken = {**call, "function": {"name": "weather", "arguments": "{"}}
    assert with_objects([{"role": "assistant", "tool_calls": [broken, 3]}])[0]["tool_calls"] == [broken, 3]
    assert with_objects([MESSAGES[0], 3]) == [MESSAGES[0], 3]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(drafting()) as found:
        yield found


def check(name: str, arguments: str) -> None:
    """A call is one of TOOLS as its schema says."""
    if name == "weather":
        jsonschema.validate(json.loads(arguments), WEATHER)
    else:
        assert (name, json.loads(arguments)) == ('say "hi"', {})


@pytest.mark.sampled(2)
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
            assert call.id.startswith("call_")
            check(call.function.name, call.function.arguments)
            names.add(call.function.name)
            assert choice["tool_choice"] == "required" or call.function.name == "weather"
    assert names == {"weather", 'say "hi"'}


STRICT: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    *({"type": "function", "function": {"name": name}} for name in ("free", "never")),
]
OSLO = '{"city": "Oslo", "days": 3}'
OF_FORMS: dict[str, tuple[str, dict[str, bool]]] = {  # the text of a call, and whether texts may be an answer
    HERMES: (
        '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
        {"": True, "Sure. {": True, "a <tool_cal": True, "%s %s": True, "%s\n%s!": True, "<tool_call> Sure": False},
    ),
    LLAMA: ('{"name": "%s", "parameters": %s}', {"": True, "Sure. {": True, "%s": True, "%s.": False, "{}": False}),
}


@pytest.mark.parametrize("template", OF_FORMS, ids=["hermes", "llama"])
def test_a_strict_function_is_called_by_its_schema_or_not_at_all(server: Running, template: str) -> None:
    """An answer may be any text, and whatever begins as a call is one that may be."""
    choice = allowing("auto", "weather", "free")
    grammar = use(template, tools=STRICT, tool_choice=choice).grammar
    assert grammar is not None
    assert use(template, tools=STRICT, tool_choice=allowing("auto", "free")).grammar is None
    assert use(template).grammar is None
    matcher = server.llm.requests.matchers.matcher(grammar)

    def may_be(text: str) -> bool:
        own, ids = matcher.fork(), server.llm.tokenizer.encode_inside(text)
        return own.read(ids) == len(ids) and own.accepts

    call, others = OF_FORMS[template]
    for name, arguments, right in [
        ("weather", OSLO, True),
        ("weather", OSLO.replace("Oslo", "Bonn"), False),
        ("weather", "{}", False),
        ("free", "{}", True),
        ("free", '{"any": [1]}', True),
        ("free", "[]", False),
        ("never", "{}", False),
    ]:
        assert may_be(call % (name, arguments)) == right, (name, arguments)
    for text, right in others.items():
        assert may_be(text.replace("%s", call % ("weather", OSLO))) == right, text
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
    assert with_tools > without[0] + 20
    counted = server.post("/tokenize", messages=MESSAGES, chat_template=HERMES, tools=TOOLS).json()["count"]
    assert counted == with_tools


def test_refusals_name_their_field(server: Running) -> None:
    body = {"messages": MESSAGES, "chat_template": HERMES, "tools": TOOLS, "max_tokens": 3}
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"chat_template": "{{ messages[0].content }}"}, "tools", "does not show tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format", "leave out one"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"tools": 3}, "tools", "no list of tools"),
        ({"tools": [3]}, "tools", "no list of tools"),
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
