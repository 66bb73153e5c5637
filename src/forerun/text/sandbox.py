"""Sandbox: runs a checkpoint's chat template, with bounds on what it may use.

A template is a program from an untrusted source. Jinja's immutable sandbox gives it access to its own values only; this
file also meters the work: every pass of a loop, call, filter, operator and output is charged for what it will make,
before it is made, so a template that makes too much ends in an error before memory runs out. Common methods and
filters are available; those that pad text to a width are not. A template can still use some seconds and some hundreds
of megabytes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_TEXT = 1 << 24  # characters of one value: several times what the longest context holds
MOST_WORK = 160_000_000  # characters that one rendering may make and read, steps included
STEP = 160  # characters that a step is charged as: both take a microsecond at most
CALL = 4 * STEP  # a call, more than a step
ITEM = 32  # characters that an item of a list is charged as
STR_METHODS = frozenset(
    """
    capitalize casefold count endswith find format index join lower lstrip partition removeprefix removesuffix replace
    rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
    """.split()  # noqa: SIM905 (a list of them fills a page)
)
PADDING_FILTERS = ("batch", "center", "filesizeformat", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
STEP_FILTER, SCAN_FILTER, CONCAT_FILTER = "forerun_step", "forerun_scan", "forerun_concat"
WIDE = re.compile(r"%[^%a-zA-Z]*(\*|\d{4})|\{[^}]*(\{|\d{4})")  # a field of a format that is padded by thousands


class Refused(jinja2.TemplateError):
    """The template called raise_exception: it does not take this conversation."""


class TooMuch(jinja2.TemplateError):
    """The template uses more memory or time than a conversation needs."""


class Meter:
    """The work that one rendering may still do."""

    def __init__(self) -> None:
        self.left = MOST_WORK

    def spend(self, size: int = 0) -> None:
        """Charge one step that makes or reads `size` characters. Raises TooMuch."""
        self.left -= STEP + size
        if size > MOST_TEXT or self.left < 0:
            raise TooMuch("it makes more text than a conversation needs, or takes more steps")


_METER: ContextVar[Meter] = ContextVar("meter")


@contextmanager
def metered() -> Iterator[None]:
    """Within it templates of this thread may do what one rendering may."""
    token = _METER.set(Meter())
    try:
        yield
    finally:
        _METER.reset(token)


def size_of(value: object) -> int:
    """Characters that a value is charged as: its own, not those of its items."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return 8 * value.bit_length()  # products of long numbers take long
    return ITEM * len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 0


def extent(value: object) -> int:
    """Characters that a value takes as text, with all that is in it; a few levels of lists can stand for very much."""
    total, waiting = 0, [value]
    while waiting and total <= MOST_TEXT:
        item = waiting.pop()
        total += ITEM + size_of(item)
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
    return total


def formatted(text: str, values: object) -> int:
    """Characters of a format that is filled in, at most."""
    if WIDE.search(text):
        raise TooMuch("it pads text to a width in the thousands")
    return len(text) + (text.count("%") + text.count("{")) * extent(values)


def replaced(text: str, old: str, new: str) -> int:
    """Characters of a text with replacements."""
    return len(text) + text.count(old) * len(new)


def joined(items: list[Any], separator: object) -> int:
    """Characters of a joined list."""
    return extent(items) + len(items) * size_of(separator)


def of_operator(operator: str, left: Any, right: Any) -> int:
    """Characters that an operator makes."""
    if operator == "%" and isinstance(left, str):
        return formatted(left, right)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        return size_of(left) * max(1, abs(right))
    if operator == "*" and isinstance(left, int) != isinstance(right, int):
        count, repeated = (left, right) if isinstance(left, int) else (right, left)
        return size_of(repeated) * max(1, count)
    return size_of(left) + size_of(right)


def of_method(text: str, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """Characters that a method of a text makes, where they may be more than it has."""
    if name == "format":
        return formatted(text, [*args, *options.values()])
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        return replaced(text, args[0], args[1])
    if name == "join" and args and isinstance(args[0], list | tuple | dict | set):
        return joined(list(args[0]), text)
    return 4 * len(text)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja with the names, filters and whitespace rules that transformers gives to chat templates, metered."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock], finalize=charge_output
        )
        own = {"tojson": to_json, "replace": replace, "join": join, "indent": indent, "format": fill}
        kept = {name: charged(run) for name, run in (self.filters | own).items() if name not in PADDING_FILTERS}
        self.filters = kept | {STEP_FILTER: step, SCAN_FILTER: scan, CONCAT_FILTER: concat}
        self.globals |= {"raise_exception": refuse, "strftime_now": today}
        del self.globals["lipsum"]

    def template(self, source: str) -> jinja2.Template:
        """The template, compiled with its loops and macros metered."""
        tree = Metering(self).visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge an operator for its result, then apply it."""
        _METER.get().spend(of_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as jinja's own)
        """Charge a call for its result, before where that may be large, then make it."""
        meter, method = _METER.get(), getattr(__obj, "__wrapped__", __obj)  # jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            meter.spend(of_method(owner, method.__name__, args, kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        meter.spend(CALL + size_of(result))
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have this attribute: of texts and numbers only methods that cannot pad."""
        if isinstance(obj, str) and callable(value):
            return attr in STR_METHODS or (attr.startswith("is") and hasattr(str, attr))
        if isinstance(obj, bytes | int | float):
            return False
        return bool(super().is_safe_attribute(obj, attr, value))


