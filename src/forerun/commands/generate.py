"""`forerun generate`: continue a text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from forerun.commands.destination import Result
from forerun.commands.interrupt import importing
from forerun.errors import InvalidRequest
from forerun.options import INTERRUPTED, AnswerOptions, ModelOptions, OutputOptions, with_options

Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="Text to continue; - or nothing reads standard input.")
]
EXAMPLES = """
forerun generate --model stdlib "def main("
forerun generate --model stdlib --draft model:stdlib-draft --seed 1 -n 48 "import os"
forerun generate --model stdlib --draft ngram --json "class Stack:" > answer.json
"""


@with_options(EXAMPLES)
def generate(where: ModelOptions, how: AnswerOptions, output: OutputOptions, prompt: Prompt = None) -> None:
    """Continue a text, and show how that went.

    The new text is streamed to standard output, on a terminal each token in the colour of its origin. A card of the run
    goes to standard error.
    """
    text, result = read_prompt(prompt), Result.of(output)
    with importing():
        from forerun.commands.answering import write_answer
    if write_answer(where, how, text, result).finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def read_prompt(prompt: str | None) -> str:
    """The argument, or standard input without its last line break."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequest("prompt", "there is none: give it as the last argument, or pipe it in")
    return sys.stdin.read().removesuffix("\n")
