"""Calls of every form are found however the text is cut, and all other text stays as the model wrote it."""

import itertools
import json
import random
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ChatTemplateError
from forerun.serve.calls import FORMS, HERMES, LLAMA, call_of, object_call, parse_json
from forerun.serve.parts import AnswerForm, AnswerSplitter, ReasoningTags
from forerun.serve.problems import ApiError
from forerun.serve.template_forms import call_form
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET
from serve.call_templates import HERMES as HERMES_TEMPLATE
from serve.call_templates import NAMED, TEMPLATES, answer, parts, written

TOKENIZER = Tokenizer.load(TARGET)
SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "list": {"type": "array"}}}
FUNCTIONS: dict[str, Any] = {"weather": SCHEMA, "weather_2": {}, 'say "hi"': {}}
ROME = {"city": "Rome"}
TEXTS = ["Well.", " é 😀 ", "\n", "  ", "<", "a < b", "{}", '"', "\\", "</tool_call>", "[", "</", "\n\n x"]
BEGUN = {  # by form: texts that begin like a call and are none
    "Hermes": ['<tool_call>{"name": "weather", ', '<tool_call>\n{"name": "o"}</tool_call>', '<tool_call>{"a": "'],
    "Qwen3-Coder": ["<tool_call>\n<function=other>\n</function>", "<tool_call>\n<function=weather>\nx", "<tool_call>{"],
    "GLM-4.5": ["<tool_call>other\n</tool_call>", "<tool_call>weather\n<arg_key>city</arg_key> x", "<tool_call>we"],
    "Mistral": ["[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]weather[ARGS] no", "[TOOL_CALLS]weather {", "[TOOL"],
    "Mistral's list": ['[TOOL_CALLS] [{"name": "weather", ', '[TOOL_CALLS][{"name": "other"}]', "[TOOL_CALLS] [] "],
    "Nemotron Nano 2": ['<TOOLCALL>[{"name": "weather", ', '<TOOLCALL>[{"name": "other"}]</TOOLCALL>', "<TOOLCALL>[]"],
}  # fmt: skip


@pytest.mark.parametrize("name", BEGUN)
def test_texts_with_calls_and_partial_calls_are_split_alike_however_they_are_cut(name: str) -> None:
    """If no text begins like a call, parts are all calls, and the texts between them without blanks next to calls."""
    dice, form, call = random.Random(name), answer(name, FUNCTIONS), written(TOKENIZER, name, ("weather", ROME))
    for number in range(60):
        pieces = dice.choices([call, call, *TEXTS, *(BEGUN[name] if number % 2 else ())], k=dice.randint(1, 7))
        text = "".join(pieces)
        whole = parts(form, [text])
        for cuts in (range(len(text)), *(sorted(dice.choices(range(len(text) + 1), k=3)) for _ in range(4))):
            assert parts(form, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == whole, text
        texts = re.split(rf"\s*{re.escape(call.strip())}\s*", text)
        expected = [part for each in texts for part in (("call", ("weather", ROME)), ("content", each))]
        if number % 2 == 0:
            assert whole == [(kind, what) for kind, what in expected[1:] if what], text
        if not any(kind == "call" for kind, _ in whole):
            assert whole == [("content", text)]


def hermes_oracle(text: str) -> list[tuple[str, Any]]:
    """The parts of an entire Hermes text, found with Python's JSON decoder."""
    found: list[tuple[str, Any]] = []
    content, at, behind = "", 0, False
    while (place := text.find("<tool_call>", at)) >= 0:
        begin = place + len("<tool_call>")
        start = begin + len(text[begin:]) - len(text[begin:].lstrip())
        content += text[at:place]
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(text, start)
            call = object_call(value, FUNCTIONS)
        except ValueError:
            call, end = None, start
        rest = text[end:].lstrip()
        if call is None or (rest and not rest.startswith("</tool_call>")):
            content, at = content + "<tool_call>", begin
            continue
        found += [
            ("content", content.strip() if behind else content.rstrip()),
            ("call", (call.name, json.loads(call.arguments))),
        ]
        content, behind = "", True
        at = len(text) - len(rest.removeprefix("</tool_call>").lstrip())
    content += text[at:]
    found.append(("content", content.lstrip() if behind else content))
    return [(kind, what) for kind, what in found if what]


HOSTILE = [
    "<tool_call>", "</tool_call>", "{", "}", '"', "\\", '"name": "weather"', '"arguments": ', ", ", ":", "[", "]",
    "null", "{}", " ", "\n", "a", '{"name": "weather"}',
    '{"name": "weather", "arguments": {"city": "</tool_call>}\\"{"}}',
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(HOSTILE), max_size=14).map("".join), st.lists(st.integers(0, 200), max_size=4))
def test_hermes_calls_are_those_that_a_decoder_of_json_finds(text: str, cuts: list[int]) -> None:
    form = answer(HERMES, FUNCTIONS)
    expected = hermes_oracle(text)
    assert parts(form, [text]) == expected
    assert parts(form, list(text)) == expected
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parts(form, [text[a:b] for a, b in itertools.pairwise(places)]) == expected


plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
hostile_text = st.one_of(plain_text, st.lists(st.sampled_from([*HOSTILE, "<|call|>", "<function="])).map("".join))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(-1e300, 1e300) | hostile_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
objects = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), values, max_size=4)
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def weather_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """A function whose schema these arguments match."""
    types = {key: {"type": KINDS.get(type(value), "null")} for key, value in arguments.items()}
    return {"weather": {"type": "object", "properties": types}}


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(st.data(), objects)
def test_a_call_written_by_a_template_is_parsed_as_that_call(name: str, data: st.DataObject, arguments: Any) -> None:
    calls = [("weather", each) for each in ([arguments] if name in ("Harmony", "Llama 3") else [arguments, {}])]
    text = written(TOKENIZER, name, *calls)
    assert parts(answer(name, weather_of(arguments)), pieces_of(text, data)) == [("call", call) for call in calls], text


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    """A text, cut at some places or at all."""
    places = st.lists(st.integers(0, len(text)), max_size=6).map(sorted) | st.just(range(len(text)))
    return [text[a:b] for a, b in itertools.pairwise([0, *data.draw(places), len(text)])]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(st.data(), objects, st.sampled_from(["", "", "x", " so", "}", '"', "<", "\n", "</", "\\"]))
def test_a_damaged_call_is_parsed_alike_in_any_pieces_and_loses_no_text(
    name: str, data: st.DataObject, arguments: Any, instead: str
) -> None:
    """Cut off, with letters lost or replaced: it is a call, or unchanged text."""
    text, form = written(TOKENIZER, name, ("weather", arguments)), answer(name, weather_of(arguments))
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    damaged = text[:start] + instead + text[end:]
    whole = parts(form, [damaged])
    assert parts(form, pieces_of(damaged, data)) == whole
    if any(kind == "call" for kind, _ in whole):
        return
    if name == "Harmony":  # whose heads are no text
        body = damaged.partition("<|message|>")[2].partition("<|call|>")[0]
        assert body in "".join(what for _, what in whole)
    else:
        assert whole == ([("content", damaged)] if damaged else [])


ARGUMENTS: list[tuple[str, Any]] = [  # an object next to the name, and the arguments; None: it is no call
    ('"arguments": {"a": 1}', {"a": 1}),
    ('"parameters": {"a": 1}', {"a": 1}),
    ('"arguments": null', {}),
    ('"parameters": null', {}),
    ('"arguments": "{\\"a\\": 1}"', {"a": 1}),
    ('"arguments": ""', {}),
    ('"id": "1", "type": "function"', {}),
    ('"arguments": {"a": 1}, "id": 7, "other": 0', {"a": 1}),
    ('"arguments": {"a": "x\ny"}', {"a": "x\ny"}),
    ('"arguments": {"a": "\\ud83d"}', {"a": "\ud83d"}),
    ('"args": {"a": 1}', None),
    ('"arguments": {}, "parameters": {"a": 1}', None),
    ('"arguments": [1]', None),
    ('"arguments": 3', None),
    ('"arguments": "no JSON"', None),
    ('"arguments": "[1]"', None),
    ('"arguments": {"a": NaN}', None),
    ('"arguments": {"a": 1e999}', None),
    (f'"arguments": {"[" * 9000}{"]" * 9000}', None),
    (f'"arguments": {{"a": {"9" * 5000}}}', None),
]


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
@pytest.mark.parametrize(("written", "arguments"), ARGUMENTS, ids=lambda value: str(value)[:30])
def test_a_call_has_the_arguments_that_the_model_wrote_or_stays_text(form: Any, written: str, arguments: Any) -> None:
    text = f'{form.opening}{{"name": "weather", {written}}}{form.closing}'
    expected = ("content", text) if arguments is None else ("call", ("weather", arguments))
    assert parts(answer(form, FUNCTIONS), [text]) == [expected]
    call = object_call(parse_json(f'{{"name": "weather", {written}}}'), FUNCTIONS)
    assert call is None or call.arguments.encode(), "it can be sent"


