"""Sends one request to every interface, as a whole and as a stream; each answer must be valid by its specification."""

import json
from dataclasses import dataclass, field
from typing import Any

from kit.servers import Running, specification, specification_file
from kit.servers import assert_valid as assert_valid_by_specification

CHOICES = {"auto": "auto", "none": "none", "required": "any"}  # of tools, in Anthropic's words
ENDS = {"max_tokens": "length", "tool_use": "tool_calls", "end_turn": "stop", "stop_sequence": "stop"}
JsonObject = dict[str, Any]


@dataclass
class Reply:
    """An answer's content, its finish reason, and the numbers of tokens of the prompt, the answer and its reasoning.

    Not compared, since not every interface has them: log-probabilities of tokens, and the stop string.
    """

    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    ended: str = ""
    counts: tuple[int, int, int] = (0, 0, 0)
    logprobs: list[JsonObject] = field(default_factory=list, compare=False)
    stop: str | None = field(default=None, compare=False)


def assert_valid(body: object, schema: str) -> None:
    """Assert that a body is valid by the specification, if that is available."""
    if specification_file() is not None:
        assert_valid_by_specification(body, schema)


def flat_format(chat: JsonObject) -> JsonObject:
    """The format of a chat's answer, whose schema has no name of its own."""
    given = chat["response_format"]
    return {"type": given["type"], **given["json_schema"]}


def response_of(chat: JsonObject) -> JsonObject:
    """The body of /v1/responses that asks for what a chat asks for."""
    of_item = ("messages", "max_tokens", "tools", "response_format", "logprobs")
    body = {name: value for name, value in chat.items() if name not in of_item}
    items: list[JsonObject] = []
    for message in chat["messages"]:
        if message["role"] == "tool":
            output = {"output": message["content"], "call_id": message["tool_call_id"]}
            items.append({"type": "function_call_output", **output})
            continue
        if "reasoning_content" in message:
            part = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "summary": [], "content": [part]})
        if message["content"] or not message.get("tool_calls"):
            items.append({"role": message["role"], "content": message["content"]})
        calls = message.get("tool_calls", ())
        items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    if "tools" in chat:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in chat["tools"]]
    if isinstance(choice := chat.get("tool_choice"), dict):
        body["tool_choice"] = {"type": "function", "name": choice["function"]["name"]}
    if "response_format" in chat:
        body["text"] = {"format": flat_format(chat)}
    included = {"include": ["message.output_text.logprobs"]} if "logprobs" in chat else {}
    return body | {"input": items, "max_output_tokens": chat["max_tokens"], "model": "stories"} | included


def message_of(chat: JsonObject) -> JsonObject:
    """The body of /v1/messages so, for a chat without earlier calls."""
    of_item = (
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stop",
        "include_reasoning",
        "response_format",
        "logprobs",
    )
    body = {name: value for name, value in chat.items() if name not in of_item}
    if not chat.get("include_reasoning", True):
        body["thinking"] = {"type": "adaptive", "display": "omitted"}
    if "response_format" in chat:
        body["output_config"] = {"format": flat_format(chat)}
    if "tools" in chat:
        body["tools"] = [
            {"input_schema" if name == "parameters" else name: value for name, value in tool["function"].items()}
            for tool in chat["tools"]
        ]
        choice: Any = chat.get("tool_choice", "auto")
        named = {"type": "tool", "name": choice["function"]["name"]} if isinstance(choice, dict) else {}
        one = {"disable_parallel_tool_use": not chat.get("parallel_tool_calls", True)}
        body["tool_choice"] = (named or {"type": CHOICES[choice]}) | one
    return body | ({"stop_sequences": chat["stop"]} if "stop" in chat else {})


