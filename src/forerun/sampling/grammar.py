"""Grammar: the form that a request wants its answer to have, as a value.

This file decides how a grammar is written: as a JSON schema, a regular expression or a Lark grammar. `matcher.py` says
whether it can be compiled, and `constraint.py` what it allows after a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, no_type_check

from forerun.errors import InvalidGrammar
from forerun.limits import shown

GrammarKind = Literal["json", "regex", "lark"]
KINDS = ("json", "regex", "lark")
MOST_GRAMMAR_CHARACTERS = 200_000  # a schema this long takes a second to compile
FORMS = "use Grammar.json, Grammar.json_object, Grammar.regex, Grammar.lark or Grammar.choice"


@no_type_check  # run-time type checks in tests would forestall its own, which users meet
@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole text of an answer must match; the answer may end only where it does.

    `text` is a JSON schema, a regular expression or a Lark grammar, as llguidance reads it: its documentation lists the
    keywords and the syntax. `whitespace` says whether JSON may have blanks and line breaks between its parts. In a Lark
    grammar `@name` stands for the grammar of that name in `parts`, whose names differ, those of their own parts too.
    Raises InvalidGrammar for what is none of these; whether it can be compiled is said when a request is made.
    """

    kind: GrammarKind
    text: str
    whitespace: bool = True
    parts: tuple[tuple[str, Grammar], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidGrammar(f"{shown(self.kind)} is no kind of grammar: {FORMS}.")
        if not isinstance(self.text, str):
            raise InvalidGrammar(f"{shown(self.text)} must be a string: {FORMS}.")
        if not isinstance(self.whitespace, bool):
            raise InvalidGrammar(f"whitespace: {shown(self.whitespace)} must be True or False.")
        if self.num_characters > MOST_GRAMMAR_CHARACTERS:
            raise InvalidGrammar(f"it has {self.num_characters} characters: use at most {MOST_GRAMMAR_CHARACTERS}.")

    @property
    def num_characters(self) -> int:
        """Of all its parts."""
        return len(self.text) + sum(part.num_characters for _, part in self.parts)

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str, *, whitespace: bool = True) -> Grammar:
        """JSON that a schema describes; `schema` is parsed JSON or its text."""
        value: Any = schema
        if isinstance(schema, str):
            try:
                value = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InvalidGrammar(f"the schema {shown(schema)} is no JSON ({error}).") from error
        if not isinstance(value, Mapping | bool):
            raise InvalidGrammar(f"the schema {shown(schema)} must be an object, such as {{'type': 'object'}}.")
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidGrammar(f"the schema {shown(schema)} cannot be written as JSON ({error}).") from error
        return cls("json", text, whitespace)

    @classmethod
    def json_object(cls, *, whitespace: bool = True) -> Grammar:
        """Any JSON object."""
        return cls.json({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression from its beginning to its end, without look-around."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str, **parts: Grammar) -> Grammar:
        """Text that a Lark grammar derives from its rule `start`, in which `@name` is one of the `parts`."""
        return cls("lark", grammar, parts=tuple(parts.items()))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
        if not is_list or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidGrammar(f"the choice {shown(texts)} must be a list of strings, none of them empty.")
        return cls("lark", "start: " + " | ".join(map(quoted, texts)))

    def behind(self, closing: str, opening: str = "") -> Grammar:
        """This grammar behind a text of any kind that ends with `closing`, such as reasoning between tags.

        With `opening` the answer begins with that text or with what the grammar allows; without, it has begun already.
        """
        begin = f"before? @answer\nbefore: {quoted(opening)} closed" if opening else "closed @answer"
        rules = f"start: {begin}\nclosed: any BLANKS?\nany[lazy]: TEXT {quoted(closing)}\nTEXT: /(.|\\n)*/"
        return Grammar.lark(f"{rules}\nBLANKS: /[ \\n]{{1,4}}/", answer=self)


def quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)
