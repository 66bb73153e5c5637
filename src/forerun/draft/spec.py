"""The grammar of drafter specifications: `name`, `name:argument` or `name[drafter, drafter, ...]`, nested at will.

Examples: `ngram`, `ngram:5`, `model:path/to/checkpoint`, `cascade[suffix,model:A]`. An argument ends at a comma or a
bracket; one that contains such a character is put in double quotes, and a double quote in it is written twice. The
table in `forerun/drafters.py` lists the names, and each drafter's plan checks its argument.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NoReturn

from forerun.errors import CodeRefused, UnknownDrafter

MOST_NESTED = 32  # lists of drafters; far more would end in a RecursionError
PYTHON = "python"  # the drafter in a Python file, which is executed
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
BARE = re.compile(r'[^,\[\]"]+')
QUOTED = re.compile(r'"((?:[^"]|"")*)"')


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A parsed specification: the drafter's name, its argument if any, and the drafters that it is made of."""

    name: str
    argument: str | None = None
    members: tuple[DraftSpec, ...] = ()

    def __str__(self) -> str:
        members = f"[{','.join(map(str, self.members))}]" if self.members else ""
        if self.argument is None:
            return self.name + members
        bare = BARE.fullmatch(self.argument) and self.argument == self.argument.strip()
        argument = self.argument if bare else '"' + self.argument.replace('"', '""') + '"'
        return f"{self.name}:{argument}"


def parse_spec(text: str) -> DraftSpec:
    """Parse a specification; raises UnknownDrafter with the position of the mistake and the fix."""
    parser = Parser(text)
    spec = parser.drafter()
    if parser.ahead == ",":
        parser.fail("a list of drafters needs a name and brackets, as in mix[ngram,model:DIR]")
    if parser.ahead == "/":
        parser.fail("a folder or a hub id follows the drafter's name, as in model:owner/name")
    if parser.ahead:
        parser.fail("remove it, or put an argument that holds brackets or commas in double quotes")
    return spec


def runs_code(spec: DraftSpec) -> bool:
    """Whether the drafter, or one that it is made of, runs a Python file."""
    return spec.name == PYTHON or any(map(runs_code, spec.members))


def refuse_code(spec: DraftSpec, source: str, fix: str) -> None:
    """Raise CodeRefused if the drafter, named by this source, would run a Python file."""
    if runs_code(spec):
        reason = "it would run a Python file, which only --draft or the argument draft may name"
        raise CodeRefused(f"{source} names the drafter {str(spec)!r}: {reason}: {fix}")


def with_class_names(spec: DraftSpec) -> DraftSpec:
    """The specification for reports: drafters in Python files are called by their class."""
    if spec.name == PYTHON and spec.argument is not None:
        return DraftSpec(spec.argument.rpartition(":")[2])
    return replace(spec, members=tuple(map(with_class_names, spec.members)))


class Parser:
    """Parses one specification from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.num_open = 0  # brackets

    @property
    def ahead(self) -> str:
        """The next character that is not a space; empty at the end."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def drafter(self) -> DraftSpec:
        """Parse one drafter with the drafters nested in it."""
        name = NAME.match(self.text, self.at) if self.ahead else None
        if name is None:
            self.fail("write a drafter's name here, in small letters, as in ngram or model:DIR")
        self.at = name.end()
        if self.ahead == ":":
            self.at += 1
            return DraftSpec(name.group(), argument=self.argument())
        return DraftSpec(name.group(), members=self.members() if self.ahead == "[" else ())

    def argument(self) -> str:
        """Parse the text after the colon; returns it without quotes."""
        if self.ahead == '"':
            match = QUOTED.match(self.text, self.at)
            if match is None:
                self.fail('close the quotation with "')
            self.at = match.end()
            return match.group(1).replace('""', '"')
        match = BARE.match(self.text, self.at) if self.ahead else None
        if match is None:
            self.fail("write the argument after the colon, or leave the colon out")
        self.at = match.end()
        return match.group().rstrip()

    def members(self) -> tuple[DraftSpec, ...]:
        """Parse the drafters between brackets, at least one."""
        members = []
        self.num_open += 1
        if self.num_open > MOST_NESTED:
            self.fail(f"nest at most {MOST_NESTED} lists of drafters")
        while self.ahead in ("[", ","):
            self.at += 1
            members.append(self.drafter())
            if self.ahead not in (",", "]"):
                self.fail("separate drafters by a comma and close the list with ]")
        self.at += 1
        self.num_open -= 1
        return tuple(members)

    def fail(self, fix: str) -> NoReturn:
        """Raise UnknownDrafter with the position, the text found there, and what to write."""
        here = f"{self.ahead!r}" if self.ahead else "the end"
        raise UnknownDrafter(f"draft specification {self.text!r}: {here} at position {self.at + 1}: {fix}")
