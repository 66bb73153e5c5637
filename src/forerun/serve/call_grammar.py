"""Grammars of tool calls: constrain an answer to calls in the format of the model's chat template.

Arguments match their JSON schema. Tagged formats write each argument separately, strings as raw text and everything
else as JSON. For a raw string only the keywords enum, const, length and pattern can be enforced; others are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from forerun.errors import InvalidGrammar
from forerun.limits import shown
from forerun.sampling.grammar import MOST_GRAMMAR_CHARACTERS, Grammar, quoted
from forerun.serve.calls import KEY, CallForm
from forerun.serve.parameters import DEFINITIONS, MOST_LEAVES, CopyLimit, Schema, object_of, parameters_of, required_of

MOST_CALLS = 16  # in one answer that must call a tool
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment", *DEFINITIONS}
OBJECT_KEYWORDS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$schema", "$id"}
TEXT_KEYWORDS = ANNOTATIONS | {"type", "enum", "const", "pattern", "minLength", "maxLength"}
SLASH = re.compile(r"(\\.)|/", re.DOTALL)  # or any escaped character
ANY = "ANY: /(.|\\n)*/"
Parts = dict[str, Grammar]


def call_grammar(
    form: CallForm, arguments: Mapping[str, Schema | None], special: Mapping[str, int], *, free: bool, several: bool
) -> Grammar:
    """The grammar of an answer that calls one of these functions or, with `several`, more than one.

    If `free`, any text is allowed, but text that begins like a call must be a valid call. A function without a schema
    takes any arguments. `special` maps tags that are special tokens to their ids.
    """
    parts: Parts = {}
    rule = tagged_rule if form.kind == "tagged" else json_rule
    rules = [rule(form, i, name, schema, parts) for i, (name, schema) in enumerate(arguments.items())]
    which = "which: " + " | ".join(f"call_{i}" for i in range(len(rules)))
    if form.opening:
        start = tagged_start(form, special, free=free, several=several)
    else:  # the whole answer is one call
        start = ["start: which | TEXT?", r"TEXT: /[ \n\t]*[^ \n\t{](.|\n)*/"] if free else ["start: which"]
    key = f"key: {lark_tag(form.key, special)}"
    return Grammar.lark("\n".join([*start, which, *rules, key, ANY]), **parts)


def tagged_start(form: CallForm, special: Mapping[str, int], *, free: bool, several: bool) -> list[str]:
    """The start rules for a format with tags around calls."""
    opening, closing, tag = form.opening, form.closing, form.tag
    others = f'(", " which){{0,{MOST_CALLS - 1}}}' if several else ""
    body = f'/ ?\\[/ which {others} "]"' if form.listed else "which"
    rest = f"{lark_text(opening.removeprefix(tag))} {body} {lark_tag(closing, special)}"
    if not free:
        more = f' ("\\n"? call){{0,{MOST_CALLS - 1}}}' if several and not form.listed else ""
        return [f"start: call{more}", f"call: {lark_tag(tag, special)} {rest}"]
    start = f"start: call{'*' if several else '?'} TEXT?"
    if tag in special:
        return [start, f"call: TEXT? {lark_tag(tag, special)} {rest}", r"TEXT: /(.|\n)+/"]
    text = rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{lark_regex(tag)}(.|\n)*/"
    return [start, f"call: begun {rest}", f"begun[lazy]: ANY {quoted(tag)}", text]


def json_rule(form: CallForm, i: int, name: str, schema: Schema | None, parts: Parts) -> str:
    """The rule of a call whose arguments are a JSON object, after the name or in one object with it."""
    parts[f"arguments_{i}"] = of_object(schema)
    if form.kind == "named":
        return f"call_{i}: {quoted(name)} key @arguments_{i}"
    head = f'{{"name": {quoted(name)}, "{form.key}": '
    return f'call_{i}: {quoted(head)} @arguments_{i} "}}"'


def of_object(schema: Schema | None) -> Grammar:
    """The grammar of all arguments as one JSON object; the type in the schema is ignored."""
    return Grammar.json({**(schema or {}), "type": "object"})


def tagged_rule(form: CallForm, i: int, name: str, schema: Schema | None, parts: Parts) -> str:
    """The rules of a call written as a name and tagged parameters, in the order of the schema."""
    of_object(schema)  # raises for a schema that is too long
    schema = schema or {}
    ending = form.value[1].strip()
    rules = [f"until_{i}[lazy]: ANY {quoted(ending)}"]
    resolved = object_of(schema)
    if unsupported := resolved.keys() - OBJECT_KEYWORDS:
        raise unenforceable(form, f"{shown(min(unsupported))} of the arguments of {shown(name)}")
    limit = CopyLimit()
    parameters, required = parameters_of(schema, limit), required_of(schema)
    if limit.num_members < 0:
        raise unenforceable(form, f"the schema of {shown(name)}, which is too large with its references resolved,")
    uses, size = [], 0
    if not parameters and resolved.get("additionalProperties") is not False:
        uses.append(f"any_{i}*")
        head = f"{quoted(form.parameter[0])} /[^<>\\n]+/ {quoted(form.parameter[1] + form.value[0])}"
        rules.append(f"any_{i}: {head} until_{i} {lark_text(form.value[1].partition(ending)[2])}")
    for k, (key, alternatives) in enumerate(parameters.items()):
        if not KEY.fullmatch(key):
            raise unenforceable(form, f"the name {shown(key)}")
        if len(alternatives) > MOST_LEAVES:
            raise unenforceable(form, f"more than {MOST_LEAVES} alternatives of {shown(key)}")
        values = [text_rule(form, f"{i}_{k}_{j}", leaf, rules) for j, leaf in enumerate(alternatives) if is_text(leaf)]
        if not values:
            definitions = {word: schema[word] for word in DEFINITIONS if word in schema}
            parts[f"value_{i}_{k}"] = Grammar.json({**definitions, "anyOf": list(alternatives)})
            values = [f"@value_{i}_{k} {quoted(form.value[1])}"]
            size += parts[f"value_{i}_{k}"].num_characters
            if size > MOST_GRAMMAR_CHARACTERS:
                raise InvalidGrammar(f"it has more than {MOST_GRAMMAR_CHARACTERS} characters: write shorter schemas.")
        elif any(leaf.get("type") == "null" for leaf in alternatives):
            values.append(quoted(f"null{form.value[1]}"))
        rules.append(f"value_{i}_{k}: {' | '.join(values)}")
        head = f"{form.parameter[0]}{key}{form.parameter[1]}{form.value[0]}"
        rules.append(f"parameter_{i}_{k}: {quoted(head)} value_{i}_{k}")
        uses.append(f"parameter_{i}_{k}{'' if key in required else '?'}")
    head = quoted(f"{form.function[0]}{name}{form.function[1]}")
    return "\n".join([f"call_{i}: {head} {' '.join(uses)} {lark_text(form.last)}", *rules])


def is_text(leaf: Schema) -> bool:
    """Whether an alternative of a parameter is written as raw text."""
    return bool(leaf.get("type", "string") == "string")


def text_rule(form: CallForm, place: str, leaf: Schema, rules: list[str]) -> str:
    """The rule of a raw text value and the tag after it."""
    end, ending = form.value[1], form.value[1].strip()
    if unsupported := leaf.keys() - TEXT_KEYWORDS:
        raise unenforceable(form, f"{shown(min(unsupported))} of a text")
    choices = leaf.get("enum", [leaf["const"]] if "const" in leaf else None)
    if isinstance(choices, list):
        return " | ".join(quoted(f"{choice}{end}") for choice in choices if isinstance(choice, str))
    forms = [] if "pattern" not in leaf else [whole_match(str(leaf["pattern"]))]
    if "minLength" in leaf or "maxLength" in leaf:
        forms.append(f"(?s:.{{{leaf.get('minLength', 0)},{leaf.get('maxLength', '')}}})")
    if not forms:
        return f"until_{place.partition('_')[0]} {lark_text(end.partition(ending)[2])}"
    written = " & ".join(f"/{SLASH.sub(lambda part: part[1] or chr(92) + '/', each)}/" for each in forms)
    rules.append(f"TEXT_{place}: {written} & ~/(.|\\n)*{lark_regex(ending)}(.|\\n)*/")
    rules.append(f"ENDED_{place}: TEXT_{place} {quoted(end)}")
    return f"ENDED_{place}"


def whole_match(pattern: str) -> str:
    """A pattern that matches an entire text which contains a match of `pattern`, as JSON Schema defines it."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    behind = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    return f"{before}({pattern.removeprefix('^') if behind else pattern.removeprefix('^')[:-1]}){behind}"


def unenforceable(form: CallForm, what: str) -> InvalidGrammar:
    """The error for a schema that a tagged format cannot enforce."""
    return InvalidGrammar(f"{what} cannot be enforced in calls in the format of {form.name}: leave it out.")


def lark_regex(text: str) -> str:
    """A literal text as a regular expression of a Lark grammar."""
    return re.escape(text).replace("/", "\\/")


def lark_text(text: str) -> str:
    """A Lark string literal; empty for an empty text."""
    return quoted(text) if text else ""


def lark_tag(tag: str, special: Mapping[str, int]) -> str:
    """A tag and the blanks around it in Lark's notation, as a special token or as text; empty for an empty tag."""
    if (name := tag.strip()) not in special:
        return lark_text(tag)
    before, _, behind = tag.partition(name)
    return f"{lark_text(before)} <[{special[name]}]> {lark_text(behind)}".strip()
