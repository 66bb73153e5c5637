"""/v1/responses: whole and streamed by OpenAI's own client, valid by its specification, and the same as a chat."""

import json
from typing import Any

import pytest

from forerun.serve.inputs import input_messages
from forerun.serve.problems import ApiError
from kit.servers import Running, serving
from serve.call_templates import HERMES
from serve.replies import assert_valid, named_events, of_response_events
from serve.test_serve_tools import TOOLS

PLAIN = "{{ messages | map(attribute='content') | join(' ') }}"
ASKED: dict[str, Any] = {"model": "stories", "input": "Once upon a time", "temperature": 0, "max_output_tokens": 40}
FLAT: list[Any] = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
WEATHER: Any = {"type": "function", "name": "weather"}
CALLING: dict[str, Any] = {"model": "stories", "input": "Hi", "tools": FLAT, "max_output_tokens": 400}
server = serving()


def test_a_response_echoes_its_request(server: Running) -> None:
    body = {**ASKED, "instructions": "Lily had a cat.", "seed": 3, "temperature": 1.2, "metadata": {"a": "b"}}
    form = {"type": "json_schema", "name": "colour", "schema": {"enum": ["red"]}, "strict": True}
    tools = {"tool_choice": WEATHER, "tools": [{"parameters": None, **tool} for tool in FLAT]}
    for more, echoed in (({"text": {"format": form}}, {"text": {"format": form}}), (tools | {"tools": FLAT}, tools)):
        found = server.post("/v1/responses", **body, **more, chat_template=HERMES).json()
        assert_valid(found, "Response")
        same = {name: found[name] for name in ("instructions", "seed", "temperature", "metadata", *echoed)}
        assert same == {name: body[name] for name in same.keys() & body.keys()} | echoed
        assert found["system_fingerprint"] == server.llm.fingerprint
        assert found["usage"]["speculation"]["num_rounds"] > 0


def test_openai_s_client_reads_it_whole_and_streamed(server: Running) -> None:
    client, extra = server.client(), {"chat_template": PLAIN, "stop": ["play"]}
    whole = client.responses.create(**ASKED, extra_body=extra, include=["message.output_text.logprobs"])
    assert whole.status == "completed"
    assert whole.error is None
    with client.responses.stream(**ASKED, extra_body=extra, include=["message.output_text.logprobs"]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        last = stream.get_final_response()
    assert text == whole.output_text == last.output_text != ""
    assert whole.usage is not None
    logprobs = whole.output[0].content[0].logprobs
    assert logprobs == last.output[0].content[0].logprobs
    assert len(logprobs or ()) == whole.usage.output_tokens


def test_log_probabilities_of_a_stream_are_those_of_the_tokens(server: Running) -> None:
    body = {**ASKED, "chat_template": PLAIN, "top_logprobs": 2}
    events = named_events(server, "/v1/responses", body)
    reply = of_response_events(events)
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == reply.text
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2] * reply.counts[1]


ITEMS: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}],
    },
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
    {"type": "function_call", "call_id": "2", "name": "g"},
    {"type": "function_call_output", "call_id": "1", "output": "7"},
    {"role": "assistant", "content": "d"},
    {"role": "assistant", "content": "e"},
    {"type": "reasoning", "summary": []},
]


def test_items_become_messages_as_templates_know_them() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    assert input_messages({"instructions": "Hi.", "input": ITEMS}) == [
        {"role": "system", "content": "Hi."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "reasoning_content": "hm", "content": "c", "tool_calls": calls},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "reasoning_content": "", "content": ""},
    ]


def test_the_output_of_a_response_may_be_the_next_input(server: Running) -> None:
    client, extra = server.client(), {"chat_template": PLAIN}
    first = client.responses.create(**ASKED, extra_body=extra)
    again = client.responses.create(
        **{**ASKED, "input": [{"role": "user", "content": ASKED["input"]}, *first.output]}, extra_body=extra
    )
    assert again.usage is not None
    assert first.usage is not None
    assert again.usage.input_tokens > first.usage.input_tokens + 20


def test_a_failed_stream_ends_with_an_error_event(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.serve.responses import ResponseWriter

    honest = ResponseWriter.take

    def broken(writer: ResponseWriter, delta: Any) -> Any:
        if writer.items and len(writer.items[0].text) > 10:
            raise ApiError(504, "it took too long.", code="took_too_long")
        return honest(writer, delta)

    monkeypatch.setattr(ResponseWriter, "take", broken)
    answer = server.post("/v1/responses", **ASKED, chat_template=PLAIN, stream=True)
    last = json.loads(answer.text.strip().rpartition("data: ")[2])
    assert_valid(last, "ResponseFailedEvent")
    assert last["response"]["error"] == {"code": "server_error", "message": "it took too long."}
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


def test_openais_client_calls_answers_and_asks_again(server: Running) -> None:
    client, extra = server.client(), {"chat_template": HERMES, "seed": 2}
    must: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    whole = client.responses.create(**CALLING, **must, extra_body=extra)
    calls = [item for item in whole.output if item.type == "function_call"]
    assert len(calls) == len(whole.output) == 1
    with client.responses.stream(**CALLING, **must, extra_body=extra) as stream:
        for event in stream:
            assert event.type != "error"
        last = stream.get_final_response()
    assert [(c.name, c.arguments) for c in last.output] == [(c.name, c.arguments) for c in calls]
    given = [{"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."} for call in calls]
    asked = {**CALLING, "input": [{"role": "user", "content": "Hi"}, *whole.output, *given], "max_output_tokens": 12}
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
    body = {**CALLING, "chat_template": HERMES, "parallel_tool_calls": False}
    lengths = set()
    for choice in ("required", one):
        found = server.post("/v1/responses", **body, tool_choice=choice, seed=1).json()
        assert_valid(found, "Response")
        names = {item["name"] for item in found["output"]}
        lengths.add(found["usage"]["input_tokens"])
    assert names == {'say "hi"'}
    assert len(lengths) == 1
