"""The command line: the table of commands, and what holds for all of them.

Standard output carries the answer and nothing else; cards, bars and errors go to standard error. A user's mistake is
one line and status 2. The commands themselves are in `commands`, one file each.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from forerun import __version__
from forerun.commands.bench import bench
from forerun.commands.chat import chat
from forerun.commands.demo import demo
from forerun.commands.generate import generate
from forerun.commands.prove import prove
from forerun.commands.trace import trace
from forerun.commands.widen import widen

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (generate, chat, demo, trace, prove, bench, widen):
    app.command()(command)


@app.callback(invoke_without_command=True)
def options_of_all(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Exact speculative decoding: a drafter guesses, the target checks, the answer stays the same."""
    if version:
        typer.echo(f"forerun {__version__}")
        raise typer.Exit()


def main() -> None:
    """The `forerun` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    app()
