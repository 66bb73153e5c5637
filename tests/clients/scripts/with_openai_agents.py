"""OpenAI's agents: a run with a tool, a run with a form, and streams, over chats and over responses."""

from typing import Literal

import openai
from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import KEY, MESSAGES, MODEL, PATIENCE_S, SHORT, TEXT, URL, check, equal, plain_chat, raises, run_checks
from pydantic import BaseModel, Field

set_tracing_disabled(True)
CALLED: list[str] = []
# An answer that is cut at its limit is an error to the client.
CALLING = {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": SHORT}
KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


class Forecast(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    CALLED.append(city)
    return "sunny"


def agent(kind, name=MODEL, key=KEY, settings=None, **options):
    client = openai.AsyncOpenAI(base_url=URL, api_key=key, max_retries=0, timeout=PATIENCE_S)
    settings = ModelSettings(max_tokens=200, temperature=0, include_usage=True, **settings or {})
    return Agent(name="Programmer", model=kind(model=name, openai_client=client), model_settings=settings, **options)


@check("chat: the text of a plain request")
async def chats():
    instructed = agent(KINDS[0], instructions="Be brief.")
    result = await Runner.run(instructed, TEXT)
    system = {"role": "system", "content": "Be brief."}
    equal(result.final_output, plain_chat(messages=[system, *MESSAGES], temperature=0, max_tokens=200))


@check("chat and responses: a tool is called, and its result is answered")
async def tools():
    for kind in KINDS:
        CALLED.clear()
        result = await Runner.run(agent(kind, tools=[weather], settings=CALLING), TEXT)
        assert CALLED, result.new_items
        equal([item.type for item in result.new_items][-1], "message_output_item")


@check("chat and responses: a stream of events, with a call")
async def streams():
    for kind in KINDS:
        result = Runner.run_streamed(agent(kind, tools=[weather], settings=CALLING), TEXT)
        kinds = [event.type async for event in result.stream_events()]
        assert {"raw_response_event", "run_item_stream_event"} <= set(kinds), set(kinds)
        assert result.context_wrapper.usage.output_tokens > 0, result.context_wrapper.usage


@check("chat and responses: an output of a form")
async def forms():
    for kind in KINDS:
        result = await Runner.run(agent(kind, output_type=AgentOutputSchema(Forecast)), TEXT)
        assert isinstance(result.final_output, Forecast), result.final_output


@check("errors: the model, the key")
async def errors():
    for kind in KINDS:
        with raises(openai.NotFoundError, "model_not_found"):
            await Runner.run(agent(kind, "other"), TEXT)
        with raises(openai.AuthenticationError):
            await Runner.run(agent(kind, key="wrong"), TEXT)


run_checks()
