"""`forerun chat`: a conversation with a model that has a chat template."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.commands.running import importing
from forerun.errors import InvalidRequest
from forerun.options import ANSWER, AnswerOptions, ModelOptions, with_options
from forerun.streams import reading_input, show_error, warnings_held_back

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.llm import LLM

EXAMPLES = """
forerun chat --model Qwen/Qwen2.5-0.5B-Instruct --draft ngram
forerun chat --model ./checkpoint --system "Answer in one sentence." --temperature 0
"""

CONTROLS = "/reset clears the conversation, /exit or Ctrl-D quits"
EXITS = ("/exit", "/quit", "/bye")  # of this and of other programs


@with_options(EXAMPLES)
def chat(
    model_options: ModelOptions,
    answer_options: AnswerOptions,
    system: Annotated[str | None, typer.Option(help="System prompt.", rich_help_panel=ANSWER)] = None,
) -> None:
    """Chat with a model that has a chat template.

    /reset clears the conversation, /exit or Ctrl-D quits, and Ctrl-C ends an answer early.
    """
    with importing():
        from rich.console import Console

        from forerun.card import Painter, speed_line
        from forerun.commands.answering import LoadedModel, Reply, answer, require_template
        from forerun.request import ChatOptions
        from forerun.serve.template_forms import answer_form
    require_template(model_options.spec)
    model = LoadedModel.of(model_options, answer_options)
    llm, errors, painter = model.llm, model.errors, Painter(Console(), answer_options.raw)
    label = label_of_widened(llm)
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = beginning
    if sys.stdin.isatty():
        errors.print(f"{CONTROLS}, Ctrl-C ends an answer early", style="dim", highlight=False)
    while (line := read_line(errors)) is not None and line not in EXITS:
        if line == "/reset":
            messages = beginning
            errors.print("the conversation is cleared", style="dim", highlight=False)
        elif re.fullmatch("/[a-z]+", line):
            unknown = "" if line == "/help" else f"unknown command {line}: "
            errors.print(f"{unknown}{CONTROLS}", highlight=False)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                prompt = llm.chat_prompt(asked)
                form = answer_form(ChatOptions(), prompt["prompt"], None, None, llm.tokenizer)
                reply = Reply(form, painter)
                shown = replace(model.params, skip_special_tokens=not form.shown_special_ids)
                with warnings_held_back():
                    answered = answer(replace(model, params=shown), prompt["prompt_token_ids"], reply.add)
                    reply.close()
                    painter.end(followed=True)
            except InvalidRequest as error:  # the turn is dropped
                show_error(error)
                continue
            messages = [*asked, {"role": "assistant", "content": reply.content.strip()}]
            note = "cancelled; " if answered.finish_reason == "cancelled" else ""
            speed = f"[{note}{speed_line(answered.timing, llm.stats)}{label}]"
            errors.print(speed, style="dim", markup=False, highlight=False)


def label_of_widened(llm: LLM) -> str:
    """A note after every speed if the checkpoint is widened, since its speed is not that of the original."""
    return "".join(f"; {label}" for label in (llm.name, llm.draft_name) if "(widened from " in label)


def read_line(console: Console) -> str | None:
    """The user's next line; None at the end of input. Ctrl-C discards the current line."""
    while True:
        try:
            with reading_input():
                return input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D quits", style="dim", highlight=False)
        except EOFError:
            return None
