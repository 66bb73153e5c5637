"""The command line: `forerun generate` and `forerun chat`.

Decides options, what goes to which stream, and exit statuses. Standard output carries the answer and nothing else;
the card, bars and errors go to standard error. A user's mistake is one line and status 2. It knows nothing of how
answers are made: it calls LLM and shows what comes.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from forerun import __version__
from forerun.accept.outcome import Stats
from forerun.card import LoadingBar, Painter, Setting, Timing, run_card, show_error, speed_line
from forerun.config import Verification
from forerun.engine.delta import Delta
from forerun.engine.sequence import Origin
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.options import AnswerOptions, ModelOptions, with_options
from forerun.sampling.params import SamplingParams

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def options_of_all(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Exact speculative decoding: a drafter guesses, the target checks, the answer stays the same."""
    if version:
        typer.echo(f"forerun {__version__}")
        raise typer.Exit()


def build_llm(options: ModelOptions, console: Console) -> LLM:
    """The model and its drafter, loaded; a bar is shown where that takes long."""
    with LoadingBar(console) as bar:
        return LLM(
            options.model,
            options.draft,
            dtype=options.dtype,
            speculation=options.depth,
            verification=cast(Verification, options.verification),
            max_len=options.max_len,
            max_batch=1,
            threads=options.threads,
            progress=bar,
        )


@dataclass(slots=True)
class Answer:
    """One streamed answer, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_s: float = 0.0
    total_s: float = 0.0

    @property
    def timing(self) -> Timing:
        """How long it took."""
        return Timing(len(self.token_ids), self.first_s, self.total_s)


@dataclass(slots=True)
class Interrupt:
    """Whether Ctrl-C was pressed."""

    asked: bool = False


@contextmanager
def patient_interrupt() -> Iterator[Interrupt]:
    """Within it the first Ctrl-C is only noted, so that a round is never torn; a second one acts at once."""
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        interrupt.asked = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def answer(
    llm: LLM,
    prompt: str | Sequence[int],
    params: SamplingParams,
    show: Callable[[str, Origin], None],
    bar: LoadingBar,
) -> Answer:
    """Streams one answer through `show`. After Ctrl-C it ends with the finish reason "cancelled"."""
    result = Answer()
    started_s = time.perf_counter()
    deltas = cast(Generator[Delta, None, None], llm.stream(prompt, params, progress=bar))
    with patient_interrupt() as interrupt, closing(deltas), bar:
        for delta in deltas:
            bar.stop()
            result.total_s = time.perf_counter() - started_s
            result.first_s = result.first_s or result.total_s
            result.token_ids += delta.token_ids
            result.origins += delta.origins
            for segment in delta.segments:
                result.text += segment.text
                show(segment.text, segment.origin)
            result.finish_reason, result.stop_reason = delta.finish_reason, delta.stop_reason
            if interrupt.asked and result.finish_reason is None:
                result.finish_reason = "cancelled"
                break
    return result


Prompt = Annotated[str | None, typer.Argument(help="Text to go on from; - or nothing reads standard input.")]


@app.command()
@with_options
def generate(
    where: ModelOptions,
    how: AnswerOptions,
    prompt: Prompt = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: text, token ids, statistics.")] = False,
) -> None:
    """Go on from a text. The new text is streamed to standard output, a card of the run to standard error."""
    text = read_prompt(prompt)
    params = how.params()
    errors = Console(stderr=True, no_color=how.raw or None)
    llm = build_llm(where, errors)
    setting = Setting(where.model, where.draft, where.depth, where.verification, cast(int, params.seed))
    if as_json:
        result = answer(llm, text, params, lambda *_: None, LoadingBar(errors))
        typer.echo(json.dumps(as_object(result, setting, llm)))
    else:
        painter = Painter(Console(), how.raw)
        result = answer(llm, text, params, painter.write, LoadingBar(errors))
        painter.end()
        if not painter.visible:
            errors.print()  # the text, wherever it went, ends without a line's end
        errors.print(run_card(setting, result.timing, llm.stats, result.origins, llm.plan.lines()))
    if result.finish_reason == "cancelled":
        raise typer.Exit(130)


def read_prompt(prompt: str | None) -> str:
    """The argument, or standard input without its last line break."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequest("prompt", "there is none: give it as the last argument, or pipe it in")
    return sys.stdin.read().removesuffix("\n")


def as_object(result: Answer, setting: Setting, llm: LLM) -> dict[str, Any]:
    """An answer as JSON: what was said, where each token came from, and how it went."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "origins": [origin.value for origin in result.origins],
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        **asdict(setting),
        "fingerprint": llm.fingerprint,
        "stats": stats_object(llm.stats, result.timing),
        "memory_plan": llm.plan.lines(),
    }


def stats_object(stats: Stats, timing: Timing) -> dict[str, Any]:
    """The counters and rates of a run, by the names they have everywhere."""
    return {
        "num_tokens": timing.num_tokens,
        "first_token_s": timing.first_s,
        "total_s": timing.total_s,
        "tokens_per_s": timing.tokens_per_s,
        "num_rounds": stats.num_rounds,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_at_depth": list(stats.acceptance_at_depth),
    }


@app.command()
@with_options
def chat(
    where: ModelOptions,
    how: AnswerOptions,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
) -> None:
    """Talk to a model that has a chat template. /reset forgets the conversation, /exit leaves; Ctrl-C cuts short."""
    params = how.params()
    errors = Console(stderr=True, no_color=how.raw or None, highlight=False)
    llm = build_llm(where, errors)
    talk = Conversation(llm, system)
    painter = Painter(Console(), how.raw)
    while (line := read_line(errors)) is not None and line != "/exit":
        if line == "/reset":
            talk = Conversation(llm, system)
            errors.print("the conversation starts anew", style="dim")
        elif line:
            try:
                result = talk.say(line, params, painter.write, LoadingBar(errors))
            except InvalidRequest as error:
                show_error(error)
                continue
            painter.end()
            note = "cancelled; " if result.finish_reason == "cancelled" else ""
            errors.print(f"[{note}{speed_line(result.timing, llm.stats)}]", style="dim", markup=False)


def read_line(console: Console) -> str | None:
    """The user's next line; None at the end of input. Ctrl-C only drops the line begun."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D leaves", style="dim")
        except EOFError:
            return None


class Conversation:
    """Messages so far. A turn that fails leaves no trace; one cut short keeps what was said."""

    def __init__(self, llm: LLM, system: str | None) -> None:
        self._llm = llm
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        llm.tokenizer.require_chat_template()

    def say(self, text: str, params: SamplingParams, show: Callable[[str, Origin], None], bar: LoadingBar) -> Answer:
        """One turn: the user's text, and the model's answer to the whole conversation."""
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = self._llm.tokenizer.chat(messages)
        ids = self._llm.tokenizer.encode(prompt, add_special_tokens=False)
        result = answer(self._llm, ids, params, show, bar)
        self._messages = [*messages, {"role": "assistant", "content": result.text.strip()}]
        return result


def main() -> None:
    """The `forerun` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    app()
