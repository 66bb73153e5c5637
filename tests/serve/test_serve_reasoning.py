"""Reasoning is separated from the answer, however the text is cut, and only if the template has it.

The reasoning effort is passed to templates that read it, and refused where it would have no effect.
"""

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from forerun.serve import parts
from forerun.serve.parse import prepare
from forerun.serve.parts import AnswerForm, AnswerSplitter, ReasoningTags, TokenCounter, reasoning_tags
from forerun.serve.problems import ApiError
from forerun.serve.settings import ServeSettings
from kit.engines import plain
from kit.servers import Running, drafting, running
from serve.replies import reply_everywhere
from serve.special_tokens import Spelled

THINK = ReasoningTags("<think>", "</think>")
TRUSTING = ServeSettings(trust_request_templates=True)
LEVELS = "{{ messages[0].content }} effort={{ reasoning_effort or 'unsaid' }}"
SWITCH = (
    "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
ALWAYS = "{{ messages[0].content }}<think>{# until </think> #}"
NEVER = "{{ messages[0].content }}"
OPENED = ReasoningTags("<think>", "</think>", opened=True)


def joined(tags: ReasoningTags | None, pieces: list[str]) -> tuple[str, str]:
    splitter = AnswerSplitter(AnswerForm(tags))
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.close()
    kinds = [part.kind for part in parts]
    assert kinds == sorted(kinds, reverse=True), "no reasoning behind content"
    return tuple("".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "content"))  # type: ignore[return-value]


def expected(tags: ReasoningTags | None, text: str) -> tuple[str, str]:
    """The parts of a whole text, by another way."""
    begun = re.match(r"\s*<think>(.*)", text, re.DOTALL)
    if tags is None or not (tags.opened or begun):
        return "", text
    thought, closed, content = (text if tags.opened or begun is None else begun[1]).partition("</think>")
    return (thought.strip(), content.lstrip()) if closed else (thought.lstrip(), "")


def test_random_texts_in_random_pieces_are_split_as_the_whole_ones_are() -> None:
    dice = random.Random(7)
    for _ in range(2000):
        text = "".join(dice.choices(["<think>", "</think>", "</", "<", "think>", " ", "\n", "x", "é"], k=12))
        text = dice.choice(["", "<think>", "\n<think>"]) + text
        tags = dice.choice([None, THINK, OPENED])
        cuts = sorted(dice.choices(range(len(text) + 1), k=5))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert joined(tags, pieces) == expected(tags, text)


@pytest.mark.parametrize(
    ("template", "prompt", "continued", "tags"),
    [
        ("{{ x }}", "a<think>", None, None),
        ("...</think>...", "assistant\n", None, THINK),
        ("...</think>...", "assistant\n<think>\n", None, OPENED),
        ("...</think>...", "assistant\n<think>\n\n</think>\n\n", None, None),
        ("...</think>...", "a <think> in the text. assistant\n", None, THINK),
        ("...</think>...", "<think>so far", "<think>so far", OPENED),
        ("... [THINK]x[/THINK] ...", "[/INST]", None, ReasoningTags("[THINK]", "[/THINK]")),
        ("...</think>...", "<think>so</think> far", "<think>so</think> far", None),
    ],
)
def test_the_template_and_the_prompt_decide(
    template: str, prompt: str, continued: str | None, tags: ReasoningTags | None
) -> None:
    assert reasoning_tags(template, prompt, continued) == tags


@pytest.mark.parametrize("content", ["<think>so far", ["<think>", "so far"], [{"type": "text", "text": "<think>so"}]])
def test_an_answer_goes_on_from_its_text_however_that_is_given(content: Any) -> None:
    body = {
        "messages": [{"role": "assistant", "content": content}],
        "chat_template": "{{ messages[0].content }}!{# until </think> #}",
        "continue_final_message": True,
    }
    asked, _ = prepare(body, "chat", plain(), "", TRUSTING)
    assert asked.form.reasoning == OPENED


@pytest.mark.parametrize(
    ("tags", "texts", "counts"),
    [
        (None, ["<think>", "a"], (0, 2)),
        (THINK, ["<think>", "a", "</think>", "b"], (3, 1)),
        (THINK, ["\n", "<th", "ink>a", "</", "think>b", "c"], (5, 1)),
        (THINK, ["<th", "e", "</think>"], (0, 3)),
        (THINK, ["<th"], (0, 0)),
        (OPENED, ["a", "b</thi", "nk>", "c", "d"], (3, 2)),
    ],
)
def test_tokens_are_counted_as_the_tags_fall(
    tags: ReasoningTags | None, texts: list[str], counts: tuple[int, int]
) -> None:
    for runs in ([range(len(texts))], [[token] for token in range(len(texts))]):
        counter = TokenCounter(AnswerForm(tags), Spelled(*texts))
        kinds = [kind for run in runs for kind in counter.feed(run)]
        assert (counter.num_reasoning, kinds.count("content")) == counts


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server whose model reasons up to the word "named"."""
    monkeypatch.setattr(parts, "TAGS", (ReasoningTags("Once", "named"),))
    with drafting() as llm, running(llm) as found:
        yield found


def test_reasoning_between_text_tags_is_separated_in_every_interface(server: Running) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 60, "temperature": 0}
    raw = reply_everywhere(server, **body, chat_template="{{ messages[0].content }}")
    assert (raw.reasoning, raw.counts[2]) == ("", 0), "the template has no tags"
    thought, _, content = raw.text.partition("named")
    for included in (True, False):
        reply = reply_everywhere(
            server, **body, include_reasoning=included, chat_template="{{ messages[0].content }}{# named #}"
        )
        assert (reply.reasoning, reply.text) == (thought.strip() if included else "", content.lstrip())
        assert 1 < reply.counts[2] < reply.counts[1]


def prompt_of(endpoint: Any, template: str, effort: object, **more: Any) -> str | None:
    message: dict[str, Any] = {"input": "Hi", "reasoning": {"effort": effort, "summary": "auto"}}
    if endpoint == "chat":
        message = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
    _, answers = prepare({"chat_template": template, **message, **more}, endpoint, plain(), "", TRUSTING)
    return answers.requests[0][0].prompt


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
def test_an_effort_without_effect_is_refused(endpoint: str, param: str) -> None:
    for template, effort, why in (
        (NEVER, "low", "has no reasoning efforts"),
        (SWITCH, "high", "has no reasoning efforts"),
        (ALWAYS, "none", "has no reasoning efforts"),
        (LEVELS, "huge", "must be one of none, minimal"),
        (LEVELS, 3, "must be one of none, minimal"),
        (LEVELS, ["low"], "must be one of none, minimal"),
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
            prepare({"input": "Hi", "chat_template": NEVER, "reasoning": value}, "responses", plain(), "", TRUSTING)
        assert refusal.value.param == param