def read_calls(calls: Any) -> tuple[tuple[str, Any], ...]:
    """Calls by their names and arguments, whose ids have to be like those of Mistral's templates, and differ."""
    assert all(len(call["id"]) == 9 for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return tuple((call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls)


def chat_counts(usage: JsonObject) -> tuple[int, int, int]:
    """The counts of an answer to a chat."""
    details = usage.get("completion_tokens_details", {})
    return usage["prompt_tokens"], usage["completion_tokens"], details.get("reasoning_tokens", 0)


def of_chat(answer: JsonObject) -> Reply:
    """What an answer to a chat says."""
    assert_valid(answer, "CreateChatCompletionResponse")
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = read_calls(message.get("tool_calls", ()))
    assert message["content"] is not None or calls
    texts = message.get("reasoning_content") or "", message["content"] or ""
    logprobs = (choice["logprobs"] or {"content": []})["content"]
    counts = chat_counts(answer["usage"])
    return Reply(*texts, calls, choice["finish_reason"], counts, logprobs, choice["stop_reason"])


def of_chunks(chunks: list[JsonObject]) -> Reply:
    """What the stream of a chat adds up to."""
    reply, calls = Reply(), list[JsonObject]()
    for chunk in chunks:
        assert_valid(chunk, "CreateChatCompletionStreamResponse")
        for choice in chunk["choices"]:
            assert not reply.ended
            reply.text += choice["delta"].get("content") or ""
            reply.reasoning += choice["delta"].get("reasoning_content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                assert call["index"] == len(calls)
                calls.append(call)
            reply.ended = choice["finish_reason"] or ""
            reply.logprobs += (choice["logprobs"] or {"content": []})["content"]
            reply.stop = choice.get("stop_reason")
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    reply.calls, reply.counts = read_calls(calls), chat_counts(chunks[-1]["usage"])
    return reply


def of_response(answer: JsonObject) -> Reply:
    """What a response says."""
    assert_valid(answer, "Response")
    items = answer["output"]
    assert len({item["id"] for item in items}) == len(items)
    texts = {"reasoning": "", "message": ""}
    calls = [
        {"id": item["call_id"], "function": {name: item[name] for name in ("name", "arguments")}}
        for item in items
        if item["type"] == "function_call"
    ]
    for item in items:
        if item["type"] in texts:
            texts[item["type"]] += item["content"][0]["text"]
    incomplete, usage = answer["status"] == "incomplete", answer["usage"]
    assert answer["incomplete_details"] == ({"reason": "max_output_tokens"} if incomplete else None)
    assert [item["status"] for item in items if item["type"] != "function_call"][-1:] in (
        [],
        [answer["status"]],
    ) or calls
    counts = usage["input_tokens"], usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"]
    ended = "length" if incomplete else "tool_calls" if calls else "stop"
    parts = [item["content"][0] for item in items if item["type"] == "message"]
    logprobs = [entry for part in parts for entry in part["logprobs"]]
    return Reply(texts["reasoning"], texts["message"], read_calls(calls), ended, counts, logprobs)


def schema_of(kind: str) -> str:
    """The specification's schema of an event, by the event's type."""
    schemas = specification()["components"]["schemas"]
    names = [each["$ref"].rpartition("/")[2] for each in schemas["ResponseStreamEvent"]["anyOf"]]
    (found,) = (name for name in names if schemas[name]["properties"]["type"]["enum"] == [kind])
    return found


def of_response_events(events: list[JsonObject]) -> Reply:
    """What the stream of a response adds up to: the last event has the items that the others opened and filled."""
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    for each in events if specification_file() else ():
        assert_valid(each, schema_of(each["type"]))
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:2] == ["created", "in_progress"]
    last = events[-1]["response"]
    assert kinds[-1] == last["status"]
    for number, item in enumerate(last["output"]):
        of_item = [each for each in events if each.get("output_index") == number]
        names = [each["type"].removeprefix("response.") for each in of_item]
        deltas = [each for each in of_item if each["type"].endswith(".delta")]
        text = "".join(each["delta"] for each in deltas)
        assert (names[0], names[-1], of_item[-1]["item"]) == ("output_item.added", "output_item.done", item)
        assert of_item[0]["item"]["status"] == "in_progress"
        assert {each.get("item_id", item["id"]) for each in of_item} == {item["id"]}
        if item["type"] == "function_call":
            assert names[1:-1] == ["function_call_arguments.delta", "function_call_arguments.done"]
            assert of_item[0]["item"]["arguments"] == ""
            assert text == of_item[2]["arguments"] == item["arguments"]
        else:
            (part,) = item["content"]
            assert names[1] == "content_part.added"
            assert [name.partition(".")[2] for name in names[-3:]] == ["done"] * 3
            assert text == part["text"]
            assert [entry for each in deltas for entry in each.get("logprobs", ())] == part.get("logprobs", [])
    opened = [kind for kind in kinds if kind.startswith("output_item")]
    assert opened == ["output_item.added", "output_item.done"] * len(last["output"])
    return of_response(last)


def of_message(answer: JsonObject) -> Reply:
    """What a message says."""
    blocks, usage = answer["content"], answer["usage"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    assert (answer["stop_sequence"] is None) == (answer["stop_reason"] != "stop_sequence")
    assert {block["type"] for block in blocks} <= {"text", "thinking", "tool_use"}
    counts = usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    return Reply(
        "".join(block.get("thinking", "") for block in blocks),
        "".join(block.get("text", "") for block in blocks),
        tuple((block["name"], block["input"]) for block in calls if block["id"]),
        ENDS[answer["stop_reason"]],
        (*counts, usage["output_tokens_details"]["thinking_tokens"]),
        stop=answer["stop_sequence"],
    )


def of_message_events(events: list[JsonObject]) -> Reply:
    """What the stream of a message adds up to, every event of which must be in its place."""
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
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
        if (text := block.pop("json")) or block["type"] == "tool_use":
            block["input"] = json.loads(text)
    first, last = message["usage"], events[-2]["usage"]
    assert all(first[name] == last[name] for name in first if "input_tokens" in name)
    assert first["output_tokens"] <= last["output_tokens"]
    return of_message({**message, **events[-2]["delta"], "usage": last})


def named_events(server: Running, path: str, body: JsonObject) -> list[JsonObject]:
    """The events of a stream, each of which has its type as its name."""
    answer = server.post(path, **body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    pairs = [block.split("\n") for block in answer.text.split("\n\n") if block]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {each['type']}" for each in events]
    return events


def reply_of(server: Running, chat: JsonObject, response: JsonObject, message: JsonObject) -> Reply:
    """The common answer of all interfaces to equivalent bodies, whole and streamed, drafted and plain."""
    reply = of_chat(server.post("/v1/chat/completions", **chat).json())
    assert of_chat(server.post("/v1/chat/completions", **chat | {"speculation": False}).json()) == reply
    options = {"stream_options": {"include_usage": True}}
    chunks = of_chunks(server.events("/v1/chat/completions", **chat, **options))
    responses = [
        of_response(server.post("/v1/responses", **response).json()),
        of_response_events(named_events(server, "/v1/responses", response)),
    ]
    messages = [
        of_message(server.post("/v1/messages", **message).json()),
        of_message_events(named_events(server, "/v1/messages", message)),
    ]
    assert [chunks, *responses, *messages] == [reply] * 5
    assert (chunks.logprobs, chunks.stop) == (reply.logprobs, reply.stop)
    assert [each.logprobs for each in responses] == [reply.logprobs[reply.counts[2] :]] * 2
    assert [each.stop for each in messages] == [None if reply.ended == "tool_calls" else reply.stop] * 2
    return reply


def reply_everywhere(server: Running, **chat: Any) -> Reply:
    """The common answer of all interfaces to a chat."""
    return reply_of(server, chat, response_of(chat), message_of(chat))
