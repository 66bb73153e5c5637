"""`forerun serve`: an HTTP server for OpenAI's and Anthropic's clients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from forerun.commands.running import importing
from forerun.config import AUTO
from forerun.did_you_mean import complete_from
from forerun.errors import InvalidRequest
from forerun.options import ModelOptions, auto_or_whole, with_options
from forerun.replicas.settings import ReplicaSettings, require_ray
from forerun.serve.settings import ServeSettings, require_certificate, require_packages, served_name
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
        str, typer.Option(help="Number of engines: N, or MIN:MAX by load. Needs Ray Serve: forerun[ray].")
    ] = ""
    ray: Annotated[
        str, typer.Option(help="Ray cluster to use: auto or HOST:PORT; default: a new one on this machine.")
    ] = ""

    @property
    def settings(self) -> ReplicaSettings | None:
        """The settings of replicas; None for one engine in this process."""
        if not self.replicas:
            if self.ray:
                raise InvalidRequest("ray", f"{self.ray} goes with --replicas: give the number of replicas.")
            return None
        settings = ReplicaSettings.of(self.replicas, self.ray)
        require_ray()
        return settings


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options for the server's address, access and limits."""

    TITLE: ClassVar[str] = "Server"

    host: Annotated[str, typer.Option(help="Address to listen on; default: this machine only.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000
    served_model_name: Annotated[
        str,
        typer.Option(
            help="Model name in requests and answers; default: --model, for a GGUF file its name without .gguf."
        ),
    ] = ""
    api_keys: Annotated[
        Path | None, typer.Option(help="File with an API key per line, optionally after a name; others get 401.")
    ] = None
    allowed_hosts: Annotated[
        str, typer.Option(help="Host names of this server, and of web pages that may call it: a,b; * allows all.")
    ] = ""
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Maximum batch size (sequences generated at once).")] = 16
    chunk_tokens: Annotated[
        str,
        typer.Option(
            help="Prefill chunk size: prompt tokens per pass; auto: limited so that short prompts wait little.",
            parser=auto_or_whole(1),
        ),
    ] = AUTO
    max_queue: Annotated[
        int, typer.Option(min=0, help="Maximum number of waiting requests per key; further ones get 429.")
    ] = 256
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest request body; larger ones get 413.")] = 8 << 20
    drain_s: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests may take after SIGTERM or Ctrl-C.")
    ] = 60.0
    request_s: Annotated[
        float | None, typer.Option(help="Time limit of a request in seconds, waiting included; then it gets 504.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="Private key for HTTPS (PEM).")] = None
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate for HTTPS (PEM).")] = None
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient", help="Ignore unknown fields of requests with a warning, instead of refusing the request."
        ),
    ] = False
    trust_request_templates: Annotated[
        bool, typer.Option("--trust-request-templates", help="Run chat templates of requests, up to a second each.")
    ] = False
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Log prompts; by default the log contains no part of them.")
    ] = False
    access_log: Annotated[bool, typer.Option("--access-log", help="Log two lines for each request.")] = False
    log_format: Annotated[
        str, typer.Option(help="Log format: text or json.", autocompletion=complete_from("text", "json"))
    ] = "text"
    otlp_traces_endpoint: Annotated[
        str, typer.Option(help="URL for OpenTelemetry traces (OTLP over HTTP). Needs forerun[otel].")
    ] = ""

    @property
    def chunk(self) -> int | Literal["auto"]:
        """The prefill chunk size in tokens, or "auto"."""
        return "auto" if self.chunk_tokens == AUTO else int(self.chunk_tokens)

    def settings(self, model: str) -> ServeSettings:
        """The settings of the server."""
        return ServeSettings(
            host=self.host,
            port=self.port,
            model_name=self.served_model_name or served_name(model),
            api_keys=self.api_keys,
            max_queue=self.max_queue,
            max_body_bytes=self.max_body_bytes,
            drain_s=self.drain_s,
            request_s=self.request_s,
            lenient=self.lenient,
            trust_request_templates=self.trust_request_templates,
            log_prompts=self.log_prompts,
            tls_key=self.tls_key,
            tls_certificate=self.tls_cert,
            otlp_endpoint=self.otlp_traces_endpoint,
            allowed_hosts=frozenset(name.strip() for name in self.allowed_hosts.split(",") if name.strip()),
        )


@with_options(EXAMPLES)
@unfailing_stderr()
def serve(where: ModelOptions, server: ServeOptions, replicas: ReplicaOptions) -> None:
    """Run an HTTP server for OpenAI and Anthropic clients.

    The same seed, body and fingerprint give the same answer, whatever the load. docs/serving.md describes requests,
    errors, metrics and limits. Needs the extra forerun[serve].
    """
    require_packages()
    settings, engines = server.settings(where.model), replicas.settings
    with importing():
        from rich.console import Console

        from forerun.commands.answering import build_llm, llm_arguments
        from forerun.llm import LLM
        from forerun.serve.access import ApiKeys
        from forerun.serve.records import LOG_FORMATS, log_to_stderr, require_otel
        from forerun.serve.server import bound_socket
        from forerun.serve.server import serve as serve_until_told
        from forerun.serve.service import Service
    log_format = next((form for form in LOG_FORMATS if form == server.log_format), None)
    if log_format is None:
        raise InvalidRequest("log_format", f"{server.log_format!r} must be one of {', '.join(LOG_FORMATS)}.")
    if settings.otlp_endpoint:
        require_otel()
    if settings.tls_key is not None and settings.tls_certificate is not None:
        require_certificate(settings.tls_key, settings.tls_certificate)
    if settings.api_keys is not None:
        ApiKeys.read(settings.api_keys)  # raises before anything is loaded
    sock = bound_socket(settings)
    log_to_stderr(log_format, server.access_log)
    scheme, (host, port) = "http" if settings.tls_key is None else "https", sock.getsockname()[:2]
    with sock, ExitStack() as stack:
        service_of: Callable[[LLM, ServeSettings], Service] = Service
        if engines is None:
            llm = stack.enter_context(build_llm(where, Console(stderr=True), server.max_num_seqs, server.chunk))
        else:
            from forerun.replicas.front import ReplicaService
            from forerun.replicas.on_ray import ray_replicas

            show_note(f"starting {engines} replicas with Ray")
            arguments = llm_arguments(where, server.max_num_seqs, server.chunk)
            llm, running = stack.enter_context(ray_replicas(arguments, engines, settings.drain_s, f"{host}-{port}"))
            service_of = partial(ReplicaService, replicas=running)
        shown_host = f"[{host}]" if ":" in host else host

        def started() -> None:
            show_note(f"{settings.model_name} at {scheme}://{shown_host}:{port}/v1, fingerprint {llm.fingerprint}")
            show_note(f"page: {scheme}://{shown_host}:{port}/")

        status = serve_until_told(llm, settings, sock, started, service_of)
    if status:
        raise typer.Exit(status)
