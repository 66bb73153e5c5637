"""`forerun chat`: a conversation with a model that has a chat template."""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.commands.interrupt import importing
from forerun.options import ANSWER, AnswerOptions, ModelOptions, with_options

EXAMPLES = """
forerun chat --model Qwen/Qwen2.5-0.5B-Instruct --draft ngram
forerun chat --model ./checkpoint --system "Answer in one sentence." --temperature 0
"""


@with_options(EXAMPLES)
def chat(
    where: ModelOptions,
    how: AnswerOptions,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the conversation.", rich_help_panel=ANSWER)
    ] = None,
) -> None:
    """Talk to a model that has a chat template.

    /reset forgets the conversation, /exit or Ctrl-D leaves, and Ctrl-C ends an answer early.
    """
    with importing():
        from forerun.commands.conversation import converse
    converse(where, how, system)
