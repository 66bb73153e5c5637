"""`forerun bench`: what speculation brings on one's own model, machine and text, measured.

Decides the options, where card and JSON go, and the exit status: 0, 1 where any depth changed the tokens, 2 for a
mistake of the user's. What is run and how figures are formed is decided in `forerun.bench`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from forerun.bench.bench import bench as run
from forerun.bench.material import SHIPPED, Passage, prompt_file, replay_file, shipped
from forerun.bench.picture import check_picture, draw
from forerun.bench.plan import Selection
from forerun.bench.report import Bandwidth, BenchReport
from forerun.bench.setup import Models, about, set_up
from forerun.bench.show import bench_card
from forerun.bench.state import State, default_path, key_of
from forerun.demo.material import DRAFT, DRAFT_PARAMETERS, TARGET, TARGET_PARAMETERS, widen
from forerun.draft.spec import parse_spec
from forerun.errors import InvalidRequest
from forerun.machine import bandwidth_bytes_per_s
from forerun.models.bundled import BUNDLED, BUNDLED_NAMES
from forerun.models.loading import Progress
from forerun.options import (
    AdapterOption,
    DtypeOption,
    KernelsOption,
    QuantizeOption,
    ThreadsOption,
    TreeOption,
    adapted,
    with_options,
)
from forerun.progress import LoadingBar
from forerun.shape import StaticTree

Number = TypeVar("Number", int, float)
WORKLOADS = ", ".join(SHIPPED)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options that say what is measured."""

    model: Annotated[
        str, typer.Option("--model", "-m", help=f"Hugging Face folder, hub id, or bundled: {BUNDLED_NAMES}.")
    ] = TARGET
    draft: Annotated[
        str, typer.Option("--draft", "-d", help="What guesses ahead: ngram, suffix, model:DIR, mix[A,B].")
    ] = f"model:{DRAFT}"
    widen: Annotated[bool, typer.Option("--widen", help="Bundled models at the demo's sizes, 0.5 B and 21 M.")] = False
    workload: Annotated[str | None, typer.Option(help=f"Of {WORKLOADS}; default: code,edits.")] = None
    prompts: Annotated[
        Path | None, typer.Option(help="Instead: a .jsonl with prompt, text or turns in each line, or a .txt.")
    ] = None
    replay: Annotated[Path | None, typer.Option(help="Instead: a .jsonl with prompt and answer, replayed.")] = None
    batch: Annotated[str, typer.Option(help="Prompts at once, as in 1,4,16.")] = "1"
    depth: Annotated[
        str, typer.Option(help="Tokens guessed per round, as in 0,1,2,3,5,7; 0, plain, is always run.")
    ] = "0,2,4"
    tree: TreeOption = None
    temperature: Annotated[str, typer.Option("--temperature", "-t", help="As in 0,1; replayed texts have none.")] = (
        "0,1"
    )
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=2, help="New tokens per prompt, unless replayed.")] = 48
    num_prompts: Annotated[int, typer.Option(min=1, help="Most prompts of a workload; a batch repeats them.")] = 4
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each cell, by turns.")] = 3
    seed: Annotated[int, typer.Option(min=0, help="Of the first prompt; the others follow.")] = 0
    dtype: DtypeOption = "auto"
    quantize: QuantizeOption = None
    kernels: KernelsOption = "auto"
    threads: ThreadsOption = None
    adapter: AdapterOption = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", adapted(self.draft, self.adapter))

    def selection(self) -> Selection:
        """The cells."""
        return Selection(
            batches=numbers("batch", self.batch, int),
            depths=numbers("depth", self.depth, int),
            temperatures=numbers("temperature", self.temperature, float),
            num_tokens=self.tokens,
            num_prompts=self.num_prompts,
            repeats=self.repeats,
            seed=self.seed,
            tree=None if self.tree is None else StaticTree.load(self.tree),
        )

    def passages(self) -> dict[str, Sequence[Passage]]:
        """The texts, by the name of their workload."""
        given = [name for name in ("workload", "prompts", "replay") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(given[1], f"it says what to run, and so does --{given[0]}: give one of them.")
        if self.prompts is not None:
            return {self.prompts.stem: prompt_file(self.prompts)}
        if self.replay is not None:
            return {self.replay.stem: replay_file(self.replay)}
        names = (self.workload or "code,edits").split(",")
        return {name.strip(): shipped(name.strip()) for name in names}

    def models(self, progress: Progress) -> Models:
        """The models; with --widen the bundled ones, made large at first use."""
        target, draft = self.model, self.draft
        if self.widen:
            spec = parse_spec(draft)
            if target not in BUNDLED or spec.argument not in (None, *BUNDLED):
                raise InvalidRequest(
                    "widen", f"{target} drafted by {draft} is not of the bundled models {BUNDLED_NAMES}."
                )
            target = widen(target, TARGET_PARAMETERS, progress)
            if spec.argument is not None:
                draft = f"{spec.name}:{widen(spec.argument, DRAFT_PARAMETERS, progress)}"
        return Models(target, draft, self.dtype, self.quantize, self.kernels, self.threads)


@with_options
def bench(
    options: BenchOptions,
    as_json: Annotated[
        str | None, typer.Option("--json", help="File for the JSON line; -: standard output, also on a terminal.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw speed-up and cost by depth: a .png file.")] = None,
    state: Annotated[Path | None, typer.Option(help="Where finished runs are kept; default: the cache folder.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget finished runs and begin anew.")] = False,
) -> None:
    """Measure what speculation brings, on your model, machine and text. Without options: the bundled pair.

    Every cell is workload x batch x depth x temperature. What runs without options takes less than three minutes on
    two idle cores. The card goes to standard error, one line of JSON with all numbers to standard output. What is
    interrupted goes on where it was. Status 1: a depth changed the tokens.
    """
    if picture is not None:
        check_picture(picture)
    selection, passages, errors = options.selection(), options.passages(), Console(stderr=True, highlight=False)
    with LoadingBar(errors) as bar:
        report = measure(options.models(bar), passages, selection, state, fresh, bar)
    errors.print(bench_card(report))
    if picture is not None:
        draw(report, picture)
    write_json(report, as_json)
    if not report.same_tokens:
        raise typer.Exit(1)


def measure(
    models: Models,
    passages: dict[str, Sequence[Passage]],
    selection: Selection,
    path: Path | None,
    fresh: bool,
    bar: LoadingBar,
) -> BenchReport:
    """The benchmark, from where it was left."""
    stage = set_up(models, passages, selection, bar)
    what = about(models, stage, selection)
    state = State.open(path or default_path(key_of(what)), what, fresh)
    bar("benchmark", 0.0, "memory bandwidth")
    start = bandwidth_bytes_per_s()
    try:
        groups = run(stage, selection, state, lambda detail, done: bar("benchmark", done, detail))
    except KeyboardInterrupt:
        bar.stop()
        num_runs = len(state.runs)
        typer.echo(f"Interrupted. The same command goes on behind {num_runs} finished runs ({state.path}).", err=True)
        raise
    bar("benchmark", 1.0, "memory bandwidth")
    places = {name: [item.place for item in workload.items] for name, workload in stage.workloads.items()}
    bandwidth = Bandwidth(start, bandwidth_bytes_per_s())
    return BenchReport(what, bandwidth, models.blueprint().pass_bytes, places, tuple(groups))


def write_json(report: BenchReport, goal: str | None) -> None:
    """One line: to a file, or to standard output, unless a person reads there who did not ask for it."""
    line = json.dumps(report.as_object())
    if goal not in (None, "-"):
        Path(goal).write_text(line + "\n", encoding="utf-8")
    elif goal == "-" or not sys.stdout.isatty():
        typer.echo(line)


def numbers(name: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Numbers between commas."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(name, f"{text!r} must be numbers with commas between them, such as 0,1.") from None
