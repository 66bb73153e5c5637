"""Tools in /v1/responses: the calls of a chat as items and events of OpenAI's specification, and back as input."""

from typing import Any

import pytest

from kit.servers import Running, assert_valid, serving
from serve.call_templates import HERMES, LLAMA
from serve.test_serve_responses import schema_of
from serve.test_serve_tools import CALL, TOOLS, check

FLAT: list[Any] = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
WEATHER: Any = {"type": "function", "name": "weather"}
ASKED: dict[str, Any] = {"model": "stories", "input": "Hi", "tools": FLAT, "max_output_tokens": 400}
FORM = CALL.replace("Rome", "(Rome|Oslo)").replace('{"', r"\{\"").replace('"}}', r"\"\}\}")
BODIES: list[tuple[dict[str, Any], list[str]]] = [
    ({"tool_choice": "required", "parallel_tool_calls": False}, ["function_call"]),
    ({"tool_choice": WEATHER, "chat_template": LLAMA}, ["function_call"]),
    ({"structured_outputs": {"regex": rf"Well\. {FORM}\n{FORM} So\."}}, ["message", *["function_call"] * 2, "message"]),
    ({"max_output_tokens": 12}, ["message"]),
]
server = serving()


def told(item: dict[str, Any]) -> Any:
    """What an item says, without its ids."""
    own = item["content"] if item["type"] == "message" else (item["name"], item["arguments"])
    return item["type"], item["status"], own


@pytest.mark.short("*'required'*", "*'max_output_tokens'*")
@pytest.mark.parametrize(("body", "kinds"), BODIES, ids=lambda value: str(value)[:40])
def test_the_calls_of_a_response_are_those_of_a_chat_and_valid(
    server: Running, body: dict[str, Any], kinds: list[str]
) -> None:
    asked = {**ASKED, "chat_template": HERMES, "seed": 4, **body}
    whole = server.post("/v1/responses", **asked).json()
    assert_valid(whole, "Response")
    assert [item["type"] for item in whole["output"]] == kinds, whole
    assert (whole["tools"], whole["tool_choice"]) == (FLAT_TOLD, body.get("tool_choice", "auto"))
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    chat = {"tools": TOOLS, "messages": [{"role": "user", "content": "Hi"}], "chat_template": HERMES, "seed": 4, **body}
    chat["max_tokens"] = chat.pop("max_output_tokens", 400)
    if body.get("tool_choice") == WEATHER:
        chat["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    said = server.post("/v1/chat/completions", **chat).json()["choices"][0]["message"]
    of_chat = [(call["function"]["name"], call["function"]["arguments"]) for call in said.get("tool_calls", [])]
    assert [(item["name"], item["arguments"]) for item in calls] == of_chat
    text = "".join(item["content"][0]["text"] for item in whole["output"] if item["type"] == "message")
    assert text == (said["content"] or "")
    assert whole["status"] == ("incomplete" if "max_output_tokens" in body else "completed")
    assert len({item["call_id"] for item in calls} | {item["id"] for item in whole["output"]}) == len(calls + kinds)


FLAT_TOLD = [{"parameters": None, **tool} for tool in FLAT]


@pytest.mark.parametrize(("body", "kinds"), BODIES[::2], ids=lambda value: str(value)[:40])
def test_every_event_of_a_call_is_what_the_specification_says(
    server: Running, body: dict[str, Any], kinds: list[str]
) -> None:
    asked = {**ASKED, "chat_template": HERMES, "seed": 7, **body}
    whole = server.post("/v1/responses", **asked).json()
    events = server.events("/v1/responses", **asked)
    for each in events:
        assert_valid(each, schema_of(each["type"]))
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert [told(item) for item in last["output"]] == [told(item) for item in whole["output"]]
    for number, item in enumerate(last["output"]):
        own = [each for each in events if each.get("output_index") == number]
        names = [each["type"].removeprefix("response.") for each in own]
        assert (names[0], names[-1]) == ("output_item.added", "output_item.done")
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1]["item"] == item
        said = "".join(each["delta"] for each in own if each["type"].endswith(".delta"))
        if item["type"] == "function_call":
            assert names[1:-1] == ["function_call_arguments.delta", "function_call_arguments.done"]
            assert own[0]["item"]["arguments"] == ""
            assert said == own[2]["arguments"] == item["arguments"]
        else:
            assert said == item["content"][0]["text"] != ""
    opened = [each["type"] for each in events if each["type"].startswith("response.output_item")]
    assert opened == ["response.output_item.added", "response.output_item.done"] * len(kinds)


def test_openais_client_calls_answers_and_asks_again(server: Running) -> None:
    client, extra = server.client(), {"chat_template": HERMES, "seed": 2}
    must: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    whole = client.responses.create(**ASKED, **must, extra_body=extra)
    calls = [item for item in whole.output if item.type == "function_call"]
    assert len(calls) == len(whole.output) == 1
    for call in calls:
        check(call.name, call.arguments)
    with client.responses.stream(**ASKED, **must, extra_body=extra) as stream:
        for event in stream:
            assert event.type != "error"
        last = stream.get_final_response()
    assert [(c.name, c.arguments) for c in last.output] == [(c.name, c.arguments) for c in calls]
    given = [{"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."} for call in calls]
    asked = {**ASKED, "input": [{"role": "user", "content": "Hi"}, *whole.output, *given], "max_output_tokens": 12}
    again = client.responses.create(**asked, extra_body=extra)
    of_chat = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    messages: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": of_chat},
        *({"role": "tool", "tool_call_id": call.call_id, "content": "It is sunny."} for call in calls),
    ]
    chat = client.chat.completions.create(
        model="stories", messages=messages, tools=TOOLS, max_tokens=12, extra_body=extra
    )
    assert again.output_text == chat.choices[0].message.content != ""
    assert again.usage.input_tokens == chat.usage.prompt_tokens


def test_only_allowed_tools_are_called_and_all_are_shown(server: Running) -> None:
    one = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": 'say "hi"'}]}
    body = {**ASKED, "chat_template": HERMES, "parallel_tool_calls": False}
    lengths = set()
    for choice in ("required", one):
        found = server.post("/v1/responses", **body, tool_choice=choice, seed=1).json()
        assert_valid(found, "Response")
        names = {item["name"] for item in found["output"]}
        lengths.add(found["usage"]["input_tokens"])
    assert names == {'say "hi"'}
    assert len(lengths) == 1
