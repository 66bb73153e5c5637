"""`forerun tune`: which drafter helps on the user's model, machine and prompts, how deep, and at what memory.

This file decides the options, the files in the folder, and the exit status: 0, or 1 where tokens differ from those of
plain decoding. `forerun.tune` decides what is measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.commands.bench import MeasurementOptions, json_object
from forerun.commands.destination import Destination, Result
from forerun.commands.interrupt import importing
from forerun.options import DRAFTERS, MODEL, OutputOptions, with_options
from forerun.settings_file import written_settings
from forerun.store import writable
from forerun.tune.settings import TuneSettings

if TYPE_CHECKING:
    from forerun.tune.report import TunedChoice, TuneReport

JSON, SETTINGS, PAGE = "tune.json", "forerun.toml", "tune.html"

EXAMPLES = """
forerun tune --model stdlib --drafts model:stdlib-draft ngram suffix
forerun tune --model ./target --drafts model:./draft ngram early-exit:auto --prompts mine.jsonl --batch 1,8,32
forerun tune --model ./target --drafts ngram suffix --replay answers.jsonl --out tuned
"""


@dataclass(frozen=True, slots=True)
class TuneOptions(MeasurementOptions):
    """Those of any measurement, for several drafters."""

    chat: Annotated[bool, typer.Option("--chat", help="Every prompt is a message, for the chat template.")] = False
    template_options: Annotated[
        str, typer.Option(help='Options of the chat template, as in {"enable_thinking": false}.')
    ] = "{}"
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which nothing new is measured.")] = None
    out: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path("tuned")


@with_options(EXAMPLES)
def tune(
    options: TuneOptions,
    output: OutputOptions,
    drafts: Annotated[
        list[str] | None, typer.Option("--drafts", "-d", help=f"Drafters to try: {DRAFTERS}.", rich_help_panel=MODEL)
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="DRAFT", help="Further drafters to try, as in --drafts A B C.")
    ] = None,
) -> None:
    """Find out whether speculation helps on your model, machine and prompts: with which drafter, how deep.

    Each drafter's speed-up is predicted from what it guesses on the prompts and from measured costs, and then measured
    on the same prompts, against plain decoding by turns. The first batch size and the first temperature decide the
    choice. The folder gets tune.json, forerun.toml, which every command reads with --config, and tune.html. What is
    interrupted goes on where it was. Status 1: a drafter changed the tokens.
    """
    result, settings = Result.of(output), TuneSettings(**options.cells(), time_limit_s=options.time_limit)
    template_values = json_object("template_options", options.template_options, '{"enable_thinking": false}')
    with importing():
        from rich.console import Console

        from forerun.bench.material import Template, mixed_passages
        from forerun.progress import LoadingBar
        from forerun.tune.page import html_page
        from forerun.tune.settings import candidates_of
        from forerun.tune.show import tune_card
        from forerun.tune.tune import Subject
        from forerun.tune.tune import tune as run
    names = [*(drafts or ()), *(more or ())]
    candidates_of(names, 2)  # refused before anything is read
    prompts = mixed_passages(options.prompts, options.replay)
    with writable(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
    Destination("out", options.out / JSON)
    loading, template = options.loading, Template(template_values, options.chat)
    subject = Subject(loading.spec(options.model), names, template, loading.threads)
    with LoadingBar(Console(stderr=True, highlight=False)) as bar:
        report = run(subject, prompts, settings, options.out, options.fresh, bar)
    written = {JSON: json.dumps(report.as_object(), indent=1) + "\n", PAGE: html_page(report)}
    if report.pick is not None:
        written[SETTINGS] = settings_of(report, report.pick)
    for name, content in written.items():
        Destination("out", options.out / name).write(content)
    if not result.as_json:
        console = Console(highlight=False)
        console.print(tune_card(report))
        console.print(f"Written: {', '.join(str(options.out / name) for name in written)}", style="dim", soft_wrap=True)
    result.tell(report.as_object())
    if not report.same_tokens:
        raise typer.Exit(1)


def settings_of(report: TuneReport, pick: TunedChoice) -> str:
    """The settings file: the model as it was given, and what was fastest at the first batch size and temperature."""
    values = {"model": report.about["model"]["given_as"], **report.model_options}
    finding = "plain decoding was fastest"
    if pick.draft is not None:
        values |= {"draft": pick.draft, "depth": pick.shown_depth, "verification": "coupled"}
        finding = f"{pick.speed_up:.2f} times as fast as plain decoding"
    at = f"at batch {pick.batch}, temperature {pick.temperature:g}"
    return written_settings(values, f"Written by forerun tune: {finding} {at}.\n--config FILE reads it.")
