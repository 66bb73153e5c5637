"""Trials: no grammar, however deep or slow, crashes or blocks this process, and ordinary ones pass."""

import gc
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable

import pytest

import forerun.sampling.matcher as module
from forerun.errors import ForerunError, InvalidGrammar
from forerun.llm import LLM
from forerun.sampling.grammar import MOST_GRAMMAR_CHARACTERS, Grammar
from forerun.sampling.matcher import Matcher, Matchers
from forerun.sampling.params import SamplingParams
from forerun.sampling.trial import LIMIT_S, TOO_MUCH, UNTRIED_CHARACTERS, problem_of_trial
from kit.checkpoints import TARGET
from kit.engines import PATIENCE_S
from sampling.test_grammar import requests

CHAINS: dict[str, Callable[[int], Grammar]] = {  # grammars whose depth, or work, grows with their length
    "rules": lambda n: Grammar.lark("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(n)) + f'r{n}: "a"'),
    "a circle of rules": lambda n: Grammar.lark(
        "start: r0\n" + "".join(f'r{i}: "x" r{(i + 1) % n}\n' for i in range(n))
    ),
    "terminals": lambda n: Grammar.lark(
        "start: T0\n" + "".join(f'T{i}: T{i + 1} "a"\n' for i in range(n)) + f'T{n}: "a"'
    ),
    "special tokens": lambda n: Grammar.lark(
        "start: <s> r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(n)) + f'r{n}: "a"'
    ),
    "references": lambda n: of_definitions(n, lambda to: {"$ref": to}),
    "properties": lambda n: of_definitions(n, lambda to: {"properties": {"a": {"$ref": to}}}),
    "items": lambda n: of_definitions(n, lambda to: {"items": {"$ref": to}}),
    "conjunctions": lambda n: of_definitions(n, lambda to: {"allOf": [{"$ref": to}, {"$ref": to}]}),
    "alternatives": lambda n: of_definitions(n, lambda to: {"anyOf": [{"$ref": to}, {"type": "null"}]}),
    "options": lambda n: Grammar.regex("a?" * n),
    "groups": lambda n: Grammar.regex("(" * n + "a" + ")" * n),
    "parentheses": lambda n: Grammar.lark("start: " + "(" * n + '"a"' + ")" * n),
    "negations": lambda n: Grammar.lark("start: A\nA: " + "~(" * n + '"a"' + ")" * n),
}


def of_definitions(n: int, link: Callable[[str], object]) -> Grammar:
    """A chain of definitions, each of which refers to the next."""
    links = {str(i): link(f"#/$defs/{i + 1}") for i in range(n)}
    return Grammar.json({"$ref": "#/$defs/0", "$defs": {**links, str(n): {"type": "string"}}})


def longest(kind: str, most: int) -> Grammar:
    """A grammar of a kind with at most `most` characters, and at least five sixths of that.

    Links become longer with the digits of their numbers, so the last steps are short.
    """
    links, grammar = 10, CHAINS[kind](10)
    for goal in (0.8, 0.96):
        while grammar.num_characters < 0.9 * goal * most:
            links = int(links * min(4.0, goal * most / grammar.num_characters))
            grammar = CHAINS[kind](links)
    assert 5 * most <= 6 * grammar.num_characters <= 6 * most
    return grammar


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize(
    "most", [UNTRIED_CHARACTERS, pytest.param(40_000, marks=pytest.mark.full), MOST_GRAMMAR_CHARACTERS]
)
def test_a_grammar_of_any_depth_is_compiled_or_refused_quickly(kind: str, most: int) -> None:
    """In a thread, as in a server. A stack overflow would end this process, and all tests with it.

    Quickly by the processor time of this thread and of the trial's process: others may keep both waiting.
    """
    grammar, outcome, taken_s = longest(kind, most), list[str](), list[float]()
    trials_s = lambda: sum(os.times()[2:4])  # noqa: E731 - of processes that have ended

    def attempt() -> None:
        began_s = time.thread_time() + trials_s()
        try:
            Matchers(requests().spelled_tokens).matcher(grammar)
            outcome.append("")
        except InvalidGrammar as error:
            outcome.append(str(error))
        taken_s.append(time.thread_time() + trials_s() - began_s)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(PATIENCE_S)
    assert outcome, "it still compiles"
    assert taken_s[0] < 10 * LIMIT_S


@pytest.mark.parametrize("kind", CHAINS)
def test_grammars_compiled_without_a_trial_need_less_than_half_of_the_stack(kind: str) -> None:
    """Shown by a trial with a stack of half the size."""
    matchers = Matchers(requests().spelled_tokens)
    source = json.dumps({"grammars": matchers._sources(longest(kind, UNTRIED_CHARACTERS), "start")})
    assert problem_of_trial(source, 512, {1: "<s>"}) != TOO_MUCH


def test_a_grammar_that_is_too_deep_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidGrammar, match=TOO_MUCH):
        Matchers(requests().spelled_tokens).matcher(CHAINS["rules"](10_000))


def test_long_ordinary_grammars_pass_and_work_like_short_ones() -> None:
    schema = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(900)}}
    assert len(json.dumps(schema)) > 5 * UNTRIED_CHARACTERS
    padding = "// " + "a" * UNTRIED_CHARACTERS + "\n"
    matchers = Matchers(requests().spelled_tokens)
    for grammar in (Grammar.json(schema), Grammar.choice([f"choice {i}" for i in range(900)])):
        assert matchers.matcher(grammar).mask().any()
    for text in ('start: "a" <s>', "start: <s> /b*/", "start: <[300-310]>"):
        short, long = Grammar.lark(text), Grammar.lark(padding + text)
        assert (matchers.matcher(short).mask() == matchers.matcher(long).mask()).all()
    with pytest.raises(InvalidGrammar, match="nothing"):
        matchers.matcher(Grammar.lark(padding + "start: nothing"))


@pytest.mark.parametrize("pattern", ["(a{9}){9}", "a*b"])
def test_a_grammar_whose_masks_take_long_is_not_cached(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cached masks in llguidance may take 100 MB. It can still be used, and so can others."""
    matchers, grammar = Matchers(requests().spelled_tokens), Grammar.regex(pattern)
    monkeypatch.setattr(module, "HEAVY_S", math.inf)
    light = matchers.matcher(Grammar.regex("a*"))
    first = matchers.matcher(grammar)
    assert first is matchers.matcher(grammar)
    monkeypatch.setattr(module, "HEAVY_S", 0.0)
    mask = first.fork().mask()
    monkeypatch.setattr(module, "HEAVY_S", math.inf)
    again = matchers.matcher(grammar)
    assert again is not first
    assert (again.mask() == mask).all()
    assert light is matchers.matcher(Grammar.regex("a*"))


def test_memory_of_failed_requests_is_freed() -> None:
    """Although their errors, which hold the matchers, are in reference cycles."""
    llm, left = LLM(str(TARGET), dtype="float32"), list[weakref.ref[Matcher]]()
    gc.disable()
    try:
        for number in range(2):
            grammar = Grammar.regex(f"((((a{{50}}){{50}}){{50}}){{{50 + number}}})")
            with pytest.raises(ForerunError):
                llm.generate("a", SamplingParams(max_tokens=20, grammar=grammar))
            left.append(weakref.ref(next(reversed(llm.requests.matchers._kept.values())).matcher))  # type: ignore[arg-type]
        llm.requests.matchers.matcher(Grammar.regex("a"))
        assert [each() for each in left] == [None] * 2
    finally:
        gc.enable()