def test_a_function_that_was_not_offered_is_no_call() -> None:
    assert call_of("other", {}, FUNCTIONS) is None
    assert call_of(None, {}, FUNCTIONS) is None
    text = '<tool_call>{"name": "weather_3", "arguments": {}}</tool_call>'
    assert parts(answer(HERMES, FUNCTIONS), [text]) == [("content", text)]


LLAMA_TEXTS: list[tuple[str, list[Any]]] = [
    ('{"name": "weather", "parameters": {"city": "Rome"}}', [ROME]),
    ('<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}\n', [ROME]),
    (' {"name": "weather", "parameters": {"city": "Rome"}}; {"name": "weather_2"} ', [ROME, {}]),
    ('[{"name": "weather", "parameters": {"city": "Rome"}}]', [ROME]),
]


@pytest.mark.parametrize(("text", "arguments"), LLAMA_TEXTS)
def test_an_answer_that_must_be_a_call_is_one_in_full_or_none(text: str, arguments: list[Any]) -> None:
    form = answer(LLAMA, FUNCTIONS)
    for pieces in ([text], list(text)):
        assert [what[1] for kind, what in parts(form, pieces) if kind == "call"] == arguments
    for wrong in (f"{text} so", f"So {text}", text.rstrip()[:-1], text.replace("weather", "other")):
        assert parts(form, list(wrong)) == parts(form, [wrong]) == [("content", wrong)]


VALUES: list[tuple[Any, str, Any]] = [  # the schema of a parameter, what is written, and the value
    ({"type": "string"}, "7", "7"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, "  a\n b ", "  a\n b "),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
    ({"type": "integer"}, "7", 7),
    ({"type": "integer"}, "seven", "seven"),
    ({"type": "number"}, " 7.5 ", 7.5),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "array"}, '["a"]', ["a"]),
    ({"type": "object"}, '{"a": {"b": 1}}', {"a": {"b": 1}}),
    ({"$ref": "#/$defs/days"}, "7", 7),
    ({"$ref": "#/$defs/loop"}, "7", "7"),
    ({"$ref": "#/nowhere"}, "7", "7"),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["1", 2]}, "2", "2"),
    ({"const": 3}, "3", 3),
    ({"allOf": [{"type": "integer"}]}, "7", 7),
    ({}, "7", "7"),
    (True, "7", "7"),
]


@pytest.mark.parametrize(("schema", "written", "value"), VALUES)
def test_a_parameter_is_text_unless_its_schema_says_otherwise(schema: Any, written: str, value: Any) -> None:
    definitions = {"days": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    functions = {"f": {"type": "object", "properties": {"a": schema}, "$defs": definitions}}
    qwen = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    glm = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    assert parts(answer("Qwen3-Coder", functions), [qwen]) == [("call", ("f", {"a": value}))]
    assert parts(answer("GLM-4.5", functions), [glm]) == [("call", ("f", {"a": value}))]


def test_end_markers_inside_of_values_are_part_of_the_values() -> None:
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome</parameter> and\n</parameter>\n"
        '<parameter=list>\n["</parameter></function>"]\n</parameter>\n</function>\n</tool_call>'
    )
    call = ("weather", {"city": "Rome</parameter> and", "list": ["</parameter></function>"]})
    for cut in range(len(text)):
        assert parts(answer("Qwen3-Coder", FUNCTIONS), [text[:cut], text[cut:]]) == [("call", call)]


def test_calls_in_reasoning_are_no_calls() -> None:
    call = written(TOKENIZER, "Hermes", ("weather", ROME)).strip()
    text = f"<think>I could write {call}.</think>\n{call}"
    form = answer(HERMES, FUNCTIONS, reasoning=ReasoningTags("<think>", "</think>"))
    expected = [("reasoning", f"I could write {call}."), ("call", ("weather", ROME))]
    for cut in range(len(text)):
        assert parts(form, [text[:cut], text[cut:]]) == expected


