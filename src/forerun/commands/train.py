"""`forerun train`: trains a drafter on the target's answers.

This file defines the options and the output; `forerun.train` does the training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from forerun.commands.running import Result, importing
from forerun.did_you_mean import complete_from
from forerun.errors import InvalidRequest
from forerun.heads.kinds import HEADS
from forerun.heads.sizes import StudentSizes
from forerun.options import LoadingOptions, ModelOption, OutputOptions, with_options
from forerun.streams import show_note
from forerun.train.settings import SERVED, TrainSettings, check_choice

if TYPE_CHECKING:
    from rich.console import Console


class TrainingLines(logging.Handler):
    """Prints the log messages of a training, above the progress bar if there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a record."""
        if record.levelno == logging.INFO:  # warnings are shown by another handler
            self.console.print(record.getMessage(), markup=False)


@contextmanager
def logged_to(console: Console) -> Iterator[None]:
    """Context in which the training's log messages are printed to this console, on a terminal or not."""
    logger, lines = logging.getLogger("forerun.train"), TrainingLines(console)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)


KIND_NAMES = ("draft", *HEADS)
EXAMPLES = """
forerun train draft --model stdlib --data prompts.txt --layers 2 --hidden 128 --steps 2000 --out my-draft
forerun train early-exit --exit 2 --model stdlib --data prompts.jsonl --hours 1 --out my-adapter
forerun train medusa --heads 4 --hydra --model ./target --data chats.jsonl --hours 2 --out my-heads
forerun train medusa --tune-target tuned-target --model ./target --data chats.jsonl --hours 8 --out my-heads
forerun train block --layers 1 --markov-rank 32 --model ./target --data chats.jsonl --hours 4 --out my-block
forerun train mtp --mlp 512 --model ./target --data chats.jsonl --hours 2 --out my-module
forerun train draft --init ./small --model ./target --data chats.jsonl --temperature 0.6 --hours 12
"""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Options for the target, the data and the output folder."""

    TITLE: ClassVar[str] = "Training"

    model: ModelOption
    data: Annotated[
        list[Path],
        typer.Option(
            help="File: .jsonl with prompt, messages or text, .txt with a prompt per line, or any text; repeatable."
        ),
    ]
    out: Annotated[Path, typer.Option(help="Folder for the drafter and the training state.")] = Path("trained")
    force: Annotated[bool, typer.Option("--force", help="Overwrite the folder and start over.")] = False
    cache: Annotated[Path | None, typer.Option(help="Folder to cache the target's states for later runs.")] = None
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template to every prompt.")] = False
    loading: LoadingOptions = field(default_factory=LoadingOptions)


def known_kind(text: str) -> str:
    """Parser of KIND, whose mistakes are reported before missing options are."""
    try:
        check_choice("kind", text, sorted(KIND_NAMES))
    except InvalidRequest as error:
        raise typer.BadParameter(str(error).removeprefix("kind: ")) from None
    return text


@with_options(EXAMPLES)
def train(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help=f"What to train: {', '.join(KIND_NAMES)}.",
            autocompletion=complete_from(*KIND_NAMES),
            parser=known_kind,
        ),
    ],
    options: TargetOptions,
    sizes: StudentSizes,
    learning: TrainSettings,
    output: OutputOptions,
) -> None:
    """Train a drafter for a target: a draft model of any size, an early-exit adapter, heads, or a block drafter.

    The target answers your prompts, and the drafter is trained on its distribution. During training, the acceptance by
    depth and the predicted speed-up are measured on held-out answers. The drafter, train.jsonl and train.svg are
    written to the folder. After an interruption, the same command resumes, and yields the same weights.
    """
    result = Result.of(output)
    with importing():
        from rich.console import Console

        from forerun.models.generation import GenerationDefaults
        from forerun.models.source import find_checkpoint
        from forerun.progress import LoadingBar
        from forerun.train.state import TrainFolder
        from forerun.train.train import TrainTask
        from forerun.train.train import train as run
    defaults = GenerationDefaults.read(find_checkpoint(options.model)).given
    missing = [name for name in SERVED if name in defaults and getattr(learning, name) is None]
    settings = replace(learning, **{name: defaults[name] for name in missing})
    if not options.data:
        raise InvalidRequest("data", "it is missing: give a file with --data.")
    spec, threads = options.loading.spec(options.model), options.loading.threads
    task = TrainTask(kind, spec, options.data, options.out, sizes, options.chat, options.cache, options.force, threads)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with LoadingBar(errors, lines=True) as bar, logged_to(errors):
        try:
            report = run(task, settings, bar)
        except KeyboardInterrupt:
            bar.stop()
            command = "The same command, without --force," if options.force else "The same command"
            show_note(f"Interrupted. {command} {TrainFolder(options.out).next_start()}.")
            raise
    if report is None:  # the team's first process reports
        return
    result.write(report.as_object(), report.card())
