"""Anthropic's /v1/messages: ids, keys and errors as its clients read them, and what clients know of other servers."""

from pathlib import Path
from typing import Any

from forerun.serve.inputs import message_fields
from kit.servers import TEMPLATE, Running, drafting, running, serving

THINKS = "{{ messages[0].content }}{% if add_generation_prompt %}<think>{% endif %}{# until </think> #}"
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


def test_an_answer_has_the_id_that_anthropics_client_reads(server: Running) -> None:
    answer = server.post("/v1/messages", **BODY)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_null_counts_as_a_missing_field() -> None:
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


def test_endpoints_of_other_servers_are_refused_with_the_alternative(server: Running) -> None:
    answer = server.post("/v1/embeddings", input="x", model="stories")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_route")
    assert "has no embeddings" in answer.json()["error"]["message"]


def test_a_client_can_render_chats_by_itself(server: Running) -> None:
    with server.http() as http:
        info = http.get("/tokenizer_info").json()
    tokenizer = server.llm.tokenizer
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert (info["chat_template"], info["model_max_length"]) == (None, 512)
