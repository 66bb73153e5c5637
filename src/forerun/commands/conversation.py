"""A conversation with a model: messages so far, and the loop that reads lines and writes answers."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from forerun.accept.commit import Origin
from forerun.card import Painter, speed_line
from forerun.commands.answering import StreamedAnswer, answer, build_llm, sampling_params
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.options import AnswerOptions, ModelOptions
from forerun.progress import LoadingBar
from forerun.sampling.params import SamplingParams
from forerun.streams import show_error


def converse(where: ModelOptions, how: AnswerOptions, system: str | None) -> None:
    """Answer line by line until the user leaves."""
    SamplingParams(**how.sampling())  # refused before anything is loaded
    errors = Console(stderr=True, no_color=how.raw or None, highlight=False)
    llm = build_llm(where, errors)
    params = sampling_params(how, llm)
    talk = ChatSession(llm, system)
    label = label_of_widened(llm, where)
    painter = Painter(Console(), how.raw)
    while (line := read_line(errors)) is not None and line != "/exit":
        if line == "/reset":
            talk = ChatSession(llm, system)
            errors.print("the conversation starts over", style="dim")
        elif line:
            try:
                result = talk.say(line, params, painter.write, LoadingBar(errors))
            except InvalidRequest as error:
                show_error(error)
                continue
            painter.end()
            note = "cancelled; " if result.finish_reason == "cancelled" else ""
            errors.print(f"[{note}{speed_line(result.timing, llm.stats)}{label}]", style="dim", markup=False)


def label_of_widened(llm: LLM, where: ModelOptions) -> str:
    """What stands behind every speed: a checkpoint that is not what its name says is named for what it is."""
    labels = ((llm.name, where.model), (llm.draft_name, where.draft))
    return "".join(f"; {label}" for label, given in labels if label and label != given)


def read_line(console: Console) -> str | None:
    """The user's next line; None at the end of input. Ctrl-C only drops the line begun."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D leaves", style="dim")
        except EOFError:
            return None


class ChatSession:
    """Messages so far. A turn that fails leaves no trace; one cut short keeps what was said."""

    def __init__(self, llm: LLM, system: str | None) -> None:
        self._llm = llm
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        llm.tokenizer.require_chat_template()

    def say(
        self, text: str, params: SamplingParams, show: Callable[[str, Origin], None], bar: LoadingBar
    ) -> StreamedAnswer:
        """One turn: the user's text, and the model's answer to the whole conversation."""
        messages = [*self._messages, {"role": "user", "content": text}]
        ids = self._llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        result = answer(self._llm, ids, params, show, bar)
        self._messages = [*messages, {"role": "assistant", "content": result.text.strip()}]
        return result
