"""OpenAI's own client: completions, chats and responses, whole and streamed, with everything that its users set."""

import asyncio
from typing import Literal

import openai
from checks import (
    CONTEXT,
    FORMAT,
    KEY,
    MESSAGES,
    MODEL,
    PATIENCE_S,
    PROMPT,
    SAMPLING,
    TEXT,
    TOO_LONG,
    TOOL,
    URL,
    check,
    equal,
    is_forecast,
    plain,
    plain_chat,
    plain_completion,
    raises,
    run_checks,
)
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=PATIENCE_S)
ASYNC = {"base_url": URL, "api_key": KEY, "max_retries": 0, "timeout": PATIENCE_S}


class Forecast(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def chat(**options):
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **SAMPLING, **options})


@check("models: the list and one of them")
def models():
    equal([model.id for model in client.models.list()], [MODEL])
    equal(client.models.retrieve(MODEL).id, MODEL)


@check("chat: the text of a plain request, twice, with usage")
def chats():
    first, again = chat(), chat()
    equal(first.choices[0].message.content, plain_chat())
    equal(again.choices[0].message.content, first.choices[0].message.content)
    equal(first.usage.total_tokens, first.usage.prompt_tokens + first.usage.completion_tokens)


@check("chat: a stream with its usage")
def streams():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    equal(text, plain_chat())
    equal(chunks[-1].usage.completion_tokens, chat().usage.completion_tokens)


@check("chat: the client's stream of events")
def event_streams():
    body = {"model": MODEL, "messages": MESSAGES, **SAMPLING, "stop": ["\n"]}  # it raises for an answer cut at a limit
    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    equal(final.choices[0].message.content, plain_chat(stop=["\n"]))


@check("chat: n, stop, logprobs")
def several():
    answer = chat(n=3, logprobs=True, top_logprobs=2)
    equal([choice.index for choice in answer.choices], [0, 1, 2])
    equal({len(token.top_logprobs) for token in answer.choices[0].logprobs.content}, {2})
    equal("".join(token.token for token in answer.choices[0].logprobs.content), answer.choices[0].message.content)
    equal(chat(stop=["\n"]).choices[0].message.content, plain_chat().partition("\n")[0])


@check("chat: reasoning_effort, user, metadata, store, service_tier")
def idle_fields():
    answer = chat(reasoning_effort="low", user="me", metadata={"a": "b"}, store=False, service_tier="auto")
    equal(answer.choices[0].message.content, plain_chat(reasoning_effort="low"))


@check("chat: asynchronous, eight at once")
async def at_once():
    async with openai.AsyncOpenAI(**ASYNC) as asynchronous:
        asked = [
            asynchronous.chat.completions.create(model=MODEL, messages=MESSAGES, **SAMPLING | {"seed": seed})
            for seed in range(8)
        ]
        answers = await asyncio.gather(*asked)
    equal([each.choices[0].message.content for each in answers], [plain_chat(seed=seed) for seed in range(8)])


@check("chat: a JSON schema, and parse with a model of pydantic")
def forms():
    is_forecast(chat(response_format=FORMAT, max_tokens=64).choices[0].message.content)
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Forecast, seed=7)
    assert isinstance(parsed.choices[0].message.parsed, Forecast), parsed


@check("chat: a call of a tool, its result, streamed calls")
def tools():
    choice = {"type": "function", "function": {"name": "weather"}}
    message = chat(tools=[TOOL], tool_choice=choice, max_tokens=64).choices[0].message
    is_forecast(message.tool_calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    goes_on = chat(messages=[*MESSAGES, message.model_dump(exclude_none=True), result], tools=[TOOL])
    assert goes_on.choices[0].message.content, goes_on
    body = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "seed": 7}
    with client.chat.completions.stream(**body, parallel_tool_calls=False) as stream:
        calls = stream.get_final_completion().choices[0].message.tool_calls
    is_forecast(calls[0].function.arguments)


@check("completions: text and token ids, a list, n, logprobs, a stream")
def completions():
    body = {"model": MODEL, **SAMPLING}
    answer = client.completions.create(prompt=PROMPT, logprobs=2, **body)
    equal(answer.choices[0].text, plain_completion())
    equal("".join(answer.choices[0].logprobs.tokens), answer.choices[0].text)
    ids = plain("/tokenize", prompt=PROMPT)["tokens"]
    equal(client.completions.create(prompt=ids, **body).choices[0].text, answer.choices[0].text)
    equal(len(client.completions.create(prompt=[PROMPT, "def "], n=2, **body).choices), 4)
    chunks = client.completions.create(prompt=PROMPT, stream=True, **body)
    equal("".join(chunk.choices[0].text for chunk in chunks), answer.choices[0].text)


@check("completions: echo with logprobs of the prompt")
def echo():
    answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=0)
    equal(answer.choices[0].text, PROMPT)
    equal("".join(answer.choices[0].logprobs.tokens).removeprefix("<s>"), PROMPT)
    equal(answer.choices[0].logprobs.token_logprobs[0], None)


@check("responses: whole, streamed, parsed, with a call")
def responses():
    body = {"model": MODEL, "input": TEXT, "max_output_tokens": 64, "temperature": 0}
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    equal(text, whole.output_text)
    assert isinstance(client.responses.parse(**body, text_format=Forecast).output_parsed, Forecast)
    tool = {"type": "function", **TOOL["function"], "strict": True}
    body |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    is_forecast(client.responses.create(**body).output[-1].arguments)


@check("errors: the context")
def overflow():
    with raises(openai.BadRequestError, "maximum context length", "context_length_exceeded"):
        chat(messages=[{"role": "user", "content": TOO_LONG}])
    with raises(openai.BadRequestError, "maximum context length", "context_length_exceeded"):
        chat(max_tokens=CONTEXT)


@check("errors: a value, a field, the model, the key, the address")
def errors():
    with raises(openai.BadRequestError, "temperature"):
        chat(temperature=-1)
    with raises(openai.BadRequestError, "top_j"):
        chat(extra_body={"top_j": 1})
    with raises(openai.NotFoundError, "model_not_found"):
        chat(model="other")
    with raises(openai.AuthenticationError, "invalid_api_key"):
        openai.OpenAI(base_url=URL, api_key="wrong", max_retries=0).models.list()
    with raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="text")


@check("raw answers have an x-request-id")
def request_ids():
    assert chat()._request_id, "_request_id is None"


run_checks()
