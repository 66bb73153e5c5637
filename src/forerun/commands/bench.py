"""`forerun bench`: measures the speed-up of speculation on the user's model, machine and text.

This file defines the options and the exit status: 0, or 1 if any depth changed the tokens. `forerun.bench` measures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from forerun.bench.plan import CHOSEN, SHIPPED, Selection
from forerun.commands.running import Result, importing, numbers
from forerun.config import AUTO
from forerun.models.bundled import DRAFT, TARGET
from forerun.options import (
    OUTPUT,
    REQUIRED_DRAFT,
    AdapterOption,
    LoadingOptions,
    ModelOption,
    OutputOptions,
    TreeOption,
    adapted,
    with_options,
)
from forerun.shape import StaticTree

EXAMPLES = """
forerun bench
forerun bench --model stdlib --draft ngram --workload edits --batch 1,4 -o edits.json
forerun bench --model ./target --draft model:./draft --prompts mine.jsonl --picture out.svg
"""


TemperatureOption = Annotated[str, typer.Option("--temperature", "-t", help="As in 0,1; not used with --replay.")]
TokensOption = Annotated[
    int, typer.Option("--max-tokens", "-n", min=2, help="New tokens per prompt, without --replay.")
]
PromptsOption = Annotated[int, typer.Option(min=1, help="Maximum number of prompts; they repeat to fill a batch.")]


@dataclass(frozen=True, slots=True)
class MeasurementOptions:
    """Options for what is measured, and on which prompts."""

    TITLE: ClassVar[str] = "Measurement"

    model: ModelOption = TARGET
    prompts: Annotated[
        Path | None, typer.Option(help="File: .jsonl with prompt, messages or turns (and category), or .txt.")
    ] = None
    replay: Annotated[Path | None, typer.Option(help="Recorded answers to replay: .jsonl with prompt and answer.")] = (
        None
    )
    batch: Annotated[str, typer.Option(help="Batch sizes, as in 1,4,16.")] = "1"
    temperature: TemperatureOption = "0"
    max_tokens: TokensOption = 64
    num_prompts: PromptsOption = 16
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions, alternating between variants.")] = 3
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first prompt; the seeds of the others count up.")] = 0
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard earlier measurements and start over.")] = False
    loading: LoadingOptions = field(default_factory=LoadingOptions)

    def cells(self, depths: tuple[int, ...] = (0,), tree: StaticTree | None = None) -> Selection:
        """The cells to measure, at these depths."""
        return Selection(
            numbers("batch", self.batch, int),
            depths,
            numbers("temperature", self.temperature, float),
            self.max_tokens,
            self.num_prompts,
            self.repeats,
            self.seed,
            tree,
        )


@dataclass(frozen=True, slots=True)
class BenchOptions(MeasurementOptions):
    """Measurement options for one drafter at several depths."""

    draft: Annotated[str, REQUIRED_DRAFT] = f"model:{DRAFT}"
    widen: Annotated[
        bool, typer.Option("--widen", help="Enlarge bundled models to 0.5 B and 21 M parameters, as in the demo.")
    ] = False
    workload: Annotated[
        str | None, typer.Option(help=f"Bundled prompts: any of {', '.join(SHIPPED)}; default: code,edits.")
    ] = None
    depth: Annotated[
        str, typer.Option(help="Draft depths, as in 0,1,2,3,5,7 or 4,auto; 0 (plain decoding) is always measured.")
    ] = "0,2,4"
    tree: TreeOption = None
    temperature: TemperatureOption = "0,1"
    max_tokens: TokensOption = 48
    num_prompts: PromptsOption = 4
    state: Annotated[Path | None, typer.Option(help="Folder of finished runs; default: the cache folder.")] = None
    adapter: AdapterOption = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", adapted(self.draft, self.adapter))

    def selection(self) -> Selection:
        """The cells to measure, at the depths of the option."""
        tree = None if self.tree is None else StaticTree.load(self.tree)
        return self.cells(numbers("depth", self.depth, depth_number), tree)


@with_options(EXAMPLES)
def bench(
    options: BenchOptions,
    output: OutputOptions,
    picture: Annotated[
        Path | None, typer.Option(help="Plot speed-up and cost by depth into an .svg file.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Measure the speed-up of speculation on your model, machine and text. Without options: on the bundled models.

    Every combination of workload, batch size, depth and temperature is measured; without options this takes less than
    three minutes on two idle cores. After an interruption, the same command resumes. Exit status 1: the tokens at some
    depth differ from those of plain decoding.
    """
    result, selection = Result.of(output, picture), options.selection()
    with importing():
        from forerun.bench.material import passages_of
        from forerun.bench.measure import Models, measure
        from forerun.bench.show import bench_card
        from forerun.bench.show import picture as drawn
        from forerun.demo.material import widened_pair
        from forerun.progress import LoadingBar
    passages = passages_of(options.workload, options.prompts, options.replay)
    with LoadingBar(lines=True) as bar:
        target, draft = options.model, options.draft
        if options.widen:
            target, draft = widened_pair(target, draft, bar)
        models = Models(options.loading.spec(target), draft, options.loading.threads)
        report = measure(models, passages, selection, options.state, options.fresh, bar)
    result.write(report.as_object(), bench_card(report), drawing=lambda: drawn(report))
    if not report.same_tokens:
        raise typer.Exit(1)


def depth_number(text: str) -> int:
    """Parse a depth or "auto" (CHOSEN). Raises ValueError."""
    depth = CHOSEN if text.strip() == AUTO else int(text)
    if depth < 0 and text.strip() != AUTO:
        raise ValueError(text)
    return depth
