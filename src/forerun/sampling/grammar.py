"""Grammar: the form that an answer must have, written as a JSON schema, a regular expression or a Lark grammar.

`matcher.py` compiles it, and `constraint.py` decides which tokens it allows after a text.
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
MOST_GRAMMAR_CHARACTERS = 200_000  # a schema of this length takes a second to compile
FORMS = "use Grammar.json, Grammar.json_object, Grammar.regex, Grammar.lark or Grammar.choice"


@no_type_check  # so that tests with run-time type checks reach the checks below, which users see
@dataclass(frozen=True, slots=True)
class Grammar:
    """What the entire text of an answer must match; the answer may end only where it does.

    `text` is a JSON schema, a regular expression or a Lark grammar, as llguidance reads it: its documentation lists the
    keywords and the syntax. `whitespace`: whether JSON may have blanks and line breaks between its parts. In a Lark
    grammar `@name` stands for the grammar of this name in `parts`; all names, of nested parts too, must differ. Raises
    InvalidGrammar for values of a wrong type; a grammar that cannot be compiled raises it when a request is made.
    """

    kind: GrammarKind
    text: str
    whitespace: bool = True
    parts: tuple[tuple[str, Grammar], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidGrammar(f"{shown(self.kind)} is not a kind of grammar: {FORMS}.")
        if not isinstance(self.text, str):
            raise InvalidGrammar(f"{shown(self.text)} must be a string: {FORMS}.")
        if not isinstance(self.whitespace, bool):
            raise InvalidGrammar(f"whitespace: {shown(self.whitespace)} must be True or False.")
        if self.num_characters > MOST_GRAMMAR_CHARACTERS:
            raise InvalidGrammar(f"it has {self.num_characters} characters: use at most {MOST_GRAMMAR_CHARACTERS}.")

    @property
    def num_characters(self) -> int:
        """Number of characters of the grammar and its parts."""
        return len(self.text) + sum(part.num_characters for _, part in self.parts)

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str, *, whitespace: bool = True) -> Grammar:
        """JSON that matches a schema, which is given as parsed JSON or as its text."""
        value: Any = schema
        if isinstance(schema, str):
            try:
                value = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InvalidGrammar(f"the schema {shown(schema)} is not valid JSON ({error}).") from error
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
        """Text that matches a regular expression from its start to its end; look-around is not supported."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str, **parts: Grammar) -> Grammar:
        """Text that a Lark grammar derives from its rule `start`; `@name` in it is one of the `parts`."""
        return cls("lark", grammar, parts=tuple(parts.items()))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
        if not is_list or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidGrammar(f"the choice {shown(texts)} must be a list of strings, none of them empty.")
        return cls("lark", "start: " + " | ".join(map(quoted, texts)))

    def behind(self, closing: str, opening: str = "") -> Grammar:
        """Any text that ends with `closing`, such as reasoning between tags, and then text that matches this grammar.

        If `opening` is given, the first part is optional and starts with it; otherwise it has been started already.
        """
        begin = f"before? @answer\nbefore: {quoted(opening)} closed" if opening else "closed @answer"
        rules = f"start: {begin}\nclosed: any BLANKS?\nany[lazy]: TEXT {quoted(closing)}\nTEXT: /(.|\\n)*/"
        return Grammar.lark(f"{rules}\nBLANKS: /[ \\n]{{1,4}}/", answer=self)


def quoted(text: str) -> str:
    """A text as a string literal of Lark."""
    return json.dumps(text, ensure_ascii=False)
