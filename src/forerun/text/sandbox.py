"""Sandbox: the program that renders chat templates, and the Jinja environment in which it renders them.

A chat template is a program from an untrusted source. Jinja's immutable sandbox gives it access to its own values only,
but a single expression can run for hours without returning to Python code. So this file runs in a process of its own,
with limits of processor time and memory that the system enforces; `text/renderer.py` starts it. It imports only the
standard library and jinja2, so that the process starts fast and stays small.
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
MOST_MEMORY = 1 << 30  # bytes of this process; a prompt of MOST_TEXT non-ASCII characters needs half of it
MOST_COMPILED = 16  # compiled templates in the cache
MOST_WORDS = 1000  # characters of an error message


class Refused(jinja2.TemplateError):
    """The template called raise_exception, by which it refuses a conversation."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja with the names, filters and whitespace rules that transformers gives to chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
        self.filters["tojson"] = to_json
        self.globals |= {"raise_exception": refuse, "strftime_now": today, "dict": Dicts(), "namespace": PublicNames}
        self.compiled = lru_cache(MOST_COMPILED)(self.from_string)

    def answer(self, source: str, values: dict[str, Any] | None) -> tuple[str, str]:
        """Render a template, or only compile it if `values` is None; returns a word and a text.

        ("text", prompt) on success, ("refused", message) if the template refuses the conversation, and otherwise
        ("does not parse" or "fails", the error). Raises nothing but MemoryError.
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
        except Exception as error:  # a template, and jinja's compiler of it, can raise any error
            return verb, words_of(error)[:MOST_WORDS]


class GenerationBlock(Extension):
    """The block `{% generation %}`, which marks the model's own text for training; a prompt gets its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's content, as a scope of variables."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Dicts:
    """The `dict` of templates: makes dicts, without giving access to the type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        """A dict from the arguments of `dict`."""
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """A dict of these keys with one value."""
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
    """Plain JSON; jinja's own filter escapes HTML, unlike the prompts that models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def today(form: Any) -> str:
    """The current date and time in a strftime format; a template may pass any value."""
    return datetime.now().strftime(form)


def refuse(message: object) -> NoReturn:
    """The template function raise_exception, which refuses a conversation."""
    raise Refused(str(message))


def rendered(template: jinja2.Template, values: dict[str, Any]) -> str:
    """The text of a template. Raises TemplateError as soon as the text exceeds MOST_TEXT characters."""
    pieces, length = [], 0
    for piece in template.generate(values):
        pieces.append(piece)
        length += len(piece)
        if length > MOST_TEXT:
            raise jinja2.TemplateError(f"it writes more than {MOST_TEXT} characters")
    return "".join(pieces)


def words_of(error: Exception) -> str:
    """The message of a template's error; for other errors the type and the message."""
    if isinstance(error, jinja2.TemplateError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


def limit_memory() -> None:
    """Limit this process's memory, and switch off core dumps, if the system supports it."""
    with suppress(ImportError, OSError, ValueError):  # a lower limit may be in force already
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def limit_time(limit_s: float) -> None:
    """Have the system end this process after `limit_s` seconds of processor time; 0 removes the limit.

    A signal handler in Python would run only after the current expression has ended.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, limit_s)


def respond(sandbox: Sandbox) -> bool:
    """Read a request and write its answer, each a line of JSON; False at the end of the input.

    A request is the limit of processor time in seconds and the arguments of `Sandbox.answer`; the answer is its result.
    A process that exceeds the limit of time or memory ends without an answer. No data of a request is kept.
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
    """Answer requests until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # these are for the parent, whose end closes the input
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may ignore or block it
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    limit_memory()
    sandbox = Sandbox()
    while respond(sandbox):
        pass
