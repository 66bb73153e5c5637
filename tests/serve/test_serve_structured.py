"""Structured output by fields of OpenAI and vLLM: answers have the requested form, and mistakes name their field."""

import json
import re
from typing import Any

import jsonschema
import pytest

from forerun.request import ChatOptions
from forerun.sampling.grammar import Grammar
from forerun.sampling.params import SamplingParams
from forerun.serve import schema, structured
from forerun.serve.body import served_fields
from forerun.serve.parts import AnswerForm, ReasoningTags
from forerun.serve.problems import ApiError
from forerun.serve.structured import compiled, form_of
from kit.engines import plain
from kit.servers import Running, serving

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "age"],
    "additionalProperties": False,
}
TEMPLATE = "{{ messages[0].content }}"
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
server = serving()


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"response_format": FORMAT}, Grammar.json(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar.json(SCHEMA)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, Grammar.json(SCHEMA)),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, Grammar.json(SCHEMA)),
        ({"text": {"verbosity": "medium"}}, None),
        ({"text": {}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, Grammar.json(SCHEMA)),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            Grammar.json_object(whitespace=False),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"guided_json": SCHEMA}, Grammar.json(SCHEMA)),
        ({"guided_choice": ["a"]}, Grammar.choice(["a"])),
        ({"guided_grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
        ({"guided_json_object": False}, None),
        ({}, None),
    ],
)
def test_fields_are_translated_to_grammars(given: dict[str, Any], grammar: Grammar | None) -> None:
    found = form_of(given)
    assert (found and found[1]) == grammar
    assert found is None or found[0] in given


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "there is no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema", "no schema"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {}}},
            "response_format.json_schema",
            "is a schema too",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "no effect on a text"),
        ({"response_format": {"type": "json_object", "schma": {}}}, "response_format.schma", "did you mean 'schema'"),
        ({"response_format": {"type": "json_object", "schema": []}}, "response_format.schema", "is not an object"),
        ({"response_format": {"type": "xml"}}, "response_format", "not served here"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
            "is not an object",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "there is no schema"),
        ({"text": {"other": 1}}, "text.other", "text has no field"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "is not served here: use one of json, regex",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "list of strings"),
        ({"guided_regex": 3}, "guided_regex", "must be a string"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "leave out one"),
    ],
)
def test_mistakes_name_their_field(given: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refusal:
        form_of(served_fields(given, "responses" if "text" in given else "chat"))
    assert refusal.value.param == field


def test_the_table_of_names_has_every_form() -> None:
    assert tuple(structured.FORMS) == schema.FORMS


def test_a_grammar_that_cannot_be_compiled_names_its_field_and_reasoning_comes_first() -> None:
    with pytest.raises(ApiError, match=r"guided_regex: llguidance refuses it: .*unclosed group") as refusal:
        compiled("guided_regex", Grammar.regex("("), plain())
    assert refusal.value.param == "guided_regex"
    form, tags = Grammar.regex("a"), ReasoningTags("<think>", "</think>")
    assert compiled("guided_regex", form, plain()) == AnswerForm().around(form) == form
    assert AnswerForm(tags).around(form) == form.behind("</think>", "<think>")
    opened = ReasoningTags("<think>", "</think>", opened=True)
    assert AnswerForm(opened).around(form) == form.behind("</think>")


def test_openais_client_gets_the_requested_form(server: Running) -> None:
    client, extra = server.client(), {"chat_template": TEMPLATE}
    asked: Any = {"model": "stories", "messages": [{"role": "user", "content": "Once"}], "seed": 5, "max_tokens": 400}
    answer = client.chat.completions.create(**asked, response_format=FORMAT, extra_body=extra).choices[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    prompt = plain().chat_prompt(asked["messages"], ChatOptions(chat_template=TEMPLATE))
    params = SamplingParams(seed=5, max_tokens=400, grammar=Grammar.json(SCHEMA))
    assert plain().generate(prompt, params, speculation=False)[0].outputs[0].text == answer.message.content
    chunks = client.chat.completions.create(**asked, response_format=FORMAT, stream=True, extra_body=extra)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.message.content
    response = client.responses.create(
        model="stories",
        input="Once",
        max_output_tokens=400,
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        extra_body=extra | {"seed": 5},
    )
    assert response.output_text == answer.message.content
    assert response.text.format.type == "json_schema"
    regex = client.completions.create(
        model="stories", prompt="Once", n=2, max_tokens=40, extra_body={"structured_outputs": {"regex": "(ab){3,5}c"}}
    )
    assert all(re.fullmatch("(ab){3,5}c", choice.text) for choice in regex.choices)
