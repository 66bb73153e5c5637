"""`forerun tune`: finds the best drafter and depth for the user's model, machine and prompts.

This file defines the options, the files in the output folder, and the exit status: 0, or 1 if tokens differ from those
of plain decoding. `forerun.tune` measures; for a server it is `forerun.remote`.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.commands.bench import MeasurementOptions
from forerun.commands.bench_serve import RemoteOptions
from forerun.commands.running import Destination, Result, importing, numbers, object_value
from forerun.draft.spec import parse_spec, runs_code
from forerun.errors import InvalidRequest
from forerun.options import DRAFTERS, MODEL, OutputOptions, changed, with_options
from forerun.settings_file import written_settings
from forerun.store import writable
from forerun.streams import show_note

if TYPE_CHECKING:
    from forerun.tune.report import TuneReport

OUT = Path("tuned")
SERVER_OPTIONS = ("prompts", "temperature", "max_tokens", "num_prompts", "repeats", "seed", "chat", "time_limit")
JSON, SETTINGS, PAGE = "tune.json", "forerun.toml", "tune.html"

EXAMPLES = """
forerun tune --model stdlib --drafts model:stdlib-draft ngram suffix
forerun tune --model ./target --drafts model:./draft ngram early-exit:auto --prompts mine.jsonl --batch 1,8,32
forerun tune --model ./target --drafts ngram suffix --replay answers.jsonl --out tuned
forerun tune --server http://gpu:8000 --against http://gpu:8001 --prompts mine.jsonl --clients 1,8,32
"""


@dataclass(frozen=True, slots=True)
class TuneOptions(MeasurementOptions):
    """Measurement options for several drafters."""

    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template to every prompt.")] = False
    template_options: Annotated[
        str, typer.Option(help='Variables of the chat template, as in {"enable_thinking": false}.')
    ] = "{}"
    time_limit: Annotated[float | None, typer.Option(min=1e-3, help="Seconds until no measurement starts.")] = None
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = OUT


@dataclass(frozen=True, slots=True)
class ServerTuneOptions(RemoteOptions):
    """Server options, and the server to compare with."""

    against: Annotated[
        str | None, typer.Option(help="With --server: a server of the same model without speculation.")
    ] = None
    against_model: Annotated[str, typer.Option(help="Model name on that server, if it differs.")] = ""
    clients: Annotated[str, typer.Option(help="With --server: concurrent requests, as in 1,8,32.")] = "1,4,16"
    depths: Annotated[
        str, typer.Option(help="With --server: depths to measure, if requests can set it, as with forerun.")
    ] = "1,4"
    body: Annotated[str, typer.Option(help="With --server: additional request fields, as a JSON object.")] = "{}"


@with_options(EXAMPLES)
def tune(
    options: TuneOptions,
    remote: ServerTuneOptions,
    output: OutputOptions,
    drafts: Annotated[
        list[str] | None,
        typer.Option("--drafts", "-d", help=f"Drafters to try, at least one: {DRAFTERS}.", rich_help_panel=MODEL),
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="DRAFT", help="More drafters to try, as in --drafts A B C.")
    ] = None,
) -> None:
    """Find out whether speculation saves time on your model, machine and prompts, with which drafter and depth.

    Each drafter's speed-up is predicted from its acceptance on the prompts and from measured costs, then measured on
    the same prompts, alternating with plain decoding. The first batch size and temperature decide the choice. The
    files tune.json, tune.html and forerun.toml are written to the folder; every command reads forerun.toml with
    --config. After an interruption, the same command resumes. Exit status 1: a drafter changed the tokens.

    With --server it measures any OpenAI-compatible server at several loads, against the same model without speculation:
    whether speculation saves time, from which load on it costs time, and which depth would be best.
    """
    result, names = Result.of(output), [*(drafts or ()), *(more or ())]
    if remote.server is not None:
        tune_server(options, remote, names, result)
        return
    remote.require_server()
    selection = options.cells()
    template_values = object_value("template_options", options.template_options, '{"enable_thinking": false}')
    with importing():
        from rich.console import Console

        from forerun.bench.material import Template, mixed_passages
        from forerun.progress import LoadingBar
        from forerun.tune.page import html_page
        from forerun.tune.show import tune_card
        from forerun.tune.trial import candidates_of
        from forerun.tune.tune import Subject
        from forerun.tune.tune import tune as run
    candidates_of(names, 2)  # raises before anything is read
    prompts = mixed_passages(options.prompts, options.replay)
    with writable(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
    Destination("out", options.out / JSON)
    loading, template = options.loading, Template(template_values, options.chat)
    subject = Subject(loading.spec(options.model), names, template, loading.threads)
    with LoadingBar(lines=True) as bar:
        report = run(subject, prompts, selection, options.out, options.fresh, bar, options.time_limit)
    written = {JSON: json.dumps(report.as_object(), indent=1) + "\n", PAGE: html_page(report), **settings_of(report)}
    if SETTINGS not in written and (options.out / SETTINGS).exists():
        show_note(f"{options.out / SETTINGS} is of an earlier tuning: this one recommends no setting.")
    for name, content in written.items():
        Destination("out", options.out / name).write(content)
    result.write(report.as_object(), tune_card(report))
    if not result.as_json:
        paths = ", ".join(str(options.out / name) for name in written)
        Console(highlight=False).print(f"Written: {paths}", style="dim", soft_wrap=True)
    if not report.same_tokens:
        raise typer.Exit(1)


def settings_of(report: TuneReport) -> dict[str, str]:
    """The settings file by its name: the model, and the fastest choice at the first batch size and temperature.

    {} if nothing is recommended.
    """
    if (pick := report.pick) is None:
        return {}
    values = {"model": report.about["model"]["given_as"], **report.model_options}
    finding, use = "plain decoding was fastest", "--config FILE reads it."
    if pick.draft is not None:
        values |= {"draft": pick.draft, "depth": pick.shown_depth, "verification": "coupled"}
        finding = f"{pick.speed_up:.2f} times as fast as plain decoding"
        if runs_code(parse_spec(pick.draft)):  # which no settings file may name
            use = f"Use it with --config FILE --draft {shlex.quote(values.pop('draft'))}"
    at = f"at batch {pick.batch}, temperature {pick.temperature:g}"
    return {SETTINGS: written_settings(values, f"Written by forerun tune: {finding} {at}.\n{use}")}


def tune_server(options: TuneOptions, remote: ServerTuneOptions, names: list[str], result: Result) -> None:
    """Measure a server instead of drafters. Raises InvalidRequest for options that apply only to a loaded model."""
    assert remote.server is not None, "only called with --server"
    fix = "leave it out; use --clients for the loads, and -o for the file"
    remote.refuse(["drafts"] if names else changed(options), SERVER_OPTIONS, fix)
    with importing():
        from forerun.bench.material import mixed_passages
        from forerun.progress import LoadingBar
        from forerun.remote.measure import ServerPlan, measure_servers
        from forerun.remote.tuning import ServerTuning
        from forerun.remote.tuning_show import server_card
        from forerun.traffic.client import require_client
    require_client("forerun tune --server", "prometheus_client")
    temperatures = numbers("temperature", options.temperature, float)
    if len(temperatures) > 1:
        raise InvalidRequest("temperature", f"{options.temperature} must be one number to measure a server.")
    plan = ServerPlan(
        numbers("clients", remote.clients, int),
        options.num_prompts,
        options.repeats,
        options.max_tokens,
        temperatures[0],
        options.seed,
        numbers("depths", remote.depths, int),
        options.time_limit,
    )
    extra = object_value("body", remote.body, '{"top_p": 0.9}')
    prompts = mixed_passages(options.prompts)
    address, against = remote.addresses(options.chat, remote.against, "against", remote.against_model)
    with LoadingBar(lines=True) as bar:
        measured = measure_servers(
            address, against, plan, prompts, lambda detail, done: bar("load", done, detail), extra
        )
        contenders, blocks = asyncio.run(measured)
    tuning = ServerTuning.of(contenders, plan, blocks)
    result.write(tuning.as_object(), server_card(tuning))
