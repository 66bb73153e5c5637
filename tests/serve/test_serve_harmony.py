"""Harmony: channels and calls are separated by special tokens, and no special token is shown."""

import itertools
import random
import re
from typing import Any

import pytest

from forerun.serve.harmony import harmony_messages
from forerun.serve.parts import AnswerForm, TokenCounter
from forerun.serve.template_forms import is_harmony
from forerun.serve.tools import tools_of
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET
from kit.servers import Running, serving
from serve.call_templates import HARMONY, NAMED, answer, parts
from serve.special_tokens import SPECIAL, Spelled, id_of, tagged

FUNCTIONS: dict[str, Any] = {"weather": {}, "say_hi": {}}
FORM = answer("Harmony", FUNCTIONS)
ANALYSIS, FINAL, PREAMBLE = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
NEXT, CALL_TO = "<|end|><|start|>assistant", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ROME = '{"city": "Rome <|call|>"}'
CALLED = ("call", ("weather", {"city": "Rome <|call|>"}))
TEXTS: list[tuple[str, list[tuple[str, Any]]]] = [
    (f"{ANALYSIS}We think.{NEXT}{FINAL}Hello!", [("reasoning", "We think."), ("content", "Hello!")]),
    (f"{ANALYSIS}We think.{NEXT}{FINAL}Hello!<|return|>", [("reasoning", "We think."), ("content", "Hello!")]),
    (f"{FINAL} Hello \n", [("content", " Hello \n")]),
    (f"{ANALYSIS}a \n{NEXT}\n{ANALYSIS} b{NEXT}{FINAL}c", [("reasoning", "a \n\n b"), ("content", "c")]),
    (f"{PREAMBLE}I look.{NEXT}{CALL_TO}{ROME}<|call|>", [("content", "I look."), CALLED]),
    (f"{PREAMBLE}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", [("content", "a"), ("reasoning", "b"), ("content", "\nc")]),
    (f"{ANALYSIS}a{NEXT} to=functions.weather<|channel|>commentary<|message|>{ROME}", [("reasoning", "a"), CALLED]),
    (f" to=functions.weather<|channel|>commentary<|message|> {ROME}\n", [CALLED]),
    (f"<|channel|>analysis to=functions.weather code<|message|>{ROME}<|call|>", [CALLED]),
    (f"{CALL_TO}{ROME}{NEXT}{CALL_TO}{ROME}", [CALLED, CALLED]),
    (f"{CALL_TO}{ROME}<|start|>assistant{FINAL}So.", [CALLED, ("content", "So.")]),
    (f"{CALL_TO}{{}} so", [("content", "{} so")]),
    (f"{CALL_TO}{{\"city\": ", [("content", '{"city": ')]),
    (f"{CALL_TO}[1]<|call|>", [("content", "[1]")]),
    (CALL_TO.replace("weather", "other") + "{}", [("content", "{}")]),
    (CALL_TO.replace("functions.", "") + "{}", [("content", "{}")]),
    ("<|channel|>analysis to=browser.search code<|message|>{\"q\": 1}<|call|>", [("reasoning", '{"q": 1}')]),
    ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", [("content", "1 + 1")]),
    ("Hello <there>", [("content", "Hello <there>")]),
    (f"Hello{NEXT}{FINAL}You", [("content", "Hello\nYou")]),
    (f"{FINAL}a<|channel|>final<|message|>b", [("content", "a\nb")]),
    (f"{ANALYSIS}We", [("reasoning", "We")]),
    (f"{ANALYSIS}We{NEXT}", [("reasoning", "We")]),
    ("<|channel|>fin", []),
    (" to=functions.we", []),
    ("", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_channels_are_separated_however_the_text_is_cut(text: str, expected: list[tuple[str, Any]]) -> None:
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        assert parts(FORM, pieces) == expected, pieces


def test_harmony_is_recognised_by_what_a_template_writes_not_by_what_it_mentions() -> None:
    tokenizer = Tokenizer.load(TARGET)
    mentions = "{# <|start|><|channel|><|message|> #}{% for m in messages %}{{ m.content }}{% endfor %}"
    quotes = "Not <|start|>x<|channel|>y<|message|>. " + mentions
    assert [is_harmony(tokenizer, template) for template in (HARMONY, mentions, quotes)] == [True, False, False]


def test_random_messages_are_parsed_as_they_were_built() -> None:
    dice = random.Random(5)
    for _ in range(100):
        pieces, expected = [], list[tuple[str, Any]]()
        for _ in range(dice.randint(1, 5)):
            channel = dice.choice(["analysis", "final", "commentary"])
            content = "".join(
                dice.choices(["a", " ", "\n", "<", "|>", "é", "<|", "|> end", "{}", "to=functions.weather"], k=5)
            )
            pieces.append(f"<|channel|>{channel}<|message|>{content}")
            kind = "reasoning" if channel == "analysis" else "content"
            joint = "\n" if any(each == kind for each, _ in expected) else ""
            expected.append((kind, joint + content))
        text = NEXT.join(pieces)
        joined = [
            (kind, "".join(text for _, text in group)) for kind, group in itertools.groupby(expected, lambda p: p[0])
        ]
        cuts = sorted(dice.choices(range(len(text) + 1), k=4))
        assert parts(FORM, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == joined, text
        assert parts(FORM, list(text)) == joined


def test_an_answer_goes_on_from_where_the_prompt_ends() -> None:
    for begun, kind in (
        (f"<|start|>assistant{FINAL}So ", "content"),
        (f"<|start|>assistant{ANALYSIS}So ", "reasoning"),
    ):
        assert parts(answer("Harmony", {}, begun=begun), ["far."]) == [(kind, "far.")]
    assert parts(answer("Harmony", {}, begun=""), [f"<|start|>assistant{FINAL}x"]) == [("content", "x")]


FINALLY = ("<|channel|>", "final", "<|message|>")


def history_of(*messages: dict[str, Any]) -> str:
    found = harmony_messages([{"role": "user", "content": "Hi"}, *messages])
    return Tokenizer.load(TARGET).apply_chat_template(found, tokenize=False, chat_template=HARMONY)


def called(ident: str, city: str) -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def test_earlier_reasoning_calls_and_results_are_in_the_prompt() -> None:
    results = [{"role": "tool", "tool_call_id": each, "content": f"of {each}"} for each in ("b", "a")]
    call: dict[str, Any] = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    call |= {"tool_calls": [called("a", "Rome"), called("b", "Oslo")]}
    text = history_of(call, *results, {"role": "assistant", "content": "So.", "reasoning": "Well."})
    places = [text.index(each) for each in ("Hm.\n\nI look.", "Rome", "of a", "Oslo", "of b", "Well.", "So.")]
    assert places == sorted(places)
    assert text.count("<|call|>") == 2
    one = {"role": "assistant", "content": "I look.", "tool_calls": [called("a", "Rome")]}
    again = history_of(one, results[1], one, results[1])
    assert again.count("of a") == again.count("Rome") == again.count("I look.") == 2


server = serving(tagged)


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}}]
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": HARMONY, "temperature": 1.3}


