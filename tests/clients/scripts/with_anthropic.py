"""Anthropic's client: messages, whole and streamed, with tools, forms and counts of tokens."""

import anthropic
from checks import (
    FORECAST,
    KEY,
    MESSAGES,
    MODEL,
    PATIENCE_S,
    SERVER,
    TEXT,
    TOO_LONG,
    check,
    equal,
    is_forecast,
    plain_chat,
    raises,
    run_checks,
)

SERVED = {"base_url": SERVER, "max_retries": 0, "timeout": PATIENCE_S}
client = anthropic.Anthropic(api_key=KEY, **SERVED)
# The client has no names for what some models of Anthropic's do not take any more.
BODY = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "extra_body": {"temperature": 0}}
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": FORECAST}
CALLING = {**BODY, "max_tokens": 300, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}


@check("messages: the text of a plain chat, with usage")
def messages():
    answer = client.messages.create(**BODY)
    equal(answer.content[0].text, plain_chat(temperature=0))
    equal((answer.type, answer.role, answer.stop_reason), ("message", "assistant", "max_tokens"))
    equal(answer.usage.output_tokens, 24)


@check("messages: a system prompt, blocks, stop sequences, metadata")
def options():
    blocks = [{"role": "user", "content": [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]}]
    body = {**BODY, "messages": blocks, "metadata": {"user_id": "me"}}
    message = client.messages.create(**body, system=[{"type": "text", "text": "Be brief."}])
    expected = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    equal(message.content[0].text, plain_chat(messages=expected, temperature=0))
    stopped = client.messages.create(**body, stop_sequences=["\n"])
    equal((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", "\n"))


@check("messages: a stream of events")
def streams():
    with client.messages.stream(**BODY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    equal(kinds[0], "message_start")
    equal(kinds[-1], "message_stop")
    assert {"content_block_start", "content_block_delta", "content_block_stop", "message_delta"} <= set(kinds), kinds
    equal(final.content[0].text, plain_chat(temperature=0))
    equal(final.usage.output_tokens, 24)
    events = list(client.messages.create(**BODY, stream=True))
    equal(events[-1].type, "message_stop")


@check("messages: asynchronous")
async def asynchronous():
    async with anthropic.AsyncAnthropic(api_key=KEY, **SERVED) as other, other.messages.stream(**BODY) as stream:
        text = "".join([piece async for piece in stream.text_stream])
    equal(text, plain_chat(temperature=0))


@check("tools: a call, whole and streamed, and its result")
def tools():
    answer = client.messages.create(**CALLING)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    equal((call.name, answer.stop_reason), ("weather", "tool_use"))
    is_forecast(call.input)
    with client.messages.stream(**CALLING) as stream:
        (streamed,) = (block for block in stream.get_final_message().content if block.type == "tool_use")
    is_forecast(streamed.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    talk = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**BODY, "messages": talk}, tools=[TOOL]).content


@check("an output of a form")
def forms():
    config = {"format": {"type": "json_schema", "schema": FORECAST}}
    is_forecast(client.messages.create(**{**BODY, "max_tokens": 300}, output_config=config).content[0].text)


@check("an answer that goes on from its beginning")
def prefill():
    begun = {"role": "assistant", "content": "class Stack:"}
    assert client.messages.create(**{**BODY, "messages": [*MESSAGES, begun]}).content[0].text


@check("counts of tokens")
def counts():
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    equal(counted, client.messages.create(**BODY).usage.input_tokens)


@check("the key as x-api-key, as older clients send it")
def older_key():
    headers = {"x-api-key": KEY, "Authorization": anthropic.Omit(), "anthropic-version": "2023-06-01"}
    assert anthropic.Anthropic(api_key=KEY, default_headers=headers, **SERVED).messages.create(**BODY).content


@check("models")
def models():
    equal([model.id for model in client.models.list()], [MODEL])


@check("errors: the context, in the words that agents look for")
def overflow():
    with raises(anthropic.BadRequestError, "prompt is too long"):
        client.messages.create(**{**BODY, "messages": [{"role": "user", "content": TOO_LONG}]})


@check("errors: a value, the model, the key")
def errors():
    with raises(anthropic.BadRequestError, "temperature"):
        client.messages.create(**{**BODY, "extra_body": {"temperature": -1}})
    with raises(anthropic.NotFoundError, "not_found_error"):
        client.messages.create(**{**BODY, "model": "other"})
    with raises(anthropic.AuthenticationError, "authentication_error"):
        anthropic.Anthropic(api_key="wrong", **SERVED).messages.create(**BODY)


@check("answers have a request id")
def request_ids():
    assert client.messages.create(**BODY)._request_id, "_request_id is None"


run_checks()
