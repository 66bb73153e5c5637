"""Grammars of calls: what makes an answer call, in the form that the model's template asks for.

Arguments match their schema. In forms that write every argument by itself, text stands as it is and everything else is
JSON; what a schema says of text beside its choices, length and pattern cannot be kept there, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from forerun.errors import InvalidGrammar
from forerun.limits import shown
from forerun.sampling.grammar import MOST_GRAMMAR_CHARACTERS, Grammar, quoted
from forerun.serve.calls import KEY, CallForm, CallKind
from forerun.serve.parameters import DEFINITIONS, MOST_ALTERNATIVES, Room, Schema, object_of, parameters_of, required_of

MOST_CALLS = 16  # of one answer that must call
REMARKS = {"title", "description", "default", "examples", "deprecated", "$comment", *DEFINITIONS}
OF_OBJECTS = REMARKS | {"type", "properties", "required", "additionalProperties", "$schema", "$id"}
OF_TEXT = REMARKS | {"type", "enum", "const", "pattern", "minLength", "maxLength"}
SLASH = re.compile(r"(\\.)|/", re.DOTALL)  # or what is escaped already
ANY = "ANY: /(.|\\n)*/"
Parts = dict[str, Grammar]


def call_grammar(
    form: CallForm, arguments: Mapping[str, Schema | None], special: Mapping[str, int], *, free: bool, several: bool
) -> Grammar:
    """The grammar of an answer that calls one of these functions, or several.

    If it is `free`, it is any text, in which what begins as a call is one. A function without a schema takes any
    arguments. `special` tokens are no text.
    """
    parts: Parts = {}
    rules = [RULES[form.kind](form, i, name, schema, parts) for i, (name, schema) in enumerate(arguments.items())]
    which = "which: " + " | ".join(f"call_{i}" for i in range(len(rules)))
    start = alone(form, free) if not form.opening else between(form, special, free=free, several=several)
    key = f"key: {spelled(form.key, special)}"
    return Grammar.lark("\n".join([*start, which, *rules, key, ANY]), **parts)


def alone(form: CallForm, free: bool) -> list[str]:
    """The rules of an answer that is a call as a whole."""
    return ["start: which | TEXT?", r"TEXT: /[ \n\t]*[^ \n\t{](.|\n)*/"] if free else ["start: which"]


def between(form: CallForm, special: Mapping[str, int], *, free: bool, several: bool) -> list[str]:
    """The rules of an answer with calls between tags."""
    opening, closing, tag = form.opening, form.closing, form.tag
    others = f'(", " which){{0,{MOST_CALLS - 1}}}' if several else ""
    body = f'/ ?\\[/ which {others} "]"' if form.listed else "which"
    rest = f"{lark(opening.removeprefix(tag))} {body} {spelled(closing, special)}"
    if not free:
        more = f' ("\\n"? call){{0,{MOST_CALLS - 1}}}' if several and not form.listed else ""
        return [f"start: call{more}", f"call: {spelled(tag, special)} {rest}"]
    start = f"start: call{'*' if several else '?'} TEXT?"
    if tag in special:
        return [start, f"call: TEXT? {spelled(tag, special)} {rest}", r"TEXT: /(.|\n)+/"]
    text = rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{regex(tag)}(.|\n)*/"
    return [start, f"call: begun {rest}", f"begun[lazy]: ANY {quoted(tag)}", text]


def object_rule(form: CallForm, i: int, name: str, schema: Schema | None, parts: Parts) -> str:
    """A call as an object."""
    parts[f"arguments_{i}"] = of_object(schema)
    head = f'{{"name": {quoted(name)}, "{form.key}": '
    return f'call_{i}: {quoted(head)} @arguments_{i} "}}"'


def named_rule(form: CallForm, i: int, name: str, schema: Schema | None, parts: Parts) -> str:
    """A call as a name and an object."""
    parts[f"arguments_{i}"] = of_object(schema)
    return f"call_{i}: {quoted(name)} key @arguments_{i}"


def of_object(schema: Schema | None) -> Grammar:
    """All arguments as one object, which they are whatever a schema says."""
    return Grammar.json({**(schema or {}), "type": "object"})


def tagged_rule(form: CallForm, i: int, name: str, schema: Schema | None, parts: Parts) -> str:
    """A call as a name and parameters, in the order of the schema."""
    of_object(schema)  # one that is too long for a grammar is not read
    ending = form.value[1].strip()
    rules = [f"until_{i}[lazy]: ANY {quoted(ending)}"]
    whole = {} if schema is None else object_of(schema)
    if unkept := whole.keys() - OF_OBJECTS:
        raise unserved(form, f"{shown(min(unkept))} of the arguments of {shown(name)}")
    room = Room()
    parameters = {} if schema is None else parameters_of(schema, room)
    if room.num_members < 0:
        raise unserved(form, f"all that the references in the arguments of {shown(name)} stand for")
    required = [] if schema is None else required_of(schema)
    uses, size = [], 0
    if not parameters and whole.get("additionalProperties") is not False:
        uses.append(f"any_{i}*")
        head = f"{quoted(form.parameter[0])} /[^<>\\n]+/ {quoted(form.parameter[1] + form.value[0])}"
        rules.append(f"any_{i}: {head} until_{i} {lark(form.value[1].partition(ending)[2])}")
    for k, (key, alternatives) in enumerate(parameters.items()):
        if not KEY.fullmatch(key):
            raise unserved(form, f"the name {shown(key)}")
        if len(alternatives) > MOST_ALTERNATIVES:
            raise unserved(form, f"more than {MOST_ALTERNATIVES} alternatives of {shown(key)}")
        values = [text_rule(form, f"{i}_{k}_{j}", leaf, rules) for j, leaf in enumerate(alternatives) if is_text(leaf)]
        if not values:
            definitions = {word: schema[word] for word in DEFINITIONS if schema and word in schema}
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
    return "\n".join([f"call_{i}: {head} {' '.join(uses)} {lark(form.last)}", *rules])


def is_text(leaf: Schema) -> bool:
    """Whether an alternative of a parameter is text as it stands."""
    return bool(leaf.get("type", "string") == "string")


def text_rule(form: CallForm, place: str, leaf: Schema, rules: list[str]) -> str:
    """Text as a value, with what stands behind it."""
    end, ending = form.value[1], form.value[1].strip()
    if unkept := leaf.keys() - OF_TEXT:
        raise unserved(form, f"{shown(min(unkept))} of a text")
    choices = leaf.get("enum", [leaf["const"]] if "const" in leaf else None)
    if isinstance(choices, list):
        return " | ".join(quoted(f"{choice}{end}") for choice in choices if isinstance(choice, str))
    forms = [] if "pattern" not in leaf else [searched(str(leaf["pattern"]))]
    if "minLength" in leaf or "maxLength" in leaf:
        forms.append(f"(?s:.{{{leaf.get('minLength', 0)},{leaf.get('maxLength', '')}}})")
    if not forms:
        return f"until_{place.partition('_')[0]} {lark(end.partition(ending)[2])}"
    written = " & ".join(f"/{SLASH.sub(lambda part: part[1] or chr(92) + '/', each)}/" for each in forms)
    rules.append(f"TEXT_{place}: {written} & ~/(.|\\n)*{regex(ending)}(.|\\n)*/")
    rules.append(f"ENDED_{place}: TEXT_{place} {quoted(end)}")
    return f"ENDED_{place}"


def searched(pattern: str) -> str:
    """A pattern that a text contains, as one that it matches from its beginning to its end."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    behind = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    return f"{before}({pattern.removeprefix('^') if behind else pattern.removeprefix('^')[:-1]}){behind}"


def unserved(form: CallForm, what: str) -> InvalidGrammar:
    """The error for a schema that a form cannot keep."""
    return InvalidGrammar(f"{what} cannot be kept in calls in the form of {form.name}: leave it out.")


def regex(text: str) -> str:
    """A text as a regular expression in a Lark grammar."""
    return re.escape(text).replace("/", "\\/")


def lark(text: str) -> str:
    """A text as Lark writes it; nothing for none."""
    return quoted(text) if text else ""


def spelled(tag: str, special: Mapping[str, int]) -> str:
    """A tag with the blanks around it as Lark writes it, be it a token of its own or text; nothing for none."""
    if (name := tag.strip()) not in special:
        return lark(tag)
    before, _, behind = tag.partition(name)
    return f"{lark(before)} <[{special[name]}]> {lark(behind)}".strip()


RULES: Mapping[CallKind, Callable[[CallForm, int, str, Schema | None, Parts], str]] = {
    "object": object_rule,
    "named": named_rule,
    "tagged": tagged_rule,
}
