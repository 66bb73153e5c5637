"""LlamaIndex: an OpenAI-like model with chats, completions, tools and structured output."""

from typing import Literal

import openai
from checks import (
    CONTEXT,
    KEY,
    MODEL,
    PROMPT,
    SAMPLING,
    TEXT,
    TOO_LONG,
    URL,
    check,
    equal,
    plain_chat,
    plain_completion,
    raises,
    run_checks,
)
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

MESSAGES = [ChatMessage(role="user", content=TEXT)]


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def model(name=MODEL, key=KEY, chats=True, max_tokens=SAMPLING["max_tokens"], **options):
    return OpenAILike(
        model=name,
        api_base=URL,
        api_key=key,
        is_chat_model=chats,
        is_function_calling_model=True,
        context_window=CONTEXT,
        max_retries=0,
        temperature=SAMPLING["temperature"],
        max_tokens=max_tokens,
        additional_kwargs={"seed": SAMPLING["seed"]},
        **options,
    )


@check("chat: the text of a plain request")
def chats():
    equal(model().chat(MESSAGES).message.content, plain_chat())


@check("chat: a stream, and an asynchronous one")
async def streams():
    equal("".join(piece.delta or "" for piece in model().stream_chat(MESSAGES)), plain_chat())
    stream = await model().astream_chat(MESSAGES)
    equal("".join([piece.delta or "" async for piece in stream]), plain_chat())


@check("completions: whole, and a stream")
def completions():
    equal(model(chats=False).complete(PROMPT).text, plain_completion())
    equal("".join(piece.delta or "" for piece in model(chats=False).stream_complete(PROMPT)), plain_completion())


@check("chat: logprobs")
def logprobs():
    assert model(logprobs=True, top_logprobs=2).chat(MESSAGES).logprobs


@check("chat: a tool is called")
def tools():
    answer = model(max_tokens=200).predict_and_call(
        [FunctionTool.from_defaults(weather)], TEXT, tool_required=True, allow_parallel_tool_calls=False
    )
    assert answer.response.startswith("sunny in "), answer


@check("chat: structured output, by a call and by a schema")
def forms():
    for by_schema in (False, True):
        structured = model(max_tokens=200, should_use_structured_outputs=by_schema).as_structured_llm(Forecast)
        assert isinstance(structured.chat(MESSAGES).raw, Forecast)


@check("errors: the context, the model, the key")
def errors():
    with raises(openai.BadRequestError, "context_length_exceeded"):
        model().chat([ChatMessage(role="user", content=TOO_LONG)])
    with raises(openai.NotFoundError, "model_not_found"):
        model(name="other").chat(MESSAGES)
    with raises(openai.AuthenticationError):
        model(key="wrong").chat(MESSAGES)


run_checks()
