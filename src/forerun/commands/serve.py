"""`forerun serve`: an HTTP server for OpenAI's and Anthropic's clients."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import typer

from forerun.commands.running import importing
from forerun.config import AUTO
from forerun.did_you_mean import complete_from
from forerun.errors import InvalidRequest
from forerun.options import ModelOptions, auto_or_whole, with_options
from forerun.replicas.settings import ReplicaSettings, require_ray
from forerun.serve.settings import ServeSettings, require_certificate, require_packages
from forerun.streams import show_note, unfailing_stderr

EXAMPLES = """
forerun serve --model stdlib --draft model:stdlib-draft
forerun serve --model Qwen/Qwen2.5-0.5B-Instruct --draft ngram --port 8080 --max-num-seqs 32
forerun serve --model stdlib --draft model:stdlib-draft --replicas 2
forerun serve --model ./target --draft model:./draft --host 0.0.0.0 --api-keys keys.txt --tls-key k.pem --tls-cert c.pem
"""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options for replicas: their number, and the Ray cluster."""

    TITLE: ClassVar[str] = "Replicas"

    replicas: Annotated[
        str, typer.Option(help="Number of engines: N, or MIN:MAX, scaled with the load. Needs Ray Serve: forerun[ray].")
    ] = ""
    ray: Annotated[
        str, typer.Option(help="Ray cluster to use: auto or HOST:PORT; default: a new one on this machine.")
    ] = ""

    @property
    def settings(self) -> ReplicaSettings | None:
        """The settings of replicas; None for one engine in this process."""
        if not self.replicas:
            if self.ray:
                raise InvalidRequest("ray", f"{self.ray} needs --replicas: give the number of replicas.")
            return None
        settings = ReplicaSettings.of(self.replicas, self.ray)
        require_ray()
        return settings


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options for the server and its engine."""

    TITLE: ClassVar[str] = ServeSettings.TITLE

    settings: ServeSettings = field(default_factory=ServeSettings)
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Maximum batch size (sequences generated at once).")] = 16
    chunk_tokens: Annotated[
        str,
        typer.Option(
            help="Prefill chunk size: prompt tokens per pass; auto: small enough that short prompts wait little.",
            parser=auto_or_whole(1),
        ),
    ] = AUTO
    access_log: Annotated[bool, typer.Option("--access-log", help="Log two lines for each request.")] = False
    log_format: Annotated[
        str, typer.Option(help="Log format: text or json.", autocompletion=complete_from("text", "json"))
    ] = "text"

    @property
    def chunk(self) -> int | Literal["auto"]:
        """The prefill chunk size in tokens, or "auto"."""
        return "auto" if self.chunk_tokens == AUTO else int(self.chunk_tokens)


@with_options(EXAMPLES)
@unfailing_stderr()
def serve(model_options: ModelOptions, server: ServeOptions, replicas: ReplicaOptions) -> None:
    """Run an HTTP server for OpenAI and Anthropic clients.

    The same seed, body and fingerprint give the same answer, whatever the load. docs/serving.md describes requests,
    errors, metrics and limits. Needs the extra forerun[serve].
    """
    require_packages()
    settings, engines = server.settings.named(model_options.model), replicas.settings
    with importing():
        from rich.console import Console

        from forerun.commands.answering import build_llm, llm_arguments
        from forerun.serve.access import ApiKeys
        from forerun.serve.records import LOG_FORMATS, log_start, log_to_stderr, require_otel, start_log
        from forerun.serve.server import bound_socket
        from forerun.serve.server import serve as serve_until_stopped
        from forerun.serve.service import Service
    log_format = next((form for form in LOG_FORMATS if form == server.log_format), None)
    if log_format is None:
        raise InvalidRequest("log_format", f"{server.log_format!r} must be one of {', '.join(LOG_FORMATS)}.")
    if settings.otlp_traces_endpoint:
        require_otel()
    if settings.tls_key is not None and settings.tls_cert is not None:
        require_certificate(settings.tls_key, settings.tls_cert)
    if settings.api_keys is not None:
        ApiKeys.read(settings.api_keys)  # raises before anything is loaded
    sock = bound_socket(settings)
    log_to_stderr(log_format, server.access_log)
    scheme, (host, port) = "http" if settings.tls_key is None else "https", sock.getsockname()[:2]
    with sock, ExitStack() as stack:
        start_log.info("loading %s", model_options.model)
        if engines is None:
            llm = stack.enter_context(build_llm(model_options, Console(stderr=True), server.max_num_seqs, server.chunk))
            service = Service(llm, settings)
        else:
            from forerun.replicas.front import ReplicaService
            from forerun.replicas.on_ray import ray_replicas

            show_note(f"starting {engines} replicas with Ray")
            arguments = llm_arguments(model_options, server.max_num_seqs, server.chunk)
            model, running = stack.enter_context(ray_replicas(arguments, engines, settings.drain_s, f"{host}-{port}"))
            service = ReplicaService(model, settings, running)
        address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

        def started() -> None:
            log_start(log_format, settings.served_model_name, address, service.llm.fingerprint)

        status = serve_until_stopped(service, sock, started)
    if status:
        raise typer.Exit(status)
