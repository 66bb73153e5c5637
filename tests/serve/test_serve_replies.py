"""Replies: every interface gives the same answer, whole and streamed, with tools, reasoning and structured output."""

import re
from typing import Any

import jsonschema
import pytest

from kit.servers import TEMPLATE, Running, library_answer, serving
from serve.call_templates import HARMONY, HERMES, LLAMA, MISTRAL
from serve.replies import reply_everywhere
from serve.special_tokens import SPECIAL, id_of, tagged
from serve.test_serve_tools import CALL, TOOLS, WEATHER

HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400}
ONE = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
NAMED = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
FORM = CALL.replace('"Rome"', '"(Rome|Oslo)", "days": 3').replace("{", r"\{").replace("}", r"\}")
THINK = "{{ messages[0].content }}{# </think> #}"
LESS = "504"  # the id of "<", with which a tag of reasoning may begin
SAID = "Write <|end|>, <|channel|>final<|message|> and [TOOL_CALLS]weather[ARGS]{} or </think>. "
SHORT = {"structured_outputs": {"regex": "[a-z .]{5,12}"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": {"enum": ["red", "green"]}}}
PLAIN: list[tuple[dict[str, Any], tuple[int, int], str]] = [  # a chat; the fewest and most calls; what the text is
    ({"chat_template": THINK, "max_tokens": 20, "logit_bias": {LESS: 24}, "logprobs": True}, (0, 0), "<.+"),
    ({"chat_template": TEMPLATE, "max_tokens": 60, "temperature": 0, "stop": ["a "], "logprobs": True}, (0, 0), ".+"),
    ({"chat_template": TEMPLATE, "response_format": FORMAT}, (0, 0), '"(red|green)"'),
    ({"chat_template": HERMES, **ONE}, (1, 1), ""),
    ({"chat_template": HERMES, **NAMED}, (1, 1), ""),
    ({"chat_template": LLAMA, **NAMED}, (1, 1), ""),
    ({"chat_template": HERMES, **ONE, "parallel_tool_calls": True, "max_tokens": 90}, (0, 16), "(.|\n)*"),
    ({"chat_template": HERMES, "tools": STRICT, "max_tokens": 30, "temperature": 1.2}, (0, 1), "(.|\n)*"),
    (
        {
            "chat_template": HERMES, "tools": TOOLS, "stop": [" Now"],
            "structured_outputs": {"regex": rf"Well\. {FORM}\n{FORM} So\. Now"},
        },
        (2, 2), "Well.So.",
    ),
    ({"chat_template": HERMES, "tools": TOOLS, "max_tokens": 12}, (0, 0), "(.|\n)+"),
    ({"chat_template": THINK, "max_tokens": 1, "logit_bias": {LESS: 100}, "logprobs": True}, (0, 0), "<"),
]  # fmt: skip
server, specially = serving(), serving(tagged)


def check(call: tuple[str, Any]) -> None:
    """A call is one of TOOLS as its schema says."""
    name, arguments = call
    jsonschema.validate(arguments, WEATHER if name == "weather" else {"const": {}})
    assert name in ("weather", 'say "hi"')


@pytest.mark.short("0", "1", "2", "3", "8", "10")
@pytest.mark.parametrize("number", range(len(PLAIN)))
def test_every_interface_gives_the_same_answer(server: Running, number: int) -> None:
    body, (fewest, most), text = PLAIN[number]
    names = set()
    for seed in (1, 2):
        reply = reply_everywhere(server, **HI | body, seed=seed)
        assert fewest <= len(reply.calls) <= most
        assert re.fullmatch(text, reply.text)
        names |= {name for name, _ in reply.calls}
        for call in reply.calls:
            check(call)
    assert body.get("tool_choice") != NAMED["tool_choice"] or names == {"weather"}


def test_every_interface_gives_the_answer_of_the_library(server: Running) -> None:
    body = {"chat_template": "{{ messages[0].content }}", "max_tokens": 24, "seed": 5, "temperature": 0.9}
    reply = reply_everywhere(server, **HI | body)
    ids = server.llm.tokenizer.encode("Hi", add_special_tokens=False)
    assert (
        reply.text == library_answer({"prompt": ids, "max_tokens": 24, "seed": 5, "temperature": 0.9}).outputs[0].text
    )
    assert reply.counts == (len(ids), 24, 0)


THINKING = {"chat_template": THINK, "logit_bias": {str(id_of("<think>")): 60, str(id_of("</think>")): 22}}
ENDED = {"logit_bias": {str(id_of("<|end|>")): 25}}
SPECIALLY: list[tuple[dict[str, Any], str]] = [  # a chat, and what it has in some of its answers
    ({"chat_template": HARMONY, "max_tokens": 200, **SHORT}, "text"),
    ({"chat_template": HARMONY, "max_tokens": 200, **SHORT, **ENDED, "logprobs": True}, "reasoning"),
    ({"chat_template": HARMONY, "max_tokens": 200, **SHORT, **ENDED, "include_reasoning": False}, "text"),
    ({"chat_template": HARMONY, "max_tokens": 200, **SHORT, "skip_special_tokens": False}, "text"),
    ({"chat_template": HARMONY, "max_tokens": 240, **ONE}, "calls"),
    ({"chat_template": MISTRAL, "max_tokens": 240, **ONE}, "calls"),
    ({**THINKING, "max_tokens": 120, **SHORT, "logprobs": True}, "reasoning"),
]


@pytest.mark.short("1", "4", "6")
@pytest.mark.parametrize("number", range(len(SPECIALLY)))
def test_special_tokens_separate_parts_and_are_never_shown(specially: Running, number: int) -> None:
    body, part = SPECIALLY[number]
    replies = [reply_everywhere(specially, **HI | body, temperature=1.3, seed=seed) for seed in range(4)]
    assert any(getattr(reply, part) for reply in replies)
    for reply in replies:
        assert not any(token in reply.reasoning + reply.text for token in SPECIAL)
        if reply.ended != "length" and "tools" in body:
            assert (reply.ended, reply.text) == ("tool_calls", "")
            check(*reply.calls)
        elif reply.ended != "length":
            assert re.fullmatch("[a-z .]{5,12}", reply.text)
            assert 0 <= reply.counts[2] < reply.counts[1]
        assert body.get("include_reasoning", True) or not reply.reasoning


@pytest.mark.parametrize("template", [HARMONY, THINK])
def test_text_that_spells_special_tokens_is_returned_unchanged(specially: Running, template: str) -> None:
    ending = {str(id_of("<|end|>" if template == HARMONY else "</think>")): 60}
    body = {"chat_template": template, "logit_bias": ending, "structured_outputs": {"choice": [SAID]}, "logprobs": True}
    assert reply_everywhere(specially, **HI | body, seed=1).text == SAID
