"""Pydantic AI: agents with text, tools and forms, over chats and over responses."""

from typing import Literal

from checks import KEY, MODEL, SAMPLING, TEXT, TOO_LONG, URL, check, equal, plain_chat, raises, run_checks
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import (
    ModelAuthenticationError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelNotFoundError,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

KINDS = (OpenAIChatModel, OpenAIResponsesModel)


class Forecast(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def agent(kind=OpenAIChatModel, name=MODEL, key=KEY, settings=None, **options):
    model = kind(name, provider=OpenAIProvider(base_url=URL, api_key=key))
    return Agent(model, model_settings={"max_tokens": 300, "temperature": 0, **(settings or {})}, retries=0, **options)


@check("chat: the text of a plain request, with usage")
async def chats():
    result = await agent(settings=SAMPLING).run(TEXT)
    equal(result.output, plain_chat())
    assert result.usage.output_tokens > 0, result.usage


@check("chat: logprobs")
async def logprobs():
    settings = {**SAMPLING, "openai_logprobs": True, "openai_top_logprobs": 2}
    result = await agent(settings=settings).run(TEXT)
    equal("".join(each["token"] for each in result.response.provider_details["logprobs"]), result.output)


@check("chat and responses: a stream")
async def streams():
    for kind in KINDS:
        async with agent(kind, settings={"max_tokens": 24}).run_stream(TEXT) as stream:
            text = "".join([piece async for piece in stream.stream_text(delta=True)])
        equal(text, (await agent(kind, settings={"max_tokens": 24}).run(TEXT)).output)


@check("chat and responses: an output by a form and by a tool")
async def forms():
    for kind in KINDS:
        for form in (NativeOutput(Forecast), ToolOutput(Forecast)):
            result = await agent(kind, output_type=form).run(TEXT)
            assert isinstance(result.output, Forecast), result.output


@check("chat and responses: a form, streamed")
async def streamed_forms():
    for kind in KINDS:
        async with agent(kind, output_type=ToolOutput(Forecast)).run_stream(TEXT) as stream:
            assert isinstance(await stream.get_output(), Forecast)


@check("errors: ModelContextWindowExceededError")
async def overflow():
    with raises(ModelContextWindowExceededError):
        await agent().run(TOO_LONG)


@check("errors: a value, the model, the key")
async def errors():
    with raises(ModelHTTPError, "temperature"):
        await agent(settings={"temperature": -1}).run(TEXT)
    with raises(ModelNotFoundError, "model_not_found"):
        await agent(name="other").run(TEXT)
    with raises(ModelAuthenticationError):
        await agent(key="wrong").run(TEXT)


run_checks()
