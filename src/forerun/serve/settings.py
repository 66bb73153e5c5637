"""ServeSettings: address, access and limits of a server. All checks here run before a model is loaded."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Option

from forerun.config import require_url, require_whole
from forerun.errors import InvalidRequest, MissingPackage
from forerun.models.gguf.file import PART
from forerun.serve.access import Hosts

MOST_SAMPLES_AT_ONCE = 128  # prompts times n of one body; OpenAI's limit of n
BODY_S = 30.0  # seconds that a client has to send its body
REQUIRED_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Address, access and limits of one server, which are options of `forerun serve`.

    At most `max_queue` requests of each key wait in addition to those being answered. A request that takes longer than
    `request_s`, including its time in the queue, ends with an error. `allowed_hosts`: the accepted names in `Host` and
    `Origin` headers, separated by commas. Raises InvalidRequest naming the field.
    """

    TITLE: ClassVar[str] = "Server"

    host: Annotated[str, Option(help="Address to listen on; default: this machine only.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000
    served_model_name: Annotated[
        str,
        Option(help="Model name in requests and answers; default: --model, or a GGUF file's name without .gguf."),
    ] = ""
    api_keys: Annotated[
        Path | None, Option(help="File with an API key per line, optionally after a name; other keys get 401.")
    ] = None
    allowed_hosts: Annotated[
        str, Option(help="Host names of this server and of web pages that may call it, as in a,b; *: all.")
    ] = ""
    max_queue: Annotated[
        int, Option(min=0, help="Maximum number of waiting requests per key; further ones get 429.")
    ] = 256
    max_body_bytes: Annotated[int, Option(min=1, help="Maximum request body size; larger ones get 413.")] = 8 << 20
    drain_s: Annotated[float, Option(min=0, help="Seconds that running requests may take after SIGTERM or Ctrl-C.")] = (
        60.0
    )
    request_s: Annotated[
        float | None, Option(help="Time limit of a request in seconds, including its wait; then it gets 504.")
    ] = None
    tls_key: Annotated[Path | None, Option(help="Private key for HTTPS (PEM).")] = None
    tls_cert: Annotated[Path | None, Option(help="Certificate for HTTPS (PEM).")] = None
    lenient: Annotated[
        bool,
        Option("--lenient", help="Ignore unknown request fields with a warning, instead of refusing the request."),
    ] = False
    trust_request_templates: Annotated[
        bool, Option("--trust-request-templates", help="Run chat templates that are sent in requests.")
    ] = False
    log_prompts: Annotated[
        bool, Option("--log-prompts", help="Log prompts; by default the log contains no part of them.")
    ] = False
    otlp_traces_endpoint: Annotated[
        str, Option(help="URL for OpenTelemetry traces (OTLP over HTTP). Needs forerun[otel].")
    ] = ""

    @property
    def hosts(self) -> Hosts:
        """The accepted host names."""
        return Hosts(self.host, frozenset(name.strip() for name in self.allowed_hosts.split(",") if name.strip()))

    def named(self, model: str) -> ServeSettings:
        """These settings, with the default name for this model if none is set."""
        return replace(self, served_model_name=self.served_model_name or served_name(model))

    def __post_init__(self) -> None:
        self.hosts  # noqa: B018 - raises for invalid names
        require_whole("max_queue", self.max_queue, 0)
        require_whole("max_body_bytes", self.max_body_bytes, 1)
        require_whole("port", self.port, 0)
        if not self.drain_s >= 0:
            raise InvalidRequest("drain_s", f"{self.drain_s} must be a number of seconds, 0 or more.")
        if self.request_s is not None and not self.request_s > 0:
            raise InvalidRequest("request_s", f"{self.request_s} must be a number of seconds above 0.")
        if (self.tls_key is None) != (self.tls_cert is None):
            raise InvalidRequest("tls_key", "HTTPS needs both a key and a certificate: give both, or neither.")
        if self.otlp_traces_endpoint:
            require_url("otlp_traces_endpoint", self.otlp_traces_endpoint)


def served_name(model: str) -> str:
    """The default model name in requests: the path or id as given; for a GGUF file its name without the suffix."""
    path = Path(model)
    part = PART.fullmatch(path.name)
    return part[1] if part else path.stem if path.suffix == ".gguf" else model


def require_packages() -> None:
    """Raise MissingPackage if a package that the server needs is not installed."""
    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        names = " and ".join([", ".join(missing[:-1]), missing[-1]] if len(missing) > 1 else missing)
        are = "is" if len(missing) == 1 else "are"
        raise MissingPackage(f"forerun serve needs {names}, which {are} not installed: pip install 'forerun[serve]'")


def require_certificate(key: Path, certificate: Path) -> None:
    """Raise InvalidRequest, naming option and file, unless these two PEM files can be used for HTTPS."""
    for option, path in (("tls_key", key), ("tls_cert", certificate)):
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise InvalidRequest(option, f"{path} cannot be read ({error.strerror}): name a PEM file.") from error

    def no_password() -> str:
        raise InvalidRequest("tls_key", f"{key} is encrypted, which is not supported: decrypt it.")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{key} is not the private key of {certificate}: name a matching pair."
            raise InvalidRequest("tls_key", problem) from error
        problem = f"{certificate} and {key} are not a certificate and a key in PEM ({error.reason or error})."
        raise InvalidRequest("tls_cert", problem) from error
