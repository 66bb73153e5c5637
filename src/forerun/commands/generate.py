"""`forerun generate`: continue a text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from forerun.commands.running import Result, importing
from forerun.commands.serve import ReplicaOptions
from forerun.errors import InvalidRequest
from forerun.options import INTERRUPTED, AnswerOptions, BatchOptions, ModelOptions, OutputOptions, with_options
from forerun.streams import MISTAKE, reading_input

PromptArgument = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="Text to continue; if omitted or -: standard input.")
]
EXAMPLES = """
forerun generate --model stdlib "def main("
forerun generate --model stdlib --draft model:stdlib-draft --seed 1 -n 48 "import os"
forerun generate --model stdlib --draft ngram --json "class Stack:" > answer.json
forerun generate --model stdlib --draft suffix --input prompts.jsonl --output answers.jsonl
forerun generate --model stdlib --replicas 2 --input prompts.jsonl --output answers.jsonl
"""


@with_options(EXAMPLES)
def generate(
    model_options: ModelOptions,
    answer_options: AnswerOptions,
    batch: BatchOptions,
    replicas: ReplicaOptions,
    output: OutputOptions,
    prompt: PromptArgument = None,
) -> None:
    """Complete a prompt, or all prompts of a file.

    The text is streamed to standard output; on a terminal, colours show the origin of each token. A summary goes to
    standard error.

    With --input, each line of a file is a prompt. A finished answer is written to --output (or standard output) as a
    JSON line with the number and id of its prompt; at the end, --output is sorted like the input. After an
    interruption, the same command resumes, with the same answers. Lines that cannot be answered are reported by number
    and skipped, and the exit status is 2. With --replicas, several engines share the lines; the answers are the same.
    """
    if batch.input is None:
        if replicas.replicas:
            raise InvalidRequest("replicas", "it needs a file of prompts: name one with --input, or omit --replicas.")
        if batch.chat:
            raise InvalidRequest("chat", "it needs a file of prompts: name one with --input, or use forerun chat.")
        text, result = read_prompt(prompt), Result.of(output)
        with importing():
            from forerun.commands.answering import write_answer
        if write_answer(model_options, answer_options, text, result).finish_reason == "cancelled":
            raise typer.Exit(INTERRUPTED)
        return
    if prompt is not None:
        raise InvalidRequest("input", "there is a prompt argument as well: give either the file or the prompt.")
    if output.as_json and output.output is None:
        raise InvalidRequest("json", "answers and the JSON summary would both be printed: name --output FILE.")
    with importing():
        from forerun.commands.batch import run_batch
    tally, stopped = run_batch(model_options, answer_options, batch, replicas.settings, output)
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if tally.num_skipped:
        raise typer.Exit(MISTAKE)


def read_prompt(prompt: str | None) -> str:
    """The argument, or standard input without its last line break."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequest("prompt", "it is missing: give it as the last argument, or pipe it in")
    with reading_input():
        return sys.stdin.read().removesuffix("\n")
