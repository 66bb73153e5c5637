"""ServeSettings: address, access and limits of a server. All checks here run before a model is loaded."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from forerun.config import require_whole
from forerun.errors import InvalidRequest, MissingPackage
from forerun.models.gguf.file import PART
from forerun.serve.access import Hosts

MOST_SAMPLES_AT_ONCE = 128  # prompts times n of one body; OpenAI's limit of n
BODY_S = 30.0  # seconds that a client has to send its body
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of one server.

    At most `max_queue` requests of each key wait beyond those being answered. On shutdown, open requests have `drain_s`
    seconds to finish. A request that takes longer than `request_s`, waiting included, ends with an error. With
    `lenient` unknown fields of bodies are logged instead of refused. With `trust_request_templates` a body may have its
    own chat template. `api_keys` is a file of keys; without one there is no authentication. Traces go to
    `otlp_endpoint`, an OTLP address over HTTP. `allowed_hosts` are the names in `Host` and `Origin` headers that are
    accepted; "*" allows all. Raises InvalidRequest naming the field.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = ""
    api_keys: Path | None = None
    max_queue: int = 256
    max_body_bytes: int = 8 << 20
    drain_s: float = 60.0
    request_s: float | None = None
    lenient: bool = False
    trust_request_templates: bool = False
    log_prompts: bool = False
    tls_key: Path | None = None
    tls_certificate: Path | None = None
    otlp_endpoint: str = ""
    allowed_hosts: frozenset[str] = frozenset()

    @property
    def hosts(self) -> Hosts:
        """The accepted host names."""
        return Hosts(self.host, self.allowed_hosts)

    def __post_init__(self) -> None:
        self.hosts  # noqa: B018 - raises for invalid names
        require_whole("max_queue", self.max_queue, 0)
        require_whole("max_body_bytes", self.max_body_bytes, 1)
        require_whole("port", self.port, 0)
        if not self.drain_s >= 0:
            raise InvalidRequest("drain_s", f"{self.drain_s} must be a number of seconds from 0 on.")
        if self.request_s is not None and not self.request_s > 0:
            raise InvalidRequest("request_s", f"{self.request_s} must be a number of seconds above 0.")
        if (self.tls_key is None) != (self.tls_certificate is None):
            raise InvalidRequest("tls_key", "a key and a certificate go together: give both, or neither.")


def served_name(model: str) -> str:
    """The default model name in requests: the path or id as given; for a GGUF file its name without the suffix."""
    path = Path(model)
    part = PART.fullmatch(path.name)
    return part[1] if part else path.stem if path.suffix == ".gguf" else model


def require_packages() -> None:
    """Raise MissingPackage if a package that the server needs is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
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
        raise InvalidRequest("tls_key", f"{key} is encrypted, and nobody is asked for its password: decrypt it.")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{key} is not the key of {certificate}: name the two that belong together."
            raise InvalidRequest("tls_key", problem) from error
        problem = f"{certificate} and {key} are no certificate and key in PEM ({error.reason or error})."
        raise InvalidRequest("tls_cert", problem) from error
