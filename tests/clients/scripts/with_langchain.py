"""LangChain: chats and completions of langchain-openai, tools, structured output, and its own kinds of errors."""

import openai
from checks import (
    FORECAST,
    KEY,
    MODEL,
    PROMPT,
    SAMPLING,
    TEXT,
    TOO_LONG,
    TOOL,
    URL,
    check,
    equal,
    is_forecast,
    plain_chat,
    plain_completion,
    raises,
    run_checks,
)
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

SERVED = {"base_url": URL, "api_key": KEY, "model": MODEL, "max_retries": 0}


def chat(**options):
    return ChatOpenAI(**{**SERVED, **SAMPLING, **options})


@check("chat: the text of a plain request, with usage")
def chats():
    answer = chat().invoke(TEXT)
    equal(answer.content, plain_chat())
    assert answer.usage_metadata["output_tokens"] > 0, answer


@check("chat: a stream with usage")
def streams():
    chunks = list(chat(stream_usage=True).stream(TEXT))
    equal("".join(chunk.content for chunk in chunks), plain_chat())
    assert any(chunk.usage_metadata for chunk in chunks), chunks


@check("chat: a batch, asynchronous, n, logprobs")
async def several():
    answers = await chat().abatch([TEXT] * 4)
    equal([answer.content for answer in answers], [plain_chat()] * 4)
    result = await chat(n=2, logprobs=True, top_logprobs=1).agenerate([[HumanMessage(TEXT)]])
    equal(len(result.generations[0]), 2)
    tokens = result.generations[0][0].message.response_metadata["logprobs"]["content"]
    equal("".join(token["token"] for token in tokens), result.generations[0][0].text)


@check("chat: a tool, called whole and streamed, and its result")
def tools():
    bound = chat(max_tokens=200).bind_tools([TOOL], tool_choice="weather", parallel_tool_calls=False)
    answer = bound.invoke(TEXT)
    is_forecast(answer.tool_calls[0]["args"])
    streamed = None
    for chunk in bound.stream(TEXT):
        streamed = chunk if streamed is None else streamed + chunk
    equal(streamed.tool_calls[0]["args"], answer.tool_calls[0]["args"])
    result = ToolMessage("sunny", tool_call_id=answer.tool_calls[0]["id"])
    assert chat().bind_tools([TOOL]).invoke([("human", TEXT), answer, result]).content


@check("chat: structured output, by a schema and by a call")
def forms():
    schema = {"title": "forecast", "description": "A forecast.", **FORECAST}
    for method in ("json_schema", "function_calling"):
        is_forecast(chat(max_tokens=200).with_structured_output(schema, method=method).invoke(TEXT))


@check("responses: whole, and a stream")
def responses():
    model = chat(use_responses_api=True, max_tokens=24, seed=None, temperature=0)
    text = model.invoke(TEXT).text
    equal("".join(chunk.text for chunk in model.stream(TEXT)), text)


@check("completions: whole, and a stream")
def completions():
    model = OpenAI(**SERVED, **SAMPLING)
    equal(model.invoke(PROMPT), plain_completion())
    equal("".join(model.stream(PROMPT)), plain_completion())


@check("errors: ContextOverflowError")
def overflow():
    with raises(ContextOverflowError):
        chat().invoke(TOO_LONG)


@check("errors: a value, the model, the key")
def errors():
    with raises(openai.BadRequestError, "temperature"):
        chat(temperature=-1).invoke(TEXT)
    with raises(openai.NotFoundError, "model_not_found"):
        chat(model="other").invoke(TEXT)
    with raises(openai.AuthenticationError):
        chat(api_key="wrong").invoke(TEXT)


run_checks()
