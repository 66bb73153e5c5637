"""Instructor: models of pydantic as answers, in each of its ways of asking for them, whole and in part."""

from contextlib import suppress
from typing import Literal

import instructor
import openai
from checks import KEY, MESSAGES, MODEL, PATIENCE_S, TOO_LONG, URL, check, raises, run_checks
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field, ValidationError

SERVED = {"base_url": URL, "api_key": KEY, "max_retries": 0, "timeout": PATIENCE_S}
BODY = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "seed": 7, "max_retries": 0}


class Forecast(BaseModel):
    """A forecast."""

    model_config = ConfigDict(extra="forbid")  # the schema then says so, and a small model cannot add anything

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def client(mode, kind=openai.OpenAI, **options):
    return instructor.from_openai(kind(**{**SERVED, **options}), mode=mode)


@check("by a call of a tool")
def by_tools():
    answer = client(instructor.Mode.TOOLS).chat.completions.create(response_model=Forecast, **BODY)
    assert isinstance(answer, Forecast), answer


@check("by a JSON schema")
def by_schema():
    answer = client(instructor.Mode.JSON_SCHEMA).chat.completions.create(response_model=Forecast, **BODY)
    assert isinstance(answer, Forecast), answer


@check("asynchronous, with the completion")
async def asynchronously():
    asynchronous = client(instructor.Mode.TOOLS, openai.AsyncOpenAI)
    answer, completion = await asynchronous.chat.completions.create_with_completion(response_model=Forecast, **BODY)
    assert isinstance(answer, Forecast), answer
    assert completion.usage.completion_tokens > 0, completion


@check("a partial answer, streamed")
def partially():
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        answers = list(client(mode).chat.completions.create_partial(response_model=Forecast, **BODY))
        assert answers[-1].city in ("Rome", "Oslo"), answers


@check("several answers, streamed")
def several():
    answers = client(instructor.Mode.TOOLS).chat.completions.create_iterable(response_model=Forecast, **BODY)
    with suppress(ValidationError):  # its schema demands nothing of the object around the list, so a model may err
        assert all(isinstance(answer, Forecast) for answer in answers)


@check("errors: the context, the model, the key")
def errors():
    kinds = (openai.OpenAIError, InstructorRetryException)
    long = {**BODY, "messages": [{"role": "user", "content": TOO_LONG}]}
    for body, key in ((long, KEY), ({**BODY, "model": "other"}, KEY), (BODY, "wrong")):
        with raises(kinds):
            client(instructor.Mode.TOOLS, api_key=key).chat.completions.create(response_model=Forecast, **body)


run_checks()
