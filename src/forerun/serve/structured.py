"""Structured output: the fields of a body that constrain its answer, as grammars of the library.

This file translates OpenAI's `response_format` and `text.format`, and vLLM's `structured_outputs` and `guided_*`. The
grammar is compiled here, so that the error for an invalid one names its field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.errors import InvalidGrammar, MissingPackage
from forerun.limits import shown
from forerun.llm import LLM
from forerun.sampling.grammar import Grammar
from forerun.serve.parts import AnswerForm
from forerun.serve.problems import MISSING, UNSERVED, refused, renamed
from forerun.serve.tools import ToolUse

FORMATS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", ...}'
FORMS: Mapping[str, Callable[[Any, bool], Grammar]] = {  # vLLM's, by the names that structured_outputs has
    "json": lambda value, blanks: Grammar.json(value, whitespace=blanks),
    "regex": lambda value, _: Grammar.regex(value),
    "choice": lambda value, _: Grammar.choice(value),
    "grammar": lambda value, _: Grammar.lark(value),
    "json_object": lambda _, blanks: Grammar.json_object(whitespace=blanks),
}
GUIDED = {f"guided_{name}": name for name in FORMS}
FORMAT_PARENTS = ("text", "output_config")  # fields with a format, of responses and of messages
FORMAT_FIELDS = ("response_format", *FORMAT_PARENTS, "structured_outputs", *GUIDED)


def form_of(body: Mapping[str, Any]) -> tuple[str, Grammar] | None:
    """(field, grammar) of a body; None for free text. Raises ApiError if several fields have one."""
    forms = [(name, grammar) for name in FORMAT_FIELDS if name in body and (grammar := grammar_of(name, body[name]))]
    if len(forms) > 1:
        raise refused(forms[1][0], f"{forms[0][0]} constrains the answer too: leave out one of the two.")
    return forms[0] if forms else None


def grammar_of(field: str, value: Any) -> Grammar | None:
    """The grammar of one field; None for free text."""
    try:
        if field == "response_format":
            return format_grammar(field, value)
        if field in FORMAT_PARENTS:
            return format_grammar(f"{field}.format", value["format"]) if value.get("format") is not None else None
        if field == "structured_outputs":
            return structured(value)
        return FORMS[GUIDED[field]](value, True) if value is not False else None
    except InvalidGrammar as error:
        raise renamed(error, field) from error


def format_grammar(field: str, value: Any) -> Grammar | None:
    """The grammar of a format: text, any JSON, or a schema, which is in `schema` or `json_schema.schema`."""
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise refused(field, f"{shown(value)} is not served here: use {FORMATS}.")
    inner, schema = value.get("json_schema"), value.get("schema")
    name = f"{field}.schema" if inner is None else f"{field}.json_schema.schema"
    if inner is not None and schema is not None:
        raise refused(f"{field}.json_schema", f"{field}.schema is a schema too: leave out one of the two.")
    schema = schema if inner is None else inner.get("schema")
    if kind == "text" and (schema is not None or inner is not None):
        raise refused(name, 'a schema has no effect on a text: use "type": "json_schema", or leave it out.')
    if schema is None:
        if kind == "json_schema" or inner is not None:
            raise refused(name.removesuffix(".schema"), "there is no schema: give one, as an object.", MISSING)
        return Grammar.json_object() if kind == "json_object" else None
    if not isinstance(schema, dict | bool):
        raise refused(name, f"{shown(schema)} is not an object.")
    return Grammar.json(schema)


def structured(value: Any) -> Grammar | None:
    """The grammar of vLLM's `structured_outputs`."""
    forms = [name for name in FORMS if value.get(name) is not None and value[name] is not False]
    if len(forms) != 1:
        raise refused("structured_outputs", f"give exactly one of {', '.join(FORMS)}.")
    return FORMS[forms[0]](value[forms[0]], not value.get("disable_any_whitespace"))


def answer_grammar(body: Mapping[str, Any], tools: ToolUse | None, answer: AnswerForm, llm: LLM) -> Grammar | None:
    """The compiled grammar of a complete answer, from the body's format field or its tools; None for free text."""
    form = form_of(body)
    required = tools is not None and tools.mode == "required"
    calls = None if tools is None else tools.grammar(answer.special, answer.begun or "")
    if calls is not None and (form is None or required):
        if form is not None:
            raise refused(form[0], "a required tool call constrains the answer too: leave out one of the two.")
        form = "tools", calls
    if form is None:
        return None
    complete = form[1] if form[1] is calls and answer.begun is not None else answer.around(form[1])
    return compiled(form[0], complete, llm)


def compiled(field: str, grammar: Grammar, llm: LLM) -> Grammar:
    """Compile the grammar of a complete answer and return it. Raises ApiError, naming the field, if it is invalid."""
    try:
        llm.requests.matchers.matcher(grammar)
    except InvalidGrammar as error:
        raise renamed(error, field) from error
    except MissingPackage as error:
        raise refused(field, str(error), UNSERVED) from error
    return grammar