def test_strict_tools_do_not_restrict_channels(server: Running) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
    use = tools_of({"tools": strict}, lambda: NAMED["Harmony"])
    assert use is not None
    matcher = server.llm.requests.matchers.matcher(
        use.grammar({}, "<|start|>assistant") or pytest.fail("there is a grammar")
    )
    right, wrong = '{"city": "Rome"}', '{"city": "Bonn"}'

    encode = server.llm.tokenizer.encode_inside

    def may_be(text: str) -> bool:
        pieces, own = re.split("(<[|][a-z]+[|]>)", text), matcher.fork()
        ids = [token for piece in pieces for token in ([id_of(piece)] if piece in SPECIAL else encode(piece))]
        return own.read(ids) == len(ids) and own.accepts

    assert may_be(f"{ANALYSIS}We think.{NEXT}{FINAL}Hello!")
    assert may_be(f"{ANALYSIS}We think.{NEXT}{PREAMBLE}Hello!")
    assert [may_be(CALL_TO + each) for each in (right, wrong)] == [True, False]
    assert [may_be(f"{PREAMBLE}I look.{NEXT}{CALL_TO}{each}") for each in (right, wrong)] == [True, False]


@pytest.mark.parametrize(
    ("texts", "counts"),
    [
        (["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "assistant", *FINALLY, "c"], (10, 1)),
        ([*FINALLY, "c", "<|return|>"], (3, 2)),
        (["<|channel|>"], (1, 0)),
    ],
)  # fmt: skip
def test_the_tokens_of_heads_and_analysis_are_reasoning(texts: list[str], counts: tuple[int, int]) -> None:
    counter = TokenCounter(AnswerForm(begun="<|start|>assistant"), Spelled(*texts))
    kinds = counter.feed(range(len(texts)))
    assert (counter.num_reasoning, kinds.count("content")) == counts
    assert kinds.count("reasoning") == counter.num_reasoning
