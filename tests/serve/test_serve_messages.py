"""Anthropic's /v1/messages: the answers of chats in other words, whole and streamed, and errors as clients read it."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.serve.inputs import message_fields
from kit.servers import TEMPLATE, Running, drafting, running, serving

THINKS = "{{ messages[0].content }}{% if add_generation_prompt %}<think>{% endif %}{# until </think> #}"
HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}{% endfor %}"
)
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
HI: list[Any] = [{"role": "user", "content": "Once upon a time"}]
BODY: dict[str, Any] = {"messages": HI, "max_tokens": 12, "seed": 3, "chat_template": TEMPLATE}
server = serving()


def whole(server: Running, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/messages", **BODY | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(server: Running, **fields: Any) -> dict[str, Any]:
    """The message that a stream adds up to, every event of which must be in its place."""
    with server.http() as http, http.stream("POST", "/v1/messages", json={**BODY, **fields, "stream": True}) as lines:
        assert lines.status_code == 200
        pairs = [line.partition(": ")[::2] for line in lines.iter_lines() if line]
    return added_up(pairs)


def added_up(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """The message that events add up to, as names and values of their lines."""
    names = [value for name, value in pairs if name == "event"]
    events = [json.loads(value) for name, value in pairs if name == "data"]
    assert [event["type"] for event in events] == names
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    message, is_open = events[0]["message"], False
    assert message["content"] == []
    for event in events[1:-2]:
        kind, begins = event["type"].removeprefix("content_block_"), event["type"] == "content_block_start"
        assert (is_open, event["index"]) == (not begins, len(message["content"]) - (not begins))
        is_open = kind != "stop"
        if begins:
            message["content"].append({**event["content_block"], "json": ""})
        elif kind == "delta":
            delta, block = event["delta"], message["content"][-1]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            else:
                assert delta["type"] == f"{block['type']}_delta"
                block[block["type"]] += delta[block["type"]]
        else:
            assert kind == "stop"
    assert not is_open
    for block in message["content"]:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    first, last = message["usage"], events[-2]["usage"]
    assert all(first[name] == last[name] for name in first if "input_tokens" in name)
    assert first["output_tokens"] <= last["output_tokens"]
    return {**message, **events[-2]["delta"], "usage": last}


def timeless(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs between two answers to one body."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = {name: value for name, value in message["usage"].items() if "cache" not in name and name != "speculation"}
    usage["input_tokens"] += message["usage"]["cache_read_input_tokens"]
    return {**message, "id": "", "content": blocks, "usage": usage}


def test_an_answer_has_the_id_that_anthropics_client_reads(server: Running) -> None:
    answer = server.post("/v1/messages", **BODY)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_stop_sequence_ends_and_is_named(server: Running) -> None:
    text = whole(server, temperature=0, max_tokens=40)["content"][0]["text"]
    stop = text[10:14]
    for message in (ask(server, temperature=0, max_tokens=40, stop_sequences=[stop]) for ask in (whole, streamed)):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
        assert message["content"][0]["text"] == text[: text.index(stop)]


def test_a_tool_is_used_and_its_result_read(server: Running) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install -e '.[dev]'")
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields = {"tools": [WEATHER], "tool_choice": choice, "chat_template": HERMES, "max_tokens": 200}
    for message in (whole(server, **fields), streamed(server, **fields)):
        assert message["stop_reason"] == "tool_use"
        for block in message["content"]:
            assert (block["type"], block["name"]) == ("tool_use", "weather")
            assert block["input"] in ({"city": "Rome"}, {"city": "Oslo"})
            assert block["id"]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "Sun"} for block in message["content"]]
    talk = [*HI, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
    again = whole(server, **fields | {"messages": talk, "tool_choice": {"type": "tool", "name": "weather"}})
    assert [block["name"] for block in again["content"]] == ["weather"]


def test_null_is_as_good_as_nothing() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": None}
    chat = message_fields({"messages": HI, "tools": [WEATHER | {"type": None, "strict": None}], "tool_choice": choice})
    assert chat == message_fields({"messages": HI, "tools": [WEATHER], "tool_choice": {"type": "auto"}})


def test_other_errors_have_their_own_types(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice k-1\n")
    with drafting() as llm, running(llm, api_keys=keys, max_body_bytes=2000) as server, server.http() as http:
        for headers, status, kind in (
            ({}, 401, "authentication_error"),
            ({"x-api-key": "no"}, 401, "authentication_error"),
            ({"x-api-key": "k-1"}, 200, None),
            ({"Authorization": "Bearer k-1"}, 200, None),
        ):
            answer = http.post("/v1/messages", json=BODY, headers=headers)
            assert (answer.status_code, answer.json().get("error", {}).get("type")) == (status, kind)
        key = {"x-api-key": "k-1"}
        other = http.post("/v1/messages", json={**BODY, "model": "claude"}, headers=key)
        assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
        long = http.post("/v1/messages", json={**BODY, "system": "x" * 3000}, headers=key)
        assert (long.status_code, long.json()["error"]["type"]) == (413, "request_too_large")


def test_a_format_holds(server: Running) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install -e '.[dev]'")
    form = {"type": "json_schema", "schema": {"enum": ["red", "green"]}}
    for ask in (whole, streamed):
        message = ask(server, output_config={"format": form}, max_tokens=60)
        assert json.loads(message["content"][0]["text"]) in ("red", "green")


def test_what_other_servers_have_is_refused_with_what_to_do(server: Running) -> None:
    answer = server.post("/v1/embeddings", input="x", model="stories")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_route")
    assert "has no embeddings" in answer.json()["error"]["message"]


def test_a_client_can_render_chats_by_itself(server: Running) -> None:
    with server.http() as http:
        info = http.get("/tokenizer_info").json()
    tokenizer = server.llm.tokenizer
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert (info["chat_template"], info["model_max_length"]) == (None, 512)
