"""`forerun bench serve`: measures a running server under load.

This file defines the options, including those of other commands that use a server, and the exit status: 0, or 1 if
answers differ between modes of speculation. `forerun.traffic` sends the requests and computes the figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from forerun.commands.running import Result, importing, numbers, object_value
from forerun.errors import InvalidRequest
from forerun.options import OUTPUT, OutputOptions, changed, with_options
from forerun.traffic.plan import LoadKind, ServerLoad, SpeculationMode, TrafficPlan

if TYPE_CHECKING:
    from forerun.traffic.client import ServerAddress

EXAMPLES = """
forerun bench serve
forerun bench serve --rate 0.5,1,2,4 --sla-between-ms 50 --picture load.svg
forerun bench serve --url http://gpu:8000 --chat --prompts mine.jsonl --concurrency 1,8,32 --ignore-eos -o load.json
"""
DEFAULT_CONCURRENCY = "1,4,16"


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Options for access to a server."""

    TITLE: ClassVar[str] = "Server"

    api_key: Annotated[str, typer.Option(help="API key, if the server requires one.", envvar="OPENAI_API_KEY")] = ""
    served_model_name: Annotated[str, typer.Option(help="Model name; default: the server's first model.")] = ""
    timeout_s: Annotated[float, typer.Option(min=1, help="Seconds without data until a request fails.")] = 600.0

    def address(self, url: str, chat: bool, option: str = "url") -> ServerAddress:
        """The address of a server; `option` names its URL."""
        from forerun.traffic.client import ServerAddress

        return ServerAddress(url, self.api_key, self.served_model_name, chat, self.timeout_s, url_option=option)


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Options of commands that can use a server instead of a loaded model."""

    TITLE: ClassVar[str] = "Server"

    server: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-compatible server to use instead of loading a model.")
    ] = None
    access: AccessOptions = field(default_factory=AccessOptions)

    def refuse(self, given: Iterable[str], known: Container[str], fix: str = "leave it out") -> None:
        """Raise InvalidRequest for a given option that is not `known`, since it applies only to a loaded model."""
        for name in given:
            if name not in known:
                raise InvalidRequest(name, f"it cannot be used with --server {self.server}: {fix}.")

    def require_server(self) -> None:
        """Raise InvalidRequest for a given option that applies only to a server, as there is none."""
        access = set(changed(self.access))  # settings files have these for other commands
        for name in changed(self):
            if name not in access:
                value = getattr(self, name)
                text = f"{value:g}" if isinstance(value, float) else repr(value)
                raise InvalidRequest(name, f"{text} needs --server: name the server with speculation, or leave it out.")

    def addresses(
        self, chat: bool, other: str | None, option: str, other_model: str
    ) -> tuple[ServerAddress, ServerAddress | None]:
        """The server, and the one it is compared with (URL `other`), which `option` and `option`-model name."""
        assert self.server is not None, "only called with --server"
        first = self.access.address(self.server, chat, "server")
        if other is None:
            return first, None
        return first, replace(first, url=other, model=other_model, url_option=option, model_option=f"{option}_model")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options for the server to measure."""

    TITLE: ClassVar[str] = "Server"

    url: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server.")] = "http://127.0.0.1:8000"
    access: AccessOptions = field(default_factory=AccessOptions)
    chat: Annotated[bool, typer.Option("--chat", help="Use chat completions; prompts become messages.")] = False


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for the load and the requests."""

    TITLE: ClassVar[str] = "Load"

    rate: Annotated[str | None, typer.Option(help="Requests per second, as in 0.5,1,2, with Poisson arrivals.")] = None
    concurrency: Annotated[
        str | None, typer.Option(help=f"Concurrent requests, as in 1,8; default without --rate: {DEFAULT_CONCURRENCY}.")
    ] = None
    speculation: Annotated[
        str | None,
        typer.Option(help="Modes of speculation, as in off,auto,4; default with a forerun server: off,auto."),
    ] = None
    prompts: Annotated[
        Path | None, typer.Option(help="File: .jsonl with prompt, messages or turns (and category), or .txt.")
    ] = None
    num_requests: Annotated[int, typer.Option(min=1, help="Requests per load, mode and repetition.")] = 32
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions, alternating between modes.")] = 3
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Maximum new tokens per request.")] = 64
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Always generate --max-tokens tokens, if the server supports it.")
    ] = False
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Temperature of every request.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of the arrival times and the requests.")] = 0
    body: Annotated[str, typer.Option(help="Additional fields of every request, as a JSON object.")] = "{}"

    def plan(self) -> TrafficPlan:
        """The plan of the load test, without the prompts."""
        loads: dict[LoadKind, str | None] = {
            "rate": self.rate,
            "concurrency": self.concurrency or (None if self.rate else DEFAULT_CONCURRENCY),
        }
        modes = () if self.speculation is None else self.speculation.split(",")
        return TrafficPlan(
            tuple(
                ServerLoad(kind, value) for kind, text in loads.items() if text for value in numbers(kind, text, float)
            ),
            tuple(SpeculationMode(mode.strip()) for mode in modes),
            num_requests=self.num_requests,
            repeats=self.repeats,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, slots=True)
class ServiceLevelOptions:
    """Options for the service level."""

    TITLE: ClassVar[str] = "Service level"

    sla_between_ms: Annotated[float | None, typer.Option(help="Maximum milliseconds between tokens.")] = None
    sla_first_ms: Annotated[float | None, typer.Option(help="Maximum milliseconds to the first token.")] = None
    sla_percentile: Annotated[float, typer.Option(help="Percentage of requests that must meet these limits.")] = 95.0


@with_options(EXAMPLES)
def bench_serve(
    server: ServerOptions,
    load: LoadOptions,
    limits: ServiceLevelOptions,
    output: OutputOptions,
    picture: Annotated[
        Path | None, typer.Option(help="Plot throughput and latency by load: an .svg file.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Measure a running server under load: throughput, time to first token, time between tokens.

    It works with any OpenAI-compatible server. With a forerun server it alternates between modes of speculation, whose
    answers must be equal. Needs the extra forerun[bench]. Exit status 1: an answer differs between modes.
    """
    result = Result.of(output, picture)
    with importing():
        from forerun.progress import LoadingBar
        from forerun.traffic.client import require_client
        from forerun.traffic.figures import ServiceLevel
        from forerun.traffic.run import measure_traffic
        from forerun.traffic.show import picture as drawn
        from forerun.traffic.show import traffic_card
    require_client()
    plan = load.plan()
    between_s, first_s = (None if ms is None else ms / 1000 for ms in (limits.sla_between_ms, limits.sla_first_ms))
    level = ServiceLevel(between_s, first_s, limits.sla_percentile)
    extra = object_value("body", load.body, '{"top_p": 0.9}')
    address = server.access.address(server.url, server.chat)
    with LoadingBar(lines=True) as bar:
        measurement = measure_traffic(
            address, plan, level, lambda detail, done: bar("load", done, detail), load.prompts, extra
        )
        report = asyncio.run(measurement)
    result.write(report.as_object(), traffic_card(report), drawing=lambda: drawn(report))
    if report.same_answers is False:
        raise typer.Exit(1)
