"""Grammars as values, and the tokens they allow: compared with finite languages, for queries in any order."""

import builtins
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config import Speculation
from forerun.engine.request_check import RequestChecker
from forerun.errors import InvalidGrammar, InvalidRequest, MissingPackage, RequestFailed, UnknownKeyword
from forerun.request import Request
from forerun.sampling.constraint import Constraint
from forerun.sampling.grammar import MOST_GRAMMAR_CHARACTERS, Grammar
from forerun.sampling.matcher import KEPT_GRAMMARS, Matcher, Matchers
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET

STORIES = Tokenizer.load(TARGET)
VOCAB, EOS = 512, 2
SPELLED = STORIES.byte_table().spelled
TEXTS = ["yes", "no", "yesterday", "a boy and a dog", "a boy\nand", 'say "hi"', "äöü", "no no"]


def requests(tokenizer: Tokenizer | None = STORIES) -> RequestChecker:
    return RequestChecker(tokenizer, VOCAB, 256, eos_ids=(EOS,), default=Speculation())


MADE = requests()


def constraint(grammar: Grammar, made: RequestChecker = MADE, **params: Any) -> Constraint:
    (sequence,) = made.sequences(Request.of([1, 403], SamplingParams(grammar=grammar, **params)))
    sequence.sampling()
    assert sequence.constraint is not None
    return sequence.constraint


def ids_at(matcher: Constraint, path: tuple[int, ...]) -> set[int] | None:
    """The ids that are allowed after a path; None where all are."""
    place = matcher.after(path)
    return None if place.mask is None else {token for token in range(VOCAB) if place.permits(token)}


def text_of(path: tuple[int, ...]) -> bytes:
    return b"".join(SPELLED[token] or b"" for token in path)


@pytest.mark.short("choice")
@pytest.mark.parametrize("grammar", [Grammar.choice(TEXTS), Grammar.regex("|".join(TEXTS))], ids=["choice", "regex"])
def test_allowed_are_continuations_in_the_language_and_the_end_token_after_a_complete_text(grammar: Grammar) -> None:
    """At every point of random walks; and each text is allowed in the tokenizer's spelling."""
    matcher, rng, whole = constraint(grammar), random.Random(1), [text.encode() for text in TEXTS]
    met = set()
    for _ in range(60):
        path: tuple[int, ...] = ()
        while (ids := ids_at(matcher, path)) is not None:
            written = text_of(path)
            going_on = {
                token
                for token in range(VOCAB)
                if SPELLED[token]
                and token not in STORIES.special_ids
                and any(text.startswith(written + (SPELLED[token] or b"")) for text in whole)
            }
            assert ids - {EOS} <= going_on
            assert ids - {EOS}, "a place where only the end can follow is complete"
            assert (EOS in ids) == (written in whole)
            path = (*path, rng.choice(sorted(ids)))
        assert path[-1] == EOS or matcher.after(path).complete
        met.add(text_of(tuple(token for token in path if token != EOS)))
    assert met <= set(whole)
    assert len(met) > 5
    for text in TEXTS:
        spelled = STORIES.encode_inside(text)
        for i, token in enumerate(spelled):
            assert matcher.after(tuple(spelled[:i])).permits(token), (text, i)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blueish"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([Grammar.json(SCHEMA), Grammar.regex(r"(a|the)( \w{2,5})*\.")]))
def test_the_order_of_queries_does_not_matter(seed: int, grammar: Grammar) -> None:
    """For branching and forbidden paths, and texts that grow or change, the result is that of a fresh constraint."""
    rng, matcher, answer = random.Random(seed), constraint(grammar), list[int]()
    for _ in range(40):
        path: tuple[int, ...] = ()
        for _ in range(rng.randrange(6)):
            ids = ids_at(matcher, path)
            lawful = ids and rng.random() < 0.9
            path = (*path, rng.choice(sorted(ids)) if lawful and ids else rng.randrange(VOCAB))
        fresh = constraint(grammar)
        fresh.follow([1, 403, *answer])
        assert ids_at(matcher, path) == ids_at(fresh, path)
        assert matcher.after(path).complete == fresh.after(path).complete
        assert matcher.forced(99) == fresh.forced(99)
        if rng.random() < 0.5:
            kept = path[: rng.randrange(len(path) + 1)]
            if all(matcher.after(kept[:i]).permits(token) for i, token in enumerate(kept)) and EOS not in kept:
                answer += kept
        elif rng.random() < 0.1:
            answer = []
        matcher.follow([1, 403, *answer])


