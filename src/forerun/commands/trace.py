"""`forerun trace`: shows the rounds of one answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.commands.generate import PromptArgument, read_prompt
from forerun.commands.running import Result, importing
from forerun.config import DEFAULT_DEPTH
from forerun.options import MODEL, OUTPUT, AnswerOptions, ModelOptions, OutputOptions, auto_or_whole, with_options

Width = Annotated[
    int, typer.Option(min=1, help="Alternatives per position; above 1 the draft is a tree.", rich_help_panel=MODEL)
]
Drawing = Annotated[
    Path | None, typer.Option("--svg", help="Write the picture to this .svg file as well.", rich_help_panel=OUTPUT)
]
EXAMPLES = """
forerun trace --model stdlib --draft model:stdlib-draft "def __init__(self, "
forerun trace --model stdlib --draft ngram -n 12 --svg rounds.svg "a, b = b, a"
"""


@dataclass(frozen=True, slots=True)
class TraceOptions(AnswerOptions):
    """Answer options, with a short answer by default."""

    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum number of tokens to generate.")] = 24


@dataclass(frozen=True, slots=True)
class TraceModelOptions(ModelOptions):
    """Model options, with a fixed depth by default, so that every round is drafted."""

    depth: Annotated[
        str, typer.Option(help="Tokens drafted per round; auto: chosen in each round.", parser=auto_or_whole(0))
    ] = str(DEFAULT_DEPTH)


@with_options(EXAMPLES)
def trace(
    model_options: TraceModelOptions,
    answer_options: TraceOptions,
    output: OutputOptions,
    prompt: PromptArgument = None,
    width: Width = 1,
    drawing: Drawing = None,
) -> None:
    """Show an answer round by round: the draft tokens, which were accepted, and why.

    Exit status 1: the tokens differ from those of plain decoding, which must not happen.
    """
    text, result = read_prompt(prompt), Result.of(output, drawing, "svg")
    with importing():
        from forerun.card import STYLES
        from forerun.commands.answering import LoadedModel
        from forerun.trace.record import trace as record
        from forerun.trace.show import picture, svg
    model, speculation = LoadedModel.of(model_options, answer_options), model_options.speculation(width)
    traced = record(model.llm, text, model.params, speculation)
    values = asdict(model.setting) | {"width": speculation.width} | traced.as_object()
    no_color = answer_options.raw or None
    result.write(values, picture(traced, STYLES), drawing=lambda: svg(traced, STYLES), no_color=no_color)
    if traced.same_as_plain is False:
        raise typer.Exit(1)
