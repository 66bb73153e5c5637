"""Grammars of calls in every form accept exactly texts that are parsed as calls matching their schemas."""

import time
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import InvalidGrammar
from forerun.sampling.grammar import Grammar
from forerun.sampling.params import SamplingParams
from forerun.serve.problems import ApiError
from forerun.serve.tools import ToolUse
from kit.engines import plain
from serve.call_templates import NAMED, TEMPLATES, answer, parts
from serve.call_templates import written as written_by_template

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"$ref": "#/$defs/days"},
        "note": {"type": ["string", "null"], "description": "Anything."},
        "code": {"type": "string", "pattern": "^[a-z]{2}/", "maxLength": 4},
        "sure": {"type": "boolean"},
        "all": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
FUNCTIONS = {"weather": WEATHER, "now": {"type": "object", "properties": {}, "additionalProperties": False}, "free": {}}
CALLS: list[tuple[str, dict[str, Any], bool]] = [
    ("weather", {"city": "Rome", "days": 3}, True),
    ("weather", {"city": "Oslo", "days": 9, "note": "A <b> \"note\"\nof two lines.", "code": "ab/c"}, True),
    ("weather", {"city": "Oslo", "days": 1, "note": None, "sure": True, "all": ["a", '"}]']}, True),
    ("weather", {"city": "Bonn", "days": 3}, False),
    ("weather", {"city": "Rome", "days": 10}, False),
    ("weather", {"city": "Rome"}, False),
    ("weather", {"city": "Rome", "days": 3, "code": "abc/"}, False),
    ("weather", {"city": "Rome", "days": 3, "code": "ab/cd"}, False),
    ("weather", {"city": "Rome", "days": 3, "sure": "no"}, False),
    ("weather", {"city": "Rome", "days": 3, "more": 1}, False),
    ("now", {}, True),
    ("now", {"a": "b"}, False),
    ("free", {}, True),
    ("free", {"any": "thing"}, True),
    ("never", {}, False),
]  # fmt: skip
NAMES = [name for name in TEMPLATES if name != "Harmony"]


