"""How much a model is to reason: given to templates that read it, and refused where nothing would follow from it."""

from typing import Any

import pytest

from forerun.serve.parse import prepared
from forerun.serve.problems import ApiError
from forerun.serve.settings import ServeSettings
from kit.engines import plain
from kit.servers import drafting, running

TRUSTING = ServeSettings(trust_request_templates=True)

LEVELS = "{{ messages[0].content }} effort={{ reasoning_effort or 'unsaid' }}"
SWITCH = (
    "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
ALWAYS = "{{ messages[0].content }}<think>{# until </think> #}"
NEVER = "{{ messages[0].content }}"


def prompt_of(endpoint: Any, template: str, effort: object, **more: Any) -> str | None:
    message: dict[str, Any] = {"input": "Hi", "reasoning": {"effort": effort, "summary": "auto"}}
    if endpoint == "chat":
        message = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
    asked, _ = prepared({"chat_template": template, **message, **more}, endpoint, plain(), "", TRUSTING)
    return asked.requests[0].prompt


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_an_effort_reaches_the_template_that_reads_it(endpoint: str) -> None:
    for effort in ("none", "minimal", "low", "high", "max"):
        assert prompt_of(endpoint, LEVELS, effort) == f"Hi effort={effort}"
    assert prompt_of(endpoint, LEVELS, None) == "Hi effort=unsaid"
    assert prompt_of(endpoint, LEVELS, "low", chat_template_kwargs={"reasoning_effort": "mine"}) == "Hi effort=mine"
    assert prompt_of(endpoint, SWITCH, "none") == "Hi<think></think>"
    assert prompt_of(endpoint, SWITCH, None) == "Hi"
    assert prompt_of(endpoint, NEVER, "none") == "Hi"


def test_the_tokens_of_a_chat_are_those_of_its_effort() -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": LEVELS, "reasoning_effort": "low"}
    with drafting() as llm, running(llm) as server:
        tokens = server.post("/tokenize", **fields, add_special_tokens=False).json()["tokens"]
        chat = server.post("/v1/chat/completions", **fields, max_tokens=1, return_token_ids=True).json()
    assert tokens == chat["prompt_token_ids"]


@pytest.mark.parametrize(("endpoint", "param"), [("chat", "reasoning_effort"), ("responses", "reasoning.effort")])
def test_an_effort_from_which_nothing_would_follow_is_refused(endpoint: str, param: str) -> None:
    for template, effort, why in (
        (NEVER, "low", "has no efforts"),
        (SWITCH, "high", "has no efforts"),
        (ALWAYS, "none", "has no efforts"),
        (LEVELS, "huge", "is none of none, minimal"),
        (LEVELS, 3, "is none of none, minimal"),
        (LEVELS, ["low"], "is none of none, minimal"),
    ):
        with pytest.raises(ApiError, match=why) as refusal:
            prompt_of(endpoint, template, effort)
        assert refusal.value.param == param


def test_reasoning_of_a_response_is_an_object_with_an_effort() -> None:
    for value, param in (
        ("low", "reasoning"),
        ({"efort": "low"}, "reasoning.efort"),
        ({"mode": "x"}, "reasoning.mode"),
    ):
        with pytest.raises(ApiError) as refusal:
            prepared({"input": "Hi", "chat_template": NEVER, "reasoning": value}, "responses", plain(), "", TRUSTING)
        assert refusal.value.param == param
