"""`forerun train`: a drafter that learns from what the target writes.

This file decides the options and what is shown; `forerun.train` decides how it is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from forerun.commands.destination import Result
from forerun.commands.interrupt import importing
from forerun.errors import InvalidRequest
from forerun.options import (
    LoadingOptions,
    ModelOption,
    OutputOptions,
    complete_from,
    with_options,
)
from forerun.streams import show_note

if TYPE_CHECKING:
    from rich.console import Console


class TrainingLines(logging.Handler):
    """Shows what a training says of itself, each on one line, above the bar where there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        if record.levelno == logging.INFO:  # the command line shows warnings itself
            self.console.print(record.getMessage(), markup=False)


@contextmanager
def told_on(console: Console) -> Iterator[None]:
    """Within it a training says where it is at every look, also where no terminal shows its bar."""
    logger, lines = logging.getLogger("forerun.train"), TrainingLines(console)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)


LINES_S = 30.0  # between lines off a terminal; looks may be further apart
KIND_NAMES = ("draft", "early-exit", "medusa", "eagle", "mtp", "block")  # named here, so that help needs no torch
LOSS_NAMES = ("lk-lambda", "kl", "reverse-kl", "jsd", "tv", "lk-alpha", "ce", "dspark")
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
    """Options that say what learns from what, and where the result goes."""

    TITLE: ClassVar[str] = "Training"

    model: ModelOption
    data: Annotated[
        list[Path],
        typer.Option(help="A .jsonl with prompt, messages or text, a .txt with a prompt a line, or a text file."),
    ]
    out: Annotated[Path, typer.Option(help="Folder for the drafter and its training.")] = Path("trained")
    steps: Annotated[int | None, typer.Option(help="Steps to take; default: 2000.")] = None
    hours: Annotated[float | None, typer.Option(help="Instead: hours to train.")] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite what the folder holds, and start over.")] = False
    cache: Annotated[Path | None, typer.Option(help="Keep the target's states here, for further trainings.")] = None
    chat: Annotated[bool, typer.Option("--chat", help="Every prompt is a message, for the chat template.")] = False
    loading: LoadingOptions = field(default_factory=LoadingOptions)


