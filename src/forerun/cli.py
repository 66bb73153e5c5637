"""The command line: the table of commands, and what is the same for all of them.

A user's mistake is one line on standard error and status 2. Each command is one file in `commands`, which imports its
dependencies when it is run, so that help and mistakes do not wait for torch.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any, NoReturn

import typer

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
from forerun.page import USAGE_ERROR, Index, Page, usage_line
from forerun.streams import MISTAKE, end_at_faults, guard_streams, show_error, show_warnings

NAME = "forerun"
EXAMPLES = """
forerun demo --small
forerun generate --model stdlib --draft model:stdlib-draft "def main("
forerun generate --help
"""


class Program(Index):
    """The group of all commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; without any, show help."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names, or the first two, as in `forerun bench serve`."""
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)

    def main(self, *arguments: Any, **extra: Any) -> NoReturn:
        """Run the command and exit with its status."""
        end_at_faults()  # here, since typer sets a hook of its own before it comes here
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
    """Exact speculative decoding: a drafter guesses, the target checks, the answer stays the same."""
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
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to do that a traceback could tell of