class Metering(NodeTransformer):
    """Puts a charge into everything that runs again and again without a call of its own."""

    def __init__(self, environment: Sandbox) -> None:
        self.environment = environment

    def charge(self, name: str, first: nodes.Expr, *others: nodes.Expr) -> nodes.Filter:
        """One of the sandbox's own filters: they are called several times as fast as anything else."""
        made = nodes.Filter(first, name, list(others), [], None, None)
        made.set_environment(self.environment).set_lineno(1)
        return made

    def charged_body(self, node: Any) -> Any:
        """A node whose body is charged for its nodes and its own text each time it runs."""
        node = self.generic_visit(node)
        parts = list(node.find_all((nodes.Node,)))
        size = len(parts) + sum(len(part.data) for part in parts if isinstance(part, nodes.TemplateData))
        statement = nodes.ExprStmt(self.charge(STEP_FILTER, nodes.Const(size)))
        node.body.insert(0, statement.set_environment(self.environment).set_lineno(1))
        return node

    visit_Macro = visit_CallBlock = visit_Block = charged_body  # noqa: N815 (jinja finds them by name)

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """A loop: every item is charged, those that its condition leaves out too."""
        node = self.charged_body(node)
        if node.test is not None:
            node.test = nodes.And(self.charge(STEP_FILTER, nodes.Const(0)), node.test).set_environment(self.environment)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """`a ~ b`."""
        return self.charge(CONCAT_FILTER, *self.generic_visit(node).nodes)  # type: ignore[attr-defined]

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:  # noqa: N802
        """What is compared or searched."""
        self.generic_visit(node)
        node.expr = self.charge(SCAN_FILTER, node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """A slice, which jinja makes without asking the sandbox."""
        self.generic_visit(node)
        return self.charge(SCAN_FILTER, node) if isinstance(node.arg, nodes.Slice) and node.ctx == "load" else node


class GenerationBlock(Extension):
    """`{% generation %}` marks the model's own words, for training; for a prompt it is its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The content alone."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@jinja2.pass_context  # which keeps jinja from computing it once, when it compiles
def step(_context: Context, size: int) -> bool:
    """Charge a pass of a loop or the call of a macro."""
    _METER.get().spend(size)
    return True


@jinja2.pass_context
def scan(_context: Context, value: Any) -> Any:
    """A value that is compared, searched or cut out, charged."""
    _METER.get().spend(size_of(value))
    return value


@jinja2.pass_context
def concat(_context: Context, *values: Any) -> str:
    """The `~` operator."""
    _METER.get().spend(extent(list(values)))
    return "".join(map(str, values))


def charged(run: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is charged for what it reads and for what it makes."""

    @functools.wraps(run)
    def entry(*args: Any, **options: Any) -> Any:
        meter = _METER.get()
        meter.spend(sum(map(size_of, args)))
        result = run(*args, **options)
        meter.spend(size_of(result))
        return result

    return entry


@jinja2.pass_context  # so that constants are charged where they are put out, not where they are compiled
def charge_output(_context: Context, value: Any) -> Any:
    """What `{{ value }}` puts out, charged."""
    _METER.get().spend(len(value) if isinstance(value, str) else 4 * extent(value))
    return value


def today(form: Any) -> str:
    """The date and time, as strftime writes them; a template may give it anything."""
    return datetime.now().strftime(form)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None, **layout: Any) -> str:
    """Plain JSON; jinja's own filter escapes HTML, which models were not trained on."""
    if isinstance(indent, int) and indent > 100:
        raise TooMuch("it indents JSON by more than 100")
    _METER.get().spend(extent(value) * (1 if indent is None else 8))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **layout)


def replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    """A text with replacements."""
    text, old, new = str(text), str(old), str(new)
    _METER.get().spend(replaced(text, old, new))
    return str(text.replace(old, new, -1 if count is None else count))


@jinja2.pass_eval_context
def join(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Items as one text."""
    items = list(value)
    _METER.get().spend(joined(items, d))
    return str(jinja2.filters.sync_do_join(context, items, d, attribute))


def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Lines with blanks in front."""
    size = len(width) if isinstance(width, str) else max(0, width)
    _METER.get().spend(len(text) + (text.count("\n") + 1) * size)
    return str(jinja2.filters.do_indent(text, width, first, blank))


def fill(text: str, *args: Any, **options: Any) -> str:
    """`text % args`."""
    _METER.get().spend(formatted(str(text), [*args, *options.values()]))
    return str(jinja2.filters.do_format(text, *args, **options))


def refuse(message: object) -> NoReturn:
    """raise_exception, by which a template says that it does not take a conversation."""
    raise Refused(str(message)[:1000])