ENDLESS: list[tuple[str, ...]] = [  # forms, what is repeated, and what stands behind it
    ("Hermes", '<tool_call>{"a": "'), ("Hermes", "<tool_call>{"), ("Hermes", " "), ("Hermes", "<"),
    ("Qwen3-Coder", "<tool_call>\n<function=weather>\n<parameter=city>\n"),
    ("Qwen3-Coder", "<tool_call><function=weather><parameter=city></parameter>"),
    ("Qwen3-Coder", "<tool_call><function=weather></function></tool_call"),
    ("Qwen3-Coder", "<tool_call><function=weather><parameter=city>A</parameter>", "</parameter></function>."),
    ("Qwen3-Coder", "<tool_call><function=weather><parameter=list>[", "]</parameter></function>."),
    ("Qwen3-Coder", "<tool_call><function=weather><parameter=a></parameter><parameter=list>",
     "</parameter></function>."),
    ("GLM-4.5", "<tool_call>weather<arg_key>a</arg_key><arg_value>", "</arg_value><arg_key>a</arg_key>"),
    ("GLM-4.5", "<tool_call>weather<arg_key>"), ("GLM-4.5", "<tool_call>weather<arg_key>a</arg_key><arg_value>"),
    ("Mistral", '[TOOL_CALLS]weather[ARGS]{"'), ("Llama 3", '{"a":"'), ("Llama 3", '["\\'),
    ("Harmony", "<|channel|>"), ("Harmony", "<|channel|>final<|message|>"), ("Harmony", "<|start|>"),
]  # fmt: skip


@pytest.mark.parametrize("case", ENDLESS, ids=str)
def test_splitting_takes_time_in_proportion_to_the_text(case: tuple[str, ...]) -> None:
    """Quadratic time would be 64 times as long for 8 times the text."""

    name, unit, *end = case

    def time_of(size: int, pieces: Any) -> float:
        text, form = unit * (size // len(unit)) + "".join(end), answer(name, FUNCTIONS)
        started = time.process_time()
        parts(form, pieces(text))
        return time.process_time() - started

    for pieces in (list, lambda text: [text]):
        short = min(time_of(5_000, pieces) for _ in range(2))
        assert time_of(40_000, pieces) < 24 * short + 0.05


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_call_form_is_recognised_by_what_a_template_writes(name: str) -> None:
    assert call_form(TOKENIZER, TEMPLATES[name]) is NAMED[name]
    assert {form.name for form in FORMS} == set(TEMPLATES)


UNKNOWN = [
    ("{{ messages }} Answer with <tool_call>.", "ignores tools"),
    ("{{ raise_exception('never') }}{{ tools }}", "ignores tools"),
    ("{{ tools }}{{ messages[0].content }}", "format of calls is unknown"),
    (HERMES_TEMPLATE.replace("\n<tool_call>", "<call>"), "format of calls is unknown"),
    (HERMES_TEMPLATE.replace("f.arguments", "f.nothing"), "format of calls is unknown"),
    (
        "{{ tools }}{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('none') }}{% endif %}{% endfor %}",
        "format of calls is unknown: use a model with one of the formats Hermes, Qwen3-Coder",
    ),
]


@pytest.mark.parametrize(("template", "why"), UNKNOWN)
def test_a_template_of_no_known_form_is_refused(template: str, why: str) -> None:
    for _ in range(2):
        with pytest.raises(ApiError, match=why) as refusal:
            call_form(TOKENIZER, template)
        assert refusal.value.param == "tools"


def test_a_template_that_fails_without_calls_is_a_named_error() -> None:
    for template in ("{% if", "{{ tools }}{{ nothing.more }}"):
        with pytest.raises(ChatTemplateError):
            call_form(TOKENIZER, template)


def test_instructions_in_a_template_do_not_determine_its_call_form() -> None:
    """Templates of calls in tags show an example of the tags, and those of one form may mention another."""
    shown = HERMES_TEMPLATE.replace("For a call", 'Not {"name": "x", "parameters": {}} nor <function=x>, but')
    assert call_form(TOKENIZER, shown) is HERMES
    example = TEMPLATES["Qwen3-Coder"].replace("<|end|>", '<|end|><tool_call>{"name": "x"}</tool_call>')
    assert call_form(TOKENIZER, example) is NAMED["Qwen3-Coder"]
    alternating = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('a user first') }}{% endif %}" + HERMES_TEMPLATE
    )
    alone = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + HERMES_TEMPLATE
    assert call_form(TOKENIZER, alternating) is call_form(TOKENIZER, alone) is HERMES


def test_an_answer_without_tools_is_all_text() -> None:
    text = written(TOKENIZER, "Hermes", ("weather", ROME))
    assert parts(AnswerForm(), list(text)) == [("content", text)]
    splitter = AnswerSplitter(AnswerForm())
    assert ["".join(part.text for part in splitter.feed(piece)) for piece in ("a ", "\n", "b")] == ["a ", "\n", "b"]