def use(name: str, mode: str = "required", **options: Any) -> ToolUse:
    """The functions, to be called in a form."""
    return ToolUse(FUNCTIONS, NAMED[name], mode, **{"several": True} | options)  # type: ignore[arg-type]


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as a template writes them, without ids, which are not generated."""
    text = written_by_template(plain().tokenizer, name, *calls).strip()
    return text.replace("[CALL_ID]a1b2c3d4e", "").replace(', "id": "a1b2c3d4e"', "")


def accepts(grammar: Grammar | None, text: str) -> bool:
    """Whether an answer may be this text."""
    assert grammar is not None
    ids = plain().tokenizer.encode_inside(text)
    matcher = plain().requests.matchers.matcher(grammar).fork()
    return matcher.read(ids) == len(ids) and matcher.accepts


@pytest.mark.parametrize("name", NAMES)
def test_a_grammar_accepts_the_calls_that_match_their_schemas(name: str) -> None:
    must = use(name).grammar({})
    may = use(name, "auto", strict=frozenset({"weather", "now"})).grammar({})
    for function, arguments, right in CALLS:
        text = written(name, (function, arguments))
        assert accepts(must, text) == right, text
        assert accepts(may, text) == right, text
        if right:
            assert parts(answer(name, FUNCTIONS), [text]) == [("call", (function, arguments))]
    assert not accepts(must, "Sure.")
    assert accepts(may, "Sure.")
    assert accepts(may, "")
    assert not accepts(must, "")


@pytest.mark.parametrize("name", NAMES[:-1])
def test_one_or_several_calls_may_follow_text(name: str) -> None:
    one, two = CALLS[0][:2], ("now", {})
    both = written(name, one, two)
    assert accepts(use(name).grammar({}), both)
    assert not accepts(use(name, several=False).grammar({}), both)
    strict = frozenset({"weather"})
    may = use(name, "auto", strict=strict).grammar({})
    assert accepts(may, f"Sure. {both} So.")
    assert not accepts(use(name, "auto", strict=strict, several=False).grammar({}), both)
    assert not accepts(may, f"Sure. {NAMED[name].tag} no")
    assert use(name, "auto").grammar({}) is None


@pytest.mark.parametrize("name", NAMES)
def test_answers_drawn_under_a_grammar_are_parsed_as_calls(name: str) -> None:
    """With a model that was not trained for calls, complete answers consist of calls only."""
    drawn = {
        "weather": WEATHER | {"properties": dict(list(WEATHER["properties"].items())[:2])},
        "now": FUNCTIONS["now"],
    }
    grammar = ToolUse(drawn, NAMED[name], "required", False).grammar({})
    params = [SamplingParams(grammar=grammar, max_tokens=400, seed=seed, temperature=1.2) for seed in range(4)]
    whole = 0
    for result in plain().generate(["Once"] * len(params), params):
        output = result.outputs[0]
        if output.finish_reason == "stop":
            whole += 1
            ((kind, (function, arguments)),) = parts(answer(name, FUNCTIONS), [output.text])
            assert kind == "call"
            jsonschema.validate(arguments, FUNCTIONS[function])
    assert whole


@pytest.mark.parametrize("pattern", [r"^a\/b$", "^a/b$", r"^a[/]b$", r"^a\x2fb$"])
@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM-4.5"])
def test_a_pattern_may_have_slashes_in_any_spelling(name: str, pattern: str) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}}}
    grammar = ToolUse({"f": schema}, NAMED[name], "required", False).grammar({})
    assert accepts(grammar, written(name, ("f", {"a": "a/b"})))
    assert not accepts(grammar, written(name, ("f", {"a": "ab"})))


@pytest.mark.parametrize("kind", [str, int])
def test_all_of_many_choices_may_be_made(kind: Any) -> None:
    schema = {"properties": {"a": {"enum": [kind(i) for i in range(200)]}}}
    grammar = ToolUse({"f": schema}, NAMED["Qwen3-Coder"], "required", False).grammar({})
    for i, right in ((0, True), (63, True), (64, True), (199, True), (200, False)):
        assert accepts(grammar, written("Qwen3-Coder", ("f", {"a": kind(i)}))) == right


@pytest.mark.parametrize("siblings", [{}, {"description": "One of them."}])
@pytest.mark.parametrize("inside", [{}, {"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"type": ["string"]}])
def test_one_definition_may_be_referenced_very_often(siblings: Any, inside: Any) -> None:
    """The definition is not copied for every reference, which would take gigabytes."""
    often = {f"p{i}": {"$ref": "#/$defs/d", **siblings} for i in range(8_000)}
    schema = {"$defs": {"d": {f"k{i}": 0 for i in range(8_000)} | inside}, "properties": often}
    began_s = time.thread_time()
    with pytest.raises(ApiError) as refusal:
        ToolUse({"f": schema}, NAMED["Qwen3-Coder"], "required", True).grammar({})
    text = "<tool_call><function=f><parameter=p1>7</parameter></function></tool_call>"
    assert [kind for kind, _ in parts(answer("Qwen3-Coder", {"f": schema}), [text])] == ["call"]
    assert time.thread_time() - began_s < 1
    assert len(str(refusal.value)) < 300


UNKEPT = [
    ({"properties": {"a": {"type": "string", "format": "date"}}}, "'format' of a text"),
    ({"properties": {"a": {"type": "string"}}, "minProperties": 1}, "'minProperties' of the arguments of 'f'"),
    ({"properties": {"a>b": {"type": "string"}}}, "the name 'a>b'"),
    ({"properties": {"a": {"anyOf": [{"const": i} for i in range(65)]}}}, "more than 64 alternatives of 'a'"),
    (
        {
            "$defs": {"d": {f"k{i}": 0 for i in range(2_000)}},
            "properties": {f"p{i}": {"$ref": "#/$defs/d", "title": ""} for i in range(2_000)},
        },
        "too large with its references resolved",
    ),
    ({"anyOf": [{"properties": {}, "patternProperties": {}}]}, "'patternProperties'"),
]


@pytest.mark.parametrize(("schema", "why"), UNKEPT)
def test_a_schema_that_a_call_form_cannot_enforce_is_refused(schema: Any, why: str) -> None:
    tools = ToolUse({"f": schema}, NAMED["Qwen3-Coder"], "required", True)
    with pytest.raises(ApiError, match=f"{why}.*cannot be enforced in calls in the format of Qwen3-Coder") as refusal:
        tools.grammar({})
    assert refusal.value.param == "tools"


WORDS = [
    "type", "enum", "const", "anyOf", "allOf", "$ref", "$defs", "a", "properties", "required", "pattern", "minLength",
]  # fmt: skip
odd = st.recursive(
    st.sampled_from([None, True, 3, "string", "integer", "#/$defs/a", "^a|b$", [], {}, ["string", "null"]]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["type", "properties", "required", "anyOf", "$ref", "$defs", "enum"]), odd))
def test_no_schema_causes_a_server_error(schema: Any) -> None:
    """A schema that means nothing is refused when a grammar is made or compiled, or takes any text."""
    text = "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
    assert [kind for kind, _ in parts(answer("Qwen3-Coder", {"f": schema}), [text])] == ["call"]
    with suppress(ApiError, InvalidGrammar):
        tools = ToolUse({"f": schema}, NAMED["Qwen3-Coder"], "required", True)
        grammar = tools.grammar({})
        assert grammar is not None
        plain().requests.matchers.matcher(grammar)
