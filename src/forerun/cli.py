"""The command line: the table of commands, their exit statuses, and the layout of their help.

A user's mistake results in one line on standard error and status 2. Each command is one file in `commands`, which
imports its dependencies when it is run, so that help and error messages do not wait for torch. Help shows options in
groups, with names on the left and descriptions on the right, or below on narrow terminals; names and examples are never
wrapped, so that they can be copied.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from forerun import __version__
from forerun.commands.bench import bench
from forerun.commands.bench_serve import bench_serve
from forerun.commands.chat import chat
from forerun.commands.convert import convert
from forerun.commands.demo import demo
from forerun.commands.generate import generate
from forerun.commands.models import models
from forerun.commands.prove import prove
from forerun.commands.serve import serve
from forerun.commands.trace import trace
from forerun.commands.train import train
from forerun.commands.tune import tune
from forerun.commands.widen import widen
from forerun.did_you_mean import SYNONYMS
from forerun.streams import MISTAKE, end_at_faults, guard_streams, show_error, show_warnings

NAME = "forerun"
EXAMPLES = """
forerun demo --small
forerun generate --model stdlib --draft model:stdlib-draft "def main("
forerun generate --help
"""
WIDEST, NARROWEST = 100, 40
NAMES = 30  # the widest column of names
NARROW = 72  # on narrower terminals descriptions are below the names
TYPE = re.compile(r"<(?:list\[)?(\w+)(?: range|\])?>")  # a type as typer writes it: <int range>, <list[Path]>
ARGUMENTS, OPTIONS = "Arguments", "Options"
STATUSES = (
    ("0", "Success."),
    ("1", "Tokens differ from those of plain decoding (prove, bench, bench serve, tune, trace and demo)."),
    ("2", "Invalid options or input, or a file that cannot be read, written or used. One line says what."),
    ("3", "A bug in forerun. Please report what is printed."),
    ("130", "Ctrl-C."),
    ("141", "The program that reads the output has ended."),
)


class Page(TyperCommand):
    """A command with the help layout of this file."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        formatter.write(render(self, ctx))


def render(command: Any, ctx: Any, commands: Sequence[tuple[str, str]] = ()) -> str:
    """A command's help page, in the width of the terminal."""
    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns))
    parts = [fill(f"Usage: {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}", width)]
    parts += [fill(paragraph, width) for paragraph in paragraphs(command.help)]
    if command.epilog:
        parts.append("Examples:\n" + textwrap.indent(command.epilog.strip("\n"), "  "))
    if commands:
        parts.append("Commands:\n" + definitions(commands, width, 12))
    for title, rows in groups(command, ctx):
        parts.append(f"{title}:\n" + definitions(rows, width, NAMES))
    parts.append("Exit status:\n" + definitions(STATUSES, width, 12))
    return "\n\n".join(parts) + "\n"


def paragraphs(text: str | None) -> list[str]:
    """The paragraphs of a docstring, each on one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text or "") if part.strip()]


def groups(command: Any, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The options by their group, with arguments first and options without a group last."""
    rows_by_group: dict[str, list[tuple[str, str]]] = {ARGUMENTS: []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            argument = param.param_type_name == "argument"
            title = ARGUMENTS if argument else getattr(param, "rich_help_panel", None) or OPTIONS
            rows_by_group.setdefault(title, []).append((TYPE.sub(shown_type, record[0]), record[1]))
    rows_by_group[OPTIONS] = rows_by_group.pop(OPTIONS, [])
    yield from ((title, rows) for title, rows in rows_by_group.items() if rows)


def shown_type(match: re.Match[str]) -> str:
    """The type of an option's value, without bounds and without the list of its occurrences."""
    return f"<{match[1].lower()}>"


def definitions(rows: Sequence[tuple[str, str]], width: int, names: int) -> str:
    """Names with their descriptions to the right, or below if a line is too short for both."""
    left = min(names, max(len(name) for name, _ in rows) + 2)
    if width < NARROW and left > NARROWEST // 3:
        return "\n".join(f"  {name}\n{fill(text, width, ' ' * 6)}" for name, text in rows)
    lines = []
    for name, text in rows:
        body = fill(text, width, " " * (left + 2))
        fits = len(name) + 2 <= left
        lines.append(f"  {name:{left}}{body.lstrip()}" if fits else f"  {name}\n{body}")
    return "\n".join(lines)


def fill(text: str, width: int, indent: str = "") -> str:
    """Text in lines of at most `width` columns; names with hyphens are not broken."""
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


USAGE_ERROR: Any = typer.BadParameter.__base__  # the base class of usage errors, which Typer does not export


def usage_line(error: Any) -> str:
    """A usage error on one line: the mistake, similar names, and the command that lists the options.

    Of an unknown option, these are the options that begin like it, or else those to which the name in another program
    corresponds, or else those that typer names.
    """
    longer, synonyms = list[str](), list[str]()
    if (beginning := getattr(error, "option_name", None)) and error.ctx is not None:
        spellings = [spelling for param in error.ctx.command.params for spelling in param.opts]
        longer = [spelling for spelling in spellings if spelling.startswith(beginning)]
        names = SYNONYMS.get(beginning.removeprefix("--").replace("-", "_"), ())
        synonyms = [option for name in names if (option := f"--{name.replace('_', '-')}") in spellings]
    meant = sorted(longer or synonyms or getattr(error, "possibilities", None) or ())
    message: str = error.message if meant else error.format_message()
    message = message.replace("Value error, ", "").rstrip(".")
    if hasattr(error.__cause__, "errors"):  # pydantic's, whose text lacks the value
        value = error.__cause__.errors()[0]["input"]
        message = message.replace("Input should", f"'{value}' should").partition(", unable to parse")[0]
    if meant:
        message += f". Did you mean {' or '.join(meant)}?"
    hint = f"; {error.ctx.command_path} -h lists all options" if error.ctx is not None else ""
    return message if message.endswith("?") else message + hint


class Program(TyperGroup):
    """The group of all commands, with the help layout of this file."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        rows = [(name, self.commands[name].get_short_help_str(1000)) for name in self.list_commands(ctx)]
        formatter.write(render(self, ctx, rows))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; without any, show help."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names, or the first two, as in `forerun bench serve`."""
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)

    def main(self, *arguments: Any, **extra: Any) -> NoReturn:
        """Run the command and exit with its status."""
        end_at_faults()  # here, since typer sets its own exception hook before this call
        try:
            status = super().main(*arguments, **extra | {"prog_name": NAME, "standalone_mode": False})
        except USAGE_ERROR as error:
            show_error(usage_line(error))
            status = MISTAKE
        sys.stdout.flush()
        sys.exit(status)


app = typer.Typer(
    cls=Program,
    epilog=EXAMPLES,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for command in (generate, chat, serve, models, demo, trace, prove, bench, bench_serve, tune, train, convert, widen):
    app.command(command.name, cls=Page, epilog=command.examples)(command)


@app.callback(invoke_without_command=True)
def options_of_all(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Speculative decoding with exact output: a drafter drafts tokens, the target model verifies them."""
    if version:
        typer.echo(f"{NAME} {__version__}")
        raise typer.Exit()


def main() -> None:
    """Run the command line that the process was started with, and exit with its status."""
    guard_streams()
    show_warnings()
    try:
        app()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the work is done: an interrupt must not print a traceback
