"""Sandbox: the program that renders chat templates, and the Jinja environment that it renders them in.

A chat template is a program from an untrusted source. Jinja's immutable sandbox gives it access to its own values only,
but one expression can compute for longer than the universe lasts without returning to Python. So this file runs in a
process of its own, with a limit of processor time and of memory that the system enforces; `text/renderer.py` starts it.
It imports nothing but the standard library and jinja2, so that a process starts fast and stays small.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_TEXT = 1 << 24  # characters of a prompt: several times what the longest context holds
MOST_MEMORY = 1 << 30  # bytes of this process; a prompt of MOST_TEXT characters that are no ASCII needs half of it
MOST_COMPILED = 16  # templates that are kept
MOST_WORDS = 1000  # characters of an error


class Refused(jinja2.TemplateError):
    """The template called raise_exception: it does not take this conversation."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja with the names, filters and whitespace rules that transformers gives to chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
        self.filters["tojson"] = to_json
        self.globals |= {"raise_exception": refuse, "strftime_now": today, "dict": Dicts(), "namespace": PublicNames}
        self.compiled = lru_cache(MOST_COMPILED)(self.from_string)

    def answer(self, source: str, values: dict[str, Any] | None) -> tuple[str, str]:
        """What becomes of a template with these values, or of compiling it where there are none: a word and a text.

        The word is "text" for a prompt, "refused" for what the template says against the conversation, and otherwise
        the end of a sentence that begins with the template. Raises MemoryError alone.
        """
        verb = "does not parse"
        try:
            template = self.compiled(source)
            verb = "fails"
            return "text", "" if values is None else rendered(template, values)
        except MemoryError:
            raise
        except Refused as error:
            return "refused", str(error)[:MOST_WORDS]
        except Exception as error:  # a template, and jinja's compiler at its mercy, can raise any
            return verb, words_of(error)[:MOST_WORDS]


class GenerationBlock(Extension):
    """`{% generation %}` marks the model's own words, for training; for a prompt it is its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        """The content, whose variables end with it."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Dicts:
    """The `dict` of templates: it makes dicts, and has nothing of the type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        """A dict, from what `dict` takes."""
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """A dict of keys with one value."""
        return dict.fromkeys(*args)


class PublicNames(Namespace):
    """The `namespace` of templates, without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # as jinja's own: a value may be named self
        names = dict(*args[1:], **values)
        for name in names:
            require_public(name)
        Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        require_public(name)
        super().__setitem__(name, value)


def require_public(name: object) -> None:
    """Raise SecurityError for a name that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"names of a namespace cannot begin with an underscore, as {name!r} does")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def today(form: Any) -> str:
    """The date and time, as strftime writes them; a template may give it anything."""
    return datetime.now().strftime(form)


def refuse(message: object) -> NoReturn:
    """raise_exception, by which a template says that it does not take a conversation."""
    raise Refused(str(message))


def rendered(template: jinja2.Template, values: dict[str, Any]) -> str:
    """The text of a template. Raises TemplateError where it is longer than MOST_TEXT, before all of it is written."""
    pieces, length = [], 0
    for piece in template.generate(values):
        pieces.append(piece)
        length += len(piece)
        if length > MOST_TEXT:
            raise jinja2.TemplateError(f"it writes more than {MOST_TEXT} letters")
    return "".join(pieces)


def words_of(error: Exception) -> str:
    """An error by its text, or by its kind where it has none or none that says it."""
    if isinstance(error, jinja2.TemplateError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


def limit_memory() -> None:
    """Bound this process's memory, and let it leave no image of it when it crashes, where the system can do that."""
    with suppress(ImportError, OSError, ValueError):  # a lower limit that is there already stays
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def limit_time(limit_s: float) -> None:
    """Have the system end this process once it has computed for so long; 0 takes the limit back.

    The system does it, not a handler in Python, which would wait for the expression to end.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, limit_s)


def respond(sandbox: Sandbox) -> bool:
    """Read a request, a line of JSON, and write its answer, another; False where there are no more.

    A request is the seconds of processor time that it may take, and what `Sandbox.answer` takes; its answer is what
    that gives. A process that has run out of time or memory ends without one. Nothing of a request is kept.
    """
    line = sys.stdin.buffer.readline()
    if not line:
        return False
    limit_s, request = json.loads(line)
    limit_time(limit_s)
    answer = json.dumps(sandbox.answer(*request), ensure_ascii=False).encode("utf-8", "surrogatepass")
    limit_time(0)
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()
    return True


def main() -> None:
    """Answer requests until there are no more."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for the parent: when that ends, so does the input here
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may have it ignored or blocked
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    limit_memory()
    sandbox = Sandbox()
    while respond(sandbox):
        pass
