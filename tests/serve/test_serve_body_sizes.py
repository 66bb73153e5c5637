"""Bodies are read in time linear in their length, and error messages stay short."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from forerun.errors import InvalidRequest
from forerun.sampling.trial import problem_of_trial
from forerun.serve.body import parse_json_body
from forerun.serve.harmony import harmony_messages
from forerun.serve.inputs import input_messages, message_fields
from forerun.serve.parse import prepare
from forerun.serve.problems import ApiError, problem_of
from forerun.serve.schema import KNOWN, Endpoint
from forerun.serve.settings import ServeSettings
from forerun.serve.tools import with_objects
from kit.engines import plain

TRUSTING = ServeSettings(trust_request_templates=True)
LENIENT = ServeSettings(lenient=True, trust_request_templates=True)

MESSAGES = [{"role": "user", "content": "Hi"}]
BASES: dict[Endpoint, dict[str, Any]] = {
    "completions": {"prompt": "Once"},
    "chat": {"messages": MESSAGES, "chat_template": "{{ messages[0].content }}{{ tools }}<tool_call></tool_call>"},
    "responses": {"input": "Hi", "chat_template": "{{ messages[0].content }}"},
    "messages": {"messages": MESSAGES, "max_tokens": 1, "chat_template": "{{ messages[0].content }}"},
}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
SHAPES: Mapping[str, Callable[[int], Any]] = {  # values of about so many bytes
    "text": lambda n: "x" * n,
    "numbers": lambda n: list(range(n // 7)),
    "texts": lambda n: [f"w{i}" for i in range(n // 9)],
    "objects": lambda n: [{}] * (n // 3),
    "lists": lambda n: [[[1]]] * (n // 8),
    "members": lambda n: {f"k{i}": 1 for i in range(n // 11)},
    "ids": lambda n: {str(i << 40): 1 for i in range(n // 20)},
    "messages": lambda n: MESSAGES * (n // 32),
    "parts": lambda n: [{"role": "user", "content": [{"type": "text", "text": "a"}] * (n // 32)}],
    "calls": lambda n: [{"role": "assistant", "content": "", "tool_calls": [CALL] * (n // 70)}],
    "arguments": lambda n: [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[" * n}}]}
    ],
    "items": lambda n: [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}] * (n // 60),
    "tools": lambda n: [{"type": "function", "function": {"name": f"f{i}"}} for i in range(n // 50)],
    "schema": lambda n: {"type": "json_object", "schema": {"enum": [f"k{i}" for i in range(n // 8)]}},
    "choice": lambda n: {"choice": [f"k{i}" for i in range(n // 8)]},
    "tree": lambda n: {"tree": [[i] for i in range(n // 6)]},
}
QUICK = ("text", "members", "messages")
LIMIT_S = 1.0  # of processor time for 100 KB; what is quadratic takes several seconds


def asked(body: str, endpoint: Endpoint, lenient: bool) -> tuple[float, str]:
    """The processor time in seconds that this thread takes to read a body, and the error message, if any."""
    raw, began_s = body.encode(), time.thread_time()
    try:
        prepare(parse_json_body(raw), endpoint, plain(), "", LENIENT if lenient else TRUSTING)
        problem = ""
    except (InvalidRequest, ApiError) as error:
        problem = json.dumps(problem_of(error).body)
    return time.thread_time() - began_s, problem


@pytest.fixture(autouse=True, scope="module")
def each_grammar_is_tried_once() -> Iterator[None]:
    """All interfaces take the same grammars, and to try a long one takes seconds."""
    problems = dict[str, str | None]()

    def problem(source: str, *others: Any) -> str | None:
        if source not in problems:
            problems[source] = problem_of_trial(source, *others)
        return problems[source]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.sampling.matcher.problem_of_trial", problem)
        yield


def assert_quick(endpoint: Endpoint, shapes: Mapping[str, Callable[[int], Any]], lenient: bool) -> None:
    for kind, shape in shapes.items():
        value = json.dumps(shape(100_000))  # once for all fields: that takes longer than reading it
        for name in [*KNOWN[endpoint], "a_name_that_is_not_there"]:
            others = {key: each for key, each in BASES[endpoint].items() if key != name}
            body = json.dumps(others | {name: None}).removesuffix("null}") + value + "}"
            taken_s, problem = asked(body, endpoint, lenient)
            if taken_s > LIMIT_S:  # a collection of garbage, or a machine that paused
                taken_s, _ = asked(body, endpoint, lenient)
            assert taken_s < LIMIT_S, (name, kind)
            assert len(problem) < 1500, (name, kind)


@pytest.mark.parametrize("endpoint", BASES)
def test_no_field_takes_long_or_is_repeated_in_full(endpoint: Endpoint) -> None:
    assert_quick(endpoint, {kind: SHAPES[kind] for kind in QUICK}, lenient=False)


@pytest.mark.full
@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("endpoint", BASES)
def test_no_field_takes_long_or_is_repeated_in_full_in_any_shape(endpoint: Endpoint, kind: str, lenient: bool) -> None:
    assert_quick(endpoint, {kind: SHAPES[kind]}, lenient)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("{" + ",".join(f'"a{i}":0' for i in range(32_000)) + ',"a31999":1}', "invalid_json"),
        ("{" + ",".join(f'"a{i}":0' for i in range(32_000)) + "}", "unknown_parameter"),
        ('{"prompt":[' + ",".join('{"a":1,"a":1}' for _ in range(20_000)) + "]}", "invalid_json"),
        ('{"' + "a" * 400_000 + '":1}', "unknown_parameter"),
        ('{"' + "temperature" * 40_000 + '":1}', "unknown_parameter"),
        ('{"stream_options":{"' + "a" * 400_000 + '":1},"prompt":"a"}', "unknown_parameter"),
        ('{"prompt":"a","n":' + "9" * 4300 + "}", "invalid_value"),
        ('{"prompt":"a","model":"' + "9" * 400_000 + '"}', ""),
        ("[" * 400_000, "invalid_json"),
        ('{"a":' * 100_000, "invalid_json"),
        ('"' + "\\u0000" * 60_000 + '"', "invalid_json"),
    ],
    ids=range(11),
)
def test_a_long_body_is_refused_quickly_with_a_short_message(raw: str, code: str) -> None:
    began_s = time.thread_time()
    try:
        prepare(parse_json_body(raw.encode()), "completions", plain(), "", TRUSTING)
        body: dict[str, Any] = {"error": {"code": ""}}
    except (InvalidRequest, ApiError) as error:
        body = problem_of(error).body
    assert time.thread_time() - began_s < LIMIT_S
    assert body["error"]["code"] == code
    assert len(json.dumps(body)) < 1500


LONG_TEMPLATE = "{{ messages[0].content }}{{ tools }}{# " + "a long one. " * 5_000 + " #}"
OF_CHATS: Mapping[str, Mapping[str, Any]] = {
    "names": {"messages": [{"role": "user", "content": "Hi"} | {f"name_{i}": 1 for i in range(50_000)}]},
    "functions": {
        "tools": [{"type": "function", "function": {"name": "f" * 400_000}}],
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    },
}


@pytest.mark.parametrize("kind", OF_CHATS)
def test_a_long_chat_is_refused_quickly_with_a_short_message(kind: str) -> None:
    body = {**BASES["chat"], "chat_template": LONG_TEMPLATE, **OF_CHATS[kind]}
    taken_s, problem = asked(json.dumps(body), "chat", lenient=False)
    assert taken_s < LIMIT_S
    assert 0 < len(problem) < 1500


def test_the_log_names_only_a_few_of_many_unknown_fields(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "Once", "temperatur": 1, "stop": "x"} | {f"temperature{i}": 1 for i in range(40_000)}
    with caplog.at_level(logging.WARNING, "forerun.serve"):
        taken_s, problem = asked(json.dumps(body), "completions", lenient=True)
    assert (problem, taken_s < LIMIT_S) == ("", True)
    (record,) = caplog.records
    assert "did you mean 'temperature'?" in record.getMessage()
    assert "39996 more names" in record.getMessage()
    assert len(record.getMessage()) < 1000


def test_lenient_mode_applies_to_fields_inside_objects(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "extra": 1}], "other": 2}],
        "chat_template": "{{ messages[0].content }}{{ messages[0].read_by_template }}",
        "response_format": {"type": "json_object", "schema": schema, "strictly": True},
        "stream": True,
        "stream_options": {"include_usage": True, "include_costs": True},
    }
    with caplog.at_level(logging.WARNING, "forerun.serve"):
        prepared, answers = prepare(body, "chat", plain(), "", LENIENT)
    assert prepared.include_usage
    assert answers.sequences[0].params.grammar is not None
    for name in ("extra", "other", "strictly", "include_costs"):
        assert f'"{name}"' in caplog.text.replace("'", '"')
    known: dict[str, Any] = {"role": "user", "content": "Hi", "read_by_template": "!"}
    _, answers = prepare(
        {**BASES["chat"], "chat_template": body["chat_template"], "messages": [known]}, "chat", plain(), "", TRUSTING
    )
    assert answers.requests[0][0].prompt == "Hi!"


def talk(role: str, content: object) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def calls(n: int) -> list[Any]:
    return [CALL | {"id": f"c{i}"} for i in range(n)]


def results(n: int) -> list[Any]:
    return [{"role": "tool", "content": "", "tool_call_id": f"c{n - i}"} for i in range(n)]


CONVERSIONS: Mapping[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    "neighbours": (message_fields, lambda n: {"messages": talk("user", "a")["messages"] * n}),
    "blocks": (message_fields, lambda n: talk("user", [{"type": "text", "text": "a"}] * n)),
    "uses": (message_fields, lambda n: talk("assistant", [{"type": "tool_use", "name": "f"}] * n)),
    "thoughts": (message_fields, lambda n: talk("assistant", [{"type": "thinking", "thinking": "a"}] * n)),
    "items": (input_messages, lambda n: {"input": SHAPES["items"](60 * n)}),
    "reasoning": (input_messages, lambda n: {"input": [{"type": "reasoning", "content": []}] * n}),
    "arguments": (with_objects, lambda n: [{"role": "assistant", "content": "", "tool_calls": calls(n)}]),
    "Harmony": (
        harmony_messages,
        lambda n: [{"role": "assistant", "content": "", "tool_calls": calls(n)}, *results(n)],
    ),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_conversations_are_converted_in_linear_time(kind: str) -> None:
    convert, make = CONVERSIONS[kind]

    def taken_s(n: int) -> float:
        value = make(n)
        began_s = time.thread_time()
        convert(value)
        return time.thread_time() - began_s

    small, large = (min(taken_s(n) for _ in range(2)) for n in (4_000, 32_000))
    assert large < 0.2 or large < 20 * small  # eight times as much work, if it is linear; 64 if it is quadratic