def test_forced_tokens_are_those_without_an_alternative() -> None:
    matcher = constraint(Grammar.json(SCHEMA, whitespace=False))
    forced = matcher.forced(99)
    assert text_of(tuple(forced)).startswith(b'{"name":')
    for i, token in enumerate(forced):
        assert ids_at(matcher, tuple(forced[:i])) == {token}
    assert matcher.forced(2) == forced[:2]
    assert matcher.forced(0) == []
    assert constraint(Grammar.regex("[ab]c*")).forced(9) == []


def test_the_end_tokens_are_those_of_the_request() -> None:
    grammar = Grammar.regex("a*b?")
    a, b = STORIES.encode_inside("a")[0], STORIES.encode_inside("b")[0]
    assert EOS in (ids_at(constraint(grammar), (a,)) or ())
    assert EOS not in (ids_at(constraint(grammar, ignore_eos=True), (a,)) or ())
    stops = ids_at(constraint(grammar, ignore_eos=True, stop_token_ids=[300]), (a,))
    assert stops is not None
    assert 300 in stops
    for behind in ((a, EOS), (a, b), (a, 300), (a, EOS, a)):
        assert ids_at(constraint(grammar, stop_token_ids=[300]), behind) is None
    assert constraint(grammar).after((a, b)).complete
    assert constraint(grammar).completed_by([a, a, b, a]) == 3
    assert constraint(grammar).completed_by([a, EOS, b]) is None


def test_grammars_can_be_combined_and_applied_after_reasoning() -> None:
    made_of = Grammar.lark('start: "(" @one "," @two ")"', one=Grammar.regex("a+"), two=Grammar.json({"const": 7}))
    reasoned = made_of.behind("</think>", "<think>")
    for grammar, whole in (
        (made_of, ["(a,7)", "(aaa,7)"]),
        (reasoned, ["(aa,7)", "<think>(b</thin> </think>\n(a,7)"]),
        (made_of.behind("</think>"), ["no (", "</think>(a,7)"]),
    ):
        for text in whole:
            spelled = STORIES.encode_inside(text)
            matcher = constraint(grammar)
            assert all(matcher.after(tuple(spelled[:i])).permits(token) for i, token in enumerate(spelled)), text
            assert matcher.after(tuple(spelled)).complete == text.endswith("7)")
    assert constraint(made_of).after(tuple(STORIES.encode_inside("(b"))).mask is None, "forbidden"


def test_json_may_have_a_limited_number_of_blanks() -> None:
    matcher = constraint(Grammar.json({"type": "object"}))
    brace, line = STORIES.encode_inside("{")[0], STORIES.encode_inside("\n")[0]
    assert matcher.after((brace, *[line] * 31)).permits(line)
    assert not matcher.after((brace, *[line] * 32)).permits(line)
    assert not constraint(Grammar.json({"type": "object"}, whitespace=False)).after((brace,)).permits(line)


WRONG: list[tuple[Any, str]] = [
    (lambda: Grammar.json({"type": "obj"}), "Invalid type: obj"),
    (lambda: Grammar.json({"not": {"type": "string"}}), 'Unimplemented keys: \\["not"\\]'),
    (lambda: Grammar.json({"enum": []}), "Unsatisfiable schema"),
    (lambda: Grammar.json({"$ref": "http://example.org/x"}), "example.org"),
    (lambda: Grammar.regex("("), "unclosed group"),
    (lambda: Grammar.regex("(?=a)b"), "look-around"),
    (lambda: Grammar.regex(""), "allows no text at all"),
    (lambda: Grammar.lark("start: start"), "allows no text at all"),
    (lambda: Grammar.lark("start: x"), 'unknown name: "x"'),
    (lambda: Grammar.lark("x: /a/"), "no start rule"),
    (lambda: Grammar.json("{"), "is not valid JSON"),
    (lambda: Grammar.json([1]), "must be an object"),  # type: ignore[arg-type]
    (lambda: Grammar.json({"a": object()}), "cannot be written as JSON"),
    (lambda: Grammar.regex(b"a"), "must be a string"),  # type: ignore[arg-type]
    (lambda: Grammar.regex("a" * (MOST_GRAMMAR_CHARACTERS + 1)), "characters: use at most"),
    (lambda: Grammar.choice([]), "list of strings"),
    (lambda: Grammar("ebnf", "a"), "is not a kind of grammar"),  # type: ignore[arg-type]
    (lambda: Grammar("json", "true", 1), "whitespace: 1 must be"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "why"), WRONG)
