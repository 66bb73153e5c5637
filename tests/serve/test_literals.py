"""Literals: text that spells a special token in other tokens stays text, and only the special token itself is a tag."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.accept.commit import Origin
from forerun.accept.delta import Delta, FinishReason, Segment
from forerun.accept.stop import StopChecker
from forerun.request import ChatOptions
from forerun.sampling.params import SamplingParams
from forerun.serve.call_grammar import call_grammar
from forerun.serve.calls import CallForm
from forerun.serve.logprob_text import TokenTexts
from forerun.serve.parts import AnswerForm, AnswerPart, AnswerSplitter, TokenCounter
from forerun.serve.template_forms import answer_form
from forerun.serve.tools import tools_of
from forerun.text.tokenizer import Tokenizer
from kit.servers import Running, serving
from serve.call_templates import HARMONY, MISTRAL, NAMED, answer, joined, parts
from serve.special_tokens import SPECIAL, id_of, tagged, with_special_tokens
from serve.test_serve_harmony import ASKED, TOOLS

THINK = "{{ messages[0].content }}{# </think> #}"


server = serving(tagged)


@pytest.mark.parametrize("skip", [True, False])
def test_calls_are_marked_by_special_tokens_and_others_are_shown_on_demand(server: Running, skip: bool) -> None:
    city, call = "[ARGS] of [TOOL_CALLS]", f'<[{id_of("[TOOL_CALLS]")}]> "weather" <[{id_of("[ARGS]")}]>'
    arguments = json.dumps(json.dumps({"city": city}))
    grammar = f'start: "See [TOOL_CALLS]weather[ARGS]{{}}, " <[{id_of("<|end|>")}]> "<|end|> " {call} {arguments}'
    body = ASKED | {"chat_template": MISTRAL, "tools": TOOLS, "structured_outputs": {"grammar": grammar}}
    body |= {"max_tokens": 400, "skip_special_tokens": skip}
    message = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    content = f"See [TOOL_CALLS]weather[ARGS]{{}}, {'' if skip else '<|end|>'}<|end|>"
    deltas = [chunk["choices"][0]["delta"] for chunk in server.events("/v1/chat/completions", **body)]
    assert message["content"] == "".join(delta.get("content") or "" for delta in deltas) == content
    for calls in (message["tool_calls"], [call for delta in deltas for call in delta.get("tool_calls", [])]):
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": city}]


def test_a_required_call_ends_with_its_closing_token(server: Running) -> None:
    form = CallForm("of the test", "object", "<think>\n", "\n</think>")
    special = {tag: id_of(tag) for tag in ("<think>", "</think>")}
    grammar = call_grammar(form, {"weather": None}, special, free=False, several=False)
    encode, matcher = server.llm.tokenizer.encode_inside, server.llm.requests.matchers.matcher(grammar)
    call = [id_of("<think>"), *encode('\n{"name": "weather", "arguments": {}}\n')]
    for ending, accepts in (([id_of("</think>")], True), (encode("</think>"), False)):
        state = matcher.fork()
        assert (state.read([*call, *ending]) == len(call) + len(ending) and state.accepts) == accepts


@pytest.mark.parametrize(
    ("name", "tag", "text"),
    [
        ("Llama 3", "<|python_tag|>", '%s{"name": "weather", "parameters": {}}'),
        ("Mistral", "[CALL_ID]", "[TOOL_CALLS]weather%sabc[ARGS]{}"),
        ("Hermes", "</tool_call>", '<tool_call>{"name": "weather", "arguments": {}}%s and so on'),
    ],
)
def test_only_the_special_token_is_a_tag(name: str, tag: str, text: str) -> None:
    form = answer(name, {"weather": {}}, special={tag: 5})
    before, behind = text.split("%s")
    for special in (True, False):
        segments = [
            Segment(before, Origin.TARGET),
            Segment(tag, Origin.TARGET, special),
            Segment(behind, Origin.TARGET),
        ]
        for deltas in ([segments], [[each] for each in segments]):
            splitter, read = AnswerSplitter(form), list[AnswerPart]()
            for place, each in enumerate(deltas, 1):
                reason: FinishReason | None = "stop" if place == len(deltas) else None
                read += splitter.take(Delta(0, 0, 0, (), (), tuple(each), (), reason, None))
            assert any(part.call for part in read) == special
            assert special or joined(read) == [("content", before + tag + behind)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(with_special_tokens(tmp_path_factory.mktemp("tokenizer") / "model"))


def form_of(tokenizer: Tokenizer, template: str, prompt: str) -> AnswerForm:
    tools = tools_of({"tools": TOOLS}, lambda: NAMED["Mistral"]) if template == MISTRAL else None
    return answer_form(ChatOptions(template), prompt, None, tools, tokenizer)


def ids_of(text: str, way: str, tokenizer: Tokenizer) -> list[int]:
    """A text as the special token that it spells, if it is to be one and there is one, or as others."""
    if way == "token" and text in SPECIAL:
        return [id_of(text)]
    return [3 + byte for byte in text.encode()] if way == "bytes" else tokenizer.encode_inside(text)


def taken(form: AnswerForm, tokenizer: Tokenizer, runs: list[list[int]]) -> list[AnswerPart]:
    """The parts of an answer whose rounds had these tokens."""
    params = SamplingParams(max_tokens=None)  # by default long answers end before their last token
    stop = StopChecker(params, (), tokenizer, sum(map(len, runs)), [403], form.shown_special_ids)
    splitter, read = AnswerSplitter(form), list[AnswerPart]()
    for run in runs:
        end = stop.push(run)
        segments = tuple(Segment(piece.text, Origin.TARGET, piece.special) for piece in end.pieces)
        read += splitter.take(Delta(0, 0, 0, tuple(run), (), segments, (), end.finish_reason, None))
    return read


ARGUMENTS = '{"city": "[ARGS]<|call|>"}'
WRITTEN: list[tuple[str, ...]] = [(text,) for text in (*SPECIAL, "<|chan", "nel|>", "[TOOL_", "CALLS]", " ", "\n", "x")]
WRITTEN += [("[TOOL_CALLS]", "weather", "[ARGS]", ARGUMENTS), ("<|end|>", "<|start|>", "assistant")]
WRITTEN += [("<|channel|>", channel, "<|message|>") for channel in ("analysis", "final")]
OTHER = str.maketrans("<[", "\ue000\ue001")
BACK = str.maketrans("\ue000\ue001", "<[")


@pytest.mark.parametrize(
    ("template", "prompt"),
    [(HARMONY, "<|start|>assistant"), (MISTRAL, ""), (THINK, "<think>"), (THINK, ""), ("{{ messages }}", "")],
)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_text_that_spells_a_tag_is_parsed_as_text(
    tokenizer: Tokenizer, template: str, prompt: str, data: st.DataObject
) -> None:
    """The oracle has other letters in text, with which no tag begins."""
    form = form_of(tokenizer, template, prompt)
    ways = st.sampled_from(["token", "text", "bytes"])
    written = data.draw(st.lists(st.tuples(st.sampled_from(WRITTEN), ways), min_size=1, max_size=8))
    spelled = [(ids_of(text, way, tokenizer), text) for texts, way in written for text in texts]
    seen = [
        text.translate(OTHER) if not tokenizer.special_ids & set(ids) else text
        for ids, text in spelled
        if not tokenizer.special_ids.difference(form.shown_special_ids) & set(ids)
    ]
    read = parts(replace(form, special={}), ["".join(seen)])
    expected = json.loads(json.dumps(read, ensure_ascii=False).translate(BACK))
    tokens = [token for ids, _ in spelled for token in ids]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    for runs in ([tokens], [[token] for token in tokens], [tokens[a:b] for a, b in pairwise([0, *cuts, len(tokens)])]):
        read = joined(taken(form, tokenizer, [run for run in runs if run]))
        assert json.loads(json.dumps(read)) == expected
    counter = TokenCounter(form, TokenTexts(tokenizer))
    counter.feed(tokens)
    if prompt == "<think>":
        closing = id_of("</think>")
        assert counter.num_reasoning == (tokens.index(closing) + 1 if closing in tokens else len(tokens))
