"""`forerun tune`: which drafter helps on the user's model, machine and prompts, how deep, and at what memory.

This file decides the options, the files in the folder, and the exit status: 0, or 1 where tokens differ from those of
plain decoding. `forerun.tune` decides what is measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from forerun.commands.bench import numbers
from forerun.commands.destination import Result
from forerun.commands.interrupt import importing
from forerun.errors import InvalidRequest
from forerun.models.bundled import TARGET
from forerun.options import (
    DRAFTERS,
    MODEL,
    LoadingOptions,
    ModelOption,
    OutputOptions,
    with_options,
)
from forerun.tune.settings import TuneSettings

EXAMPLES = """
forerun tune --model stdlib --drafts model:stdlib-draft ngram suffix
forerun tune --model ./target --drafts model:./draft ngram early-exit:auto --prompts mine.jsonl --batch 1,8,32
forerun tune --model ./target --drafts ngram suffix --replay answers.jsonl --out tuned
"""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Options that say what is tried, and on what."""

    TITLE: ClassVar[str] = "Measurement"

    model: ModelOption = TARGET
    prompts: Annotated[
        Path | None, typer.Option(help="A .jsonl with prompt, messages or turns (and category), or a .txt.")
    ] = None
    replay: Annotated[Path | None, typer.Option(help="Instead: a .jsonl with answers as well, replayed.")] = None
    chat: Annotated[bool, typer.Option("--chat", help="Every prompt is a message, for the chat template.")] = False
    template_options: Annotated[
        str, typer.Option(help='Options of the chat template, as in {"enable_thinking": false}.')
    ] = "{}"
    batch: Annotated[str, typer.Option(help="Prompts at once, as in 1,8,32; the first decides the choice.")] = "1"
    temperature: Annotated[str, typer.Option("--temperature", "-t", help="As in 0,1; the first decides.")] = "0"
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=2, help="New tokens per prompt, unless replayed.")
    ] = 64
    num_prompts: Annotated[int, typer.Option(min=1, help="Most prompts.")] = 16
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement, by turns.")] = 3
    seed: Annotated[int, typer.Option(min=0, help="Of the first prompt; the others follow.")] = 0
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which nothing new is measured.")] = None
    out: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path("tuned")
    html: Annotated[
        bool, typer.Option("--html", help="Stop where the page would have no charts, for want of matplotlib.")
    ] = False
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what is measured, and start over.")] = False
    loading: LoadingOptions = field(default_factory=LoadingOptions)

    def settings(self) -> TuneSettings:
        """The cells."""
        return TuneSettings(
            batches=numbers("batch", self.batch, int),
            temperatures=numbers("temperature", self.temperature, float),
            num_tokens=self.max_tokens,
            num_prompts=self.num_prompts,
            repeats=self.repeats,
            seed=self.seed,
            time_limit_s=self.time_limit,
        )

    def template_values(self) -> dict[str, Any]:
        """The options of the chat template."""
        try:
            values = json.loads(self.template_options)
        except ValueError as error:
            raise InvalidRequest("template_options", f"{self.template_options!r} is not JSON ({error}).") from error
        if not isinstance(values, dict):
            raise InvalidRequest("template_options", f'{self.template_options!r} must be like {{"name": value}}.')
        return values


@with_options(EXAMPLES)
def tune(
    options: TuneOptions,
    output: OutputOptions,
    drafts: Annotated[
        list[str] | None,
        typer.Option("--drafts", "-d", help=f"Drafters to try: {DRAFTERS}.", rich_help_panel=MODEL),
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="DRAFT", help="Further drafters to try, as in --drafts A B C.")
    ] = None,
) -> None:
    """Find out whether speculation helps on your model, machine and prompts: with which drafter, how deep.

    Each drafter's speed-up is predicted from what it guesses on the prompts and from measured costs, and then measured
    on the same prompts, against plain decoding by turns. The folder gets tune.json, forerun.toml, which every
    command reads with --config, and tune.html. What is interrupted goes on where it was. Status 1: a drafter changed
    the tokens.
    """
    result, settings = Result.of(output), options.settings()
    template_values = options.template_values()
    with importing():
        from rich.console import Console

        from forerun.commands.tuned_files import write_files
        from forerun.progress import LoadingBar
        from forerun.tune.charts import require_charts
        from forerun.tune.material import Template, read_tune_prompts
        from forerun.tune.notes import require_folder
        from forerun.tune.settings import candidates_of
        from forerun.tune.show import tune_card
        from forerun.tune.tune import Subject
        from forerun.tune.tune import tune as run
    if options.html:
        require_charts()
    names = [*(drafts or ()), *(more or ())]
    candidates_of(names, 2)  # refused before anything is read
    prompts = read_tune_prompts(options.prompts, options.replay)
    require_folder(options.out)
    loading, template = options.loading, Template(template_values, options.chat)
    subject = Subject(loading.spec(options.model), names, template, loading.threads)
    with LoadingBar(Console(stderr=True, highlight=False)) as bar:
        report = run(subject, prompts, settings, options.out, options.fresh, bar)
    written = write_files(report, options.out)
    if not result.as_json:
        console = Console(highlight=False)
        console.print(tune_card(report))
        console.print(f"Written: {', '.join(map(str, written))}", style="dim", soft_wrap=True)
    result.tell(report.as_object())
    if not report.same_tokens:
        raise typer.Exit(1)
