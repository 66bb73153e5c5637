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
    keywords and the syntax. `whitespace` says whether JSON may have blanks and line breaks between its parts. Raises
    InvalidGrammar for what is none of these; whether it can be compiled is said when a request is made.
    """

    kind: GrammarKind
    text: str
    whitespace: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidGrammar(f"{shown(self.kind)} is no kind of grammar: {FORMS}.")
        if not isinstance(self.text, str):
            raise InvalidGrammar(f"{shown(self.text)} must be a string: {FORMS}.")
        if not isinstance(self.whitespace, bool):
            raise InvalidGrammar(f"whitespace: {shown(self.whitespace)} must be True or False.")
        if len(self.text) > MOST_GRAMMAR_CHARACTERS:
            raise InvalidGrammar(f"it has {len(self.text)} characters: use at most {MOST_GRAMMAR_CHARACTERS}.")

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str, *, whitespace: bool = True) -> Grammar:
        """JSON that a schema describes; `schema` is parsed JSON or its text."""
        given: Any = schema
        if isinstance(schema, str):
            try:
                given = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InvalidGrammar(f"the schema {shown(schema)} is no JSON ({error}).") from error
        if not isinstance(given, Mapping | bool):
            raise InvalidGrammar(f"the schema {shown(schema)} must be an object, such as {{'type': 'object'}}.")
        try:
            text = json.dumps(given, ensure_ascii=False, allow_nan=False)
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
    def lark(cls, grammar: str) -> Grammar:
        """Text that a Lark grammar derives from its rule `start`."""
        return cls("lark", grammar)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        given = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
        if not given or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidGrammar(f"the choice {shown(texts)} must be a list of strings, none of them empty.")
        return cls("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))
