"""DSPy: its language model over chats and completions, a program with typed fields, and its own kinds of errors."""

from typing import Literal

import dspy
from checks import (
    KEY,
    MESSAGES,
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

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": {**CITY, "required": ["city"]}}}
FORMED = {"max_tokens": 200, "response_format": FORMAT}  # it asks models that it does not know for no format by itself


class Forecast(dspy.Signature):
    """Tell the weather."""

    question: str = dspy.InputField()
    city: Literal["Rome", "Oslo"] = dspy.OutputField()


def model(name=f"openai/{MODEL}", key=KEY, **options):
    return dspy.LM(name, api_base=URL, api_key=key, cache=False, num_retries=0, **{**SAMPLING, **options})


@check("chat: the text of a plain request")
def chats():
    equal(model()(messages=MESSAGES), [plain_chat()])


@check("chat: n")
def several():
    equal(len(model()(messages=MESSAGES, n=2)), 2)


@check("chat: through litellm")
def through_litellm():
    equal(model(engine="litellm")(messages=MESSAGES), [plain_chat()])


@check("completions: the text of a plain request")
def completions():
    asked = f"{PROMPT}\n\nBEGIN RESPONSE:"  # what it makes of a prompt
    equal(model(f"text-completion-openai/{MODEL}", model_type="text")(PROMPT), [plain_completion(prompt=asked)])


@check("a program with a typed field, by a JSON schema")
def programs():
    with dspy.context(lm=model(**FORMED), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Forecast)(question=TEXT).city in ("Rome", "Oslo")


@check("a program, streamed")
async def streams():
    with dspy.context(lm=model(**FORMED), adapter=dspy.JSONAdapter()):
        program = dspy.streamify(dspy.Predict(Forecast))
        pieces = [piece async for piece in program(question=TEXT)]
    assert pieces[-1].city in ("Rome", "Oslo"), pieces


@check("errors: ContextWindowExceededError")
def overflow():
    with raises(dspy.ContextWindowExceededError):
        model()(TOO_LONG)


@check("errors: a value, the model, the key")
def errors():
    for wrong in ({"temperature": -1}, {"name": "openai/other"}, {"key": "wrong"}):
        with raises(Exception):
            model(**wrong)(TEXT)


run_checks()
