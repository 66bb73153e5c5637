"""/v1/responses: whole and streamed by OpenAI's own client, valid by its specification, and the same as a chat."""

import json
from typing import Any, Literal

import pydantic
import pytest

from forerun.serve import parts
from forerun.serve.inputs import input_messages
from forerun.serve.parts import ReasoningTags
from forerun.serve.problems import ApiError
from kit.servers import TEMPLATE, Running, assert_valid, serving, specification

PLAIN = "{{ messages | map(attribute='content') | join(' ') }}"
REASONS = PLAIN + "{# named #}"  # a template with the tag that ends reasoning, for `thinking`
ASKED: dict[str, Any] = {"model": "stories", "input": "Once upon a time", "temperature": 0, "max_output_tokens": 40}
EXTRA = "extra_body"
server = serving()


@pytest.fixture
def thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that end in "time" open reasoning that ends with the word "named"."""
    monkeypatch.setattr(parts, "TAGS", (ReasoningTags("time", "named"),))


def schema_of(kind: str) -> str:
    """The specification's schema of an event, by the event's type."""
    schemas = specification()["components"]["schemas"]
    names = [each["$ref"].rpartition("/")[2] for each in schemas["ResponseStreamEvent"]["anyOf"]]
    (found,) = (name for name in names if schemas[name]["properties"]["type"]["enum"] == [kind])
    return found


def test_a_response_is_the_answer_of_a_chat_and_valid(server: Running) -> None:
    body = {**ASKED, "instructions": "Lily had a cat.", "seed": 3, "temperature": 1.2, "metadata": {"a": "b"}}
    found = server.post("/v1/responses", **body, chat_template=TEMPLATE).json()
    assert_valid(found, "Response")
    messages = [{"role": "system", "content": "Lily had a cat."}, {"role": "user", "content": ASKED["input"]}]
    chat = server.post(
        "/v1/chat/completions", messages=messages, chat_template=TEMPLATE, seed=3, temperature=1.2, max_tokens=40
    ).json()
    (item,) = found["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (found["instructions"], found["metadata"], found["temperature"]) == ("Lily had a cat.", {"a": "b"}, 1.2)
    usage = found["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (chat["usage"]["prompt_tokens"], 40)
    assert usage["speculation"]["num_drafted"] > 0
    assert (found["seed"], found["system_fingerprint"]) == (3, chat["system_fingerprint"])


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
    logprobs = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert logprobs == last.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert len(logprobs or ()) == whole.usage.output_tokens


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("more", [{}, {"top_logprobs": 2}, {"include_reasoning": False}], ids=str)
def test_every_event_is_what_the_specification_says(server: Running, more: dict[str, Any]) -> None:
    body = {**ASKED, **more, "chat_template": REASONS}
    answer = server.post("/v1/responses", **body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.split("\n\n") if block]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {each['type']}" for each in events]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    for each in events:
        assert_valid(each, schema_of(each["type"]))
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    whole = server.post("/v1/responses", **body).json()
    assert_valid(whole, "Response")
    last = events[-1]["response"]
    assert [item["content"] for item in last["output"]] == [item["content"] for item in whole["output"]]
    items = ["reasoning", "message"] if more.get("include_reasoning", True) else ["message"]
    assert [item["type"] for item in whole["output"]] == items
    for number, item in enumerate(last["output"]):
        (part,) = item["content"]
        deltas = [each for each in events if each["type"].endswith(".delta") and each["output_index"] == number]
        assert "".join(each["delta"] for each in deltas) == part["text"] != ""
        assert {each["item_id"] for each in deltas} == {item["id"]}
        if "logprobs" in part:
            assert [entry for each in deltas for entry in each["logprobs"]] == part["logprobs"]
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < 40
    if "top_logprobs" in more:
        logprobs = whole["output"][1]["content"][0]["logprobs"]
        assert len(logprobs) == 40 - whole["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}


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


def test_what_a_response_said_may_be_its_own_input(server: Running) -> None:
    client, extra = server.client(), {"chat_template": PLAIN}
    first = client.responses.create(**ASKED, extra_body=extra)
    again = client.responses.create(
        **{**ASKED, "input": [{"role": "user", "content": ASKED["input"]}, *first.output]}, extra_body=extra
    )
    assert again.usage is not None
    assert first.usage is not None
    assert again.usage.input_tokens > first.usage.input_tokens + 20


def test_a_stream_that_fails_says_so_in_its_last_event(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
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


class Person(pydantic.BaseModel, extra="forbid"):
    color: Literal["red", "green"]
    alive: bool


def test_openais_client_parses_the_form_that_it_asked_for(server: Running) -> None:
    asked: dict[str, Any] = {**ASKED, "max_output_tokens": 200, EXTRA: {"chat_template": PLAIN, "seed": 2}}
    found = server.client().responses.parse(**asked, text_format=Person)
    assert isinstance(found.output_parsed, Person)
    assert Person.model_validate_json(found.output_text) == found.output_parsed
    body = {**ASKED, "max_output_tokens": 200, "chat_template": PLAIN, "seed": 2}
    form = {"type": "json_schema", "name": "Person", "schema": Person.model_json_schema(), "strict": True}
    whole = server.post("/v1/responses", **body, text={"format": form}).json()
    assert_valid(whole, "Response")
    assert whole["text"]["format"] == form
    assert Person.model_validate_json(whole["output"][0]["content"][0]["text"])