@dataclass(frozen=True, slots=True)
class StudentOptions:
    """Options that say what the drafter is."""

    TITLE: ClassVar[str] = "Drafter"

    exit: Annotated[int | None, typer.Option(help="early-exit: layers that guess; default: a quarter.")] = None
    layers: Annotated[int | None, typer.Option(help="Layers; default: 1, block: 2, draft: a quarter.")] = None
    hidden: Annotated[int | None, typer.Option(help="draft: width; default: half of the target's.")] = None
    heads: Annotated[int | None, typer.Option(help="draft: heads; medusa: heads, and guesses; default: 4.")] = None
    mlp: Annotated[int | None, typer.Option(help="Neurons per layer.")] = None
    init: Annotated[str | None, typer.Option(help="draft: a checkpoint to go on from.")] = None
    hydra: Annotated[bool | None, typer.Option("--hydra", help="medusa: heads see the guesses before theirs.")] = None
    shared_head: Annotated[
        bool | None, typer.Option("--shared-head", help="medusa, eagle: with the target's output matrix alone.")
    ] = None
    draft_vocab: Annotated[
        int | None, typer.Option(help="eagle: of how many tokens its head is, the most frequent ones; default: all.")
    ] = None
    block: Annotated[int | None, typer.Option(help="block: guesses of a block; default: 8.")] = None
    markov_rank: Annotated[
        int | None, typer.Option(help="block: rank of the Markov head, 0 for none; default: a quarter of the width.")
    ] = None
    selector_rank: Annotated[
        int | None, typer.Option(help="block: a candidate selector of this rank, instead of a Markov head.")
    ] = None
    confidence: Annotated[
        bool | None, typer.Option("--confidence/--no-confidence", help="block: with or without a confidence head.")
    ] = None
    portable: Annotated[
        bool | None,
        typer.Option("--portable", help="block, mtp: of a form that speculators and vLLM read, after forerun convert."),
    ] = None
    tune_target: Annotated[
        Path | None, typer.Option(help="medusa: tune the target too (Medusa-2), into this folder.")
    ] = None
    taps: Annotated[
        str | None,
        typer.Option(
            help="eagle, block: the layers of the target whose inputs it reads, as 2,4; its last: what it leaves."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """Options that say how it learns, and when to stop."""

    TITLE: ClassVar[str] = "Learning"

    batch: Annotated[int, typer.Option(help="Answers that a step learns from.")] = 8
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.")] = 128
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt that is cut out of a text.")] = 64
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", help="That of serving; default: the model's or 1.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="That of serving.")] = None
    top_p: Annotated[float | None, typer.Option(help="That of serving.")] = None
    loss: Annotated[str, typer.Option(help=f"{', '.join(LOSS_NAMES)}.", autocompletion=complete_from(*LOSS_NAMES))] = (
        "lk-lambda"
    )
    kl_share: Annotated[float, typer.Option(help="Share of the training, at its beginning, whose loss is KL.")] = 0.1
    place_weights: Annotated[
        str,
        typer.Option(help="How much depths count: decay or d-pace.", autocompletion=complete_from("decay", "d-pace")),
    ] = "decay"
    decay: Annotated[float, typer.Option(help="With decay: how much less each depth counts.")] = 1.0
    draft_depth: Annotated[int, typer.Option(help="Guesses of a round where drafts are judged.")] = 8
    passes: Annotated[int, typer.Option(help="How often each answer is learnt from.")] = 1
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3
    held_out: Annotated[int, typer.Option(help="Prompts that judge; at most a quarter of all.")] = 16
    look_every: Annotated[int, typer.Option(help="Steps from one look at held-out answers to the next.")] = 100
    patience: Annotated[int, typer.Option(help="Looks without a rise after which training stops.")] = 8
    checkpoint_every: Annotated[int, typer.Option(help="Steps from one checkpoint to the next.")] = 25
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same weights.")] = 0
    bfloat16: Annotated[
        bool, typer.Option("--bfloat16", help="Matrix products in bfloat16: faster where the processor has them.")
    ] = False

    def values(self) -> dict[str, Any]:
        """What was given, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


def layers_of(told: str | None) -> tuple[int, ...] | None:
    """Numbers between commas; None where nothing is said."""
    if told is None:
        return None
    try:
        return tuple(int(each) for each in told.split(","))
    except ValueError as error:
        raise InvalidRequest("taps", f"{told!r} must be numbers of layers between commas, such as 2,4.") from error


@with_options(EXAMPLES)
def train(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help=f"What to train: {', '.join(KIND_NAMES)}.", autocompletion=complete_from(*KIND_NAMES)
        ),
    ],
    options: TargetOptions,
    student: StudentOptions,
    learning: LearningOptions,
    output: OutputOptions,
) -> None:
    """Train a drafter for a target: a small model of any size, an adapter for early exit, heads, or a block.

    The target answers your prompts, and the drafter learns its law. As it goes, held-out answers show what is accepted
    at each depth, and what that will bring. The folder gets the drafter, train.jsonl and train.svg. What is
    interrupted, or killed, goes on where it was with the same command, to the same weights.
    """
    result = Result.of(output)
    with importing():
        from rich.console import Console

        from forerun.heads.student import StudentSizes
        from forerun.models.generation import GenerationDefaults
        from forerun.models.source import find_checkpoint
        from forerun.progress import LoadingBar
        from forerun.train.kinds import KINDS
        from forerun.train.settings import TrainSettings, check_choice
        from forerun.train.state import TrainFolder
        from forerun.train.train import TrainTask
        from forerun.train.train import train as run
    check_choice("kind", kind, sorted(KINDS))
    defaults = GenerationDefaults.read(find_checkpoint(options.model)).given
    served = {name: defaults[name] for name in ("temperature", "top_k", "top_p") if name in defaults}
    settings = TrainSettings(**{**served, **learning.values()}, steps=options.steps, hours=options.hours)
    if not options.data:
        raise InvalidRequest("data", "there is none: give a file with --data.")
    said = {each.name: getattr(student, each.name) for each in fields(student)}
    sizes = StudentSizes(**{**said, "taps": layers_of(student.taps)})
    spec, threads = options.loading.spec(options.model), options.loading.threads
    task = TrainTask(kind, spec, options.data, options.out, sizes, options.chat, options.cache, options.force, threads)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with LoadingBar(errors, LINES_S) as bar, told_on(errors):
        try:
            report = run(task, settings, bar)
        except KeyboardInterrupt:
            bar.stop()
            command = "The same command, without --force," if options.force else "The same command"
            show_note(f"Interrupted. {command} {TrainFolder(options.out).next_start()}.")
            raise
    if report is None:  # another process of the team tells
        return
    if not result.as_json:
        Console(highlight=False).print(report.card())
    result.tell(report.as_object())