def test_an_invalid_grammar_is_refused_with_the_reason(make: Any, why: str) -> None:
    with pytest.raises(InvalidGrammar, match=f"^grammar: .*{why}"):
        constraint(make())


def test_without_grammar_support_the_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidGrammar, match="this model has no tokenizer"):
        constraint(Grammar.regex("a"), requests(None))
    with pytest.raises(InvalidRequest, match=r"^grammar: 'a' cannot be served; use a Grammar, such as"):
        SamplingParams(grammar="a")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"structured_outputs: .* use grammar"):
        SamplingParams(structured_outputs={})  # type: ignore[call-arg]
    with pytest.raises(UnknownKeyword):
        SamplingParams(grammer=None)  # type: ignore[call-arg]
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackage, match=r"pip install 'forerun\[grammar\]'"):
        constraint(Grammar.regex("a"), requests())


def test_a_grammar_that_takes_too_much_work_fails_its_sequence_and_can_be_used_again() -> None:
    matcher = constraint(Grammar.lark('start: x\nx: "a" x | "a" x "b" | x x "a" | "a"' + ' | "a" x x' * 300))
    a = STORIES.encode_inside("a")[0]
    with pytest.raises(RequestFailed) as failed:
        matcher.after((a,) * 9)
    assert failed.value.seq_id == matcher.seq_id
    assert isinstance(failed.value.__cause__, InvalidGrammar)
    assert "Use a simpler grammar" in str(failed.value.__cause__)
    assert matcher.after(()).permits(a)


def test_a_grammar_that_takes_too_much_time_gets_no_drafts_and_then_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher, clock, a = constraint(Grammar.regex("a*")), iter(range(10**6)), STORIES.encode_inside("a")[0]
    assert not matcher.slow
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 0.2)
    matcher.after(())
    assert matcher.slow
    with pytest.raises(RequestFailed) as failed:
        [matcher.after((a,) * count) for count in range(1, 100)]
    assert "200 ms per token" in str(failed.value.__cause__)


def test_compiled_grammars_are_cached_and_shared_by_threads() -> None:
    made, grammar = requests(), Grammar.json(SCHEMA)
    first = made.matchers.matcher(grammar)
    assert made.matchers.matcher(Grammar.json(json.dumps(SCHEMA))) is first

    def ask(_: int) -> set[int] | None:
        matcher = constraint(grammar, made)
        return ids_at(matcher, tuple(matcher.forced(3)))

    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(ask, range(8))]
    assert found == found[:1] * 8
    for i in range(KEPT_GRAMMARS):
        made.matchers.matcher(Grammar.regex(f"a{{{i + 1}}}"))
    assert made.matchers.matcher(grammar) is not first


def test_different_grammars_are_compiled_concurrently_and_equal_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, both, honest, asked = requests(), threading.Barrier(2, timeout=300), Matchers._compiled, list[str]()

    def compiled(matchers: Matchers, grammar: Grammar) -> Matcher:
        asked.append(grammar.text)
        both.wait()  # neither is compiled before both have begun
        return honest(matchers, grammar)

    monkeypatch.setattr(Matchers, "_compiled", compiled)
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(lambda number: made.matchers.matcher(Grammar.regex("ab"[number % 2] * 3)), range(6))]
    assert sorted(asked) == ["aaa", "bbb"]
    assert [found[number] is found[number % 2] for number in range(6)] == [True] * 6
    assert found[0] is not found[1]
