"""`forerun trace`: one prompt, round by round."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forerun.card import STYLES
from forerun.commands.answering import build_llm, setting_of
from forerun.commands.generate import Prompt, read_prompt
from forerun.errors import InvalidRequest
from forerun.options import AnswerOptions, ModelOptions, with_options
from forerun.trace.record import trace as record
from forerun.trace.show import picture, svg

Width = Annotated[int, typer.Option(min=1, help="Guesses per place: above 1 the draft is a tree.")]
Drawing = Annotated[Path | None, typer.Option("--svg", help="Write the picture to this file too.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object: every round with its guesses and numbers.")]


@dataclass(frozen=True, slots=True)
class TraceOptions(AnswerOptions):
    """Those of any answer; a trace is read line by line, so it is short."""

    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 24


@with_options
def trace(
    where: ModelOptions,
    how: TraceOptions,
    prompt: Prompt = None,
    width: Width = 1,
    as_json: AsJson = False,
    drawing: Drawing = None,
) -> None:
    """Show one answer round by round: what was guessed, what the target made of it, and why.

    Status 1 if the tokens are not those of plain decoding where they have to be.
    """
    text = read_prompt(prompt)
    params = how.params()
    llm = build_llm(where, Console(stderr=True, no_color=how.raw or None))
    wish = where.speculation(width)
    told = record(llm, text, params, wish)
    if drawing is not None:
        write(drawing, svg(told, STYLES))
    if as_json:
        setting = setting_of(llm, where, told.seed)
        typer.echo(json.dumps(asdict(setting) | {"width": wish.width} | told.as_object()))
    else:
        Console(no_color=how.raw or None, highlight=False).print(picture(told, STYLES))
    if told.same_as_plain is False:
        raise typer.Exit(1)


def write(path: Path, content: str) -> None:
    """Write a file that the user named."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest("svg", f"{path} cannot be written ({error.strerror}): name another file.") from error
