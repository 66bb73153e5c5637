"""The server: an application on a socket, until a signal tells it to end; the file that knows uvicorn.

The first SIGTERM or Ctrl-C drains: requests that are in are answered, new ones get 503, and then the server ends. A
second one ends it at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType

import uvicorn

from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.serve.app import application
from forerun.serve.keys import warn_of_readers
from forerun.serve.service import Service
from forerun.serve.settings import ServeSettings
from forerun.serve.tls import require_certificate

LOOPBACK = ("127.0.0.1", "::1", "localhost")
GRACE_S = 1  # for connections, once all requests are answered or ended
log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """A server that drains before it ends. `signalled` is the first signal that told it to, if any."""

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[], None]) -> None:
        super().__init__(config)
        self.service = service
        self.tell_started = started
        self.signalled: int | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.tell_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; at the second, end at once."""
        if self.signalled is not None or self.loop is None:
            self.should_exit = self.force_exit = True
            return
        self.signalled = sig
        self.loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Take no new requests, and end once those that are in have left. To be called in the server's loop."""
        gate = self.service.gate
        gate.drain()
        if self.draining is None:
            most_s = self.service.settings.drain_s
            log.info("Shutting down: no new requests; %d are answered first, within %g s.", gate.num_in, most_s)
            self.draining = asyncio.ensure_future(self.end_when_empty())

    async def end_when_empty(self) -> None:
        """End when nobody is in any more, or the time for it is over."""
        empty = self.service.gate.empty
        try:
            await asyncio.wait_for(empty.wait(), self.service.settings.drain_s)
        except TimeoutError:
            num_in, most_s = self.service.gate.num_in, self.service.settings.drain_s
            log.warning("%d requests that were not finished after %g s are ended with an error.", num_in, most_s)
            await asyncio.to_thread(self.service.close)
            with suppress(TimeoutError):
                await asyncio.wait_for(empty.wait(), GRACE_S)  # they are told so
        else:
            log.info("Every request is answered; the server ends.")
        self.should_exit = True


def bound_socket(settings: ServeSettings) -> socket.socket:
    """The socket to listen on, not listening yet. Raises InvalidRequest where the address cannot be had."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, kind, protocol))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            stack.pop_all()  # it stays open
            return sock
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        is_port = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        field, fix = (
            ("port", "name another, or 0 for a free one") if is_port else ("host", "name one of this machine's")
        )
        where = f"{settings.host}:{settings.port}"
        raise InvalidRequest(field, f"{where} cannot be listened on ({reason}): {fix}.") from error


def server_of(llm: LLM, settings: ServeSettings, started: Callable[[], None] = lambda: None) -> DrainingServer:
    """The server of a loaded model. Raises InvalidRequest for keys or certificates that cannot be used."""
    if settings.tls_key is not None and settings.tls_certificate is not None:
        require_certificate(settings.tls_key, settings.tls_certificate)
    service = Service(llm, settings)
    config = uvicorn.Config(
        application(service),
        log_config=None,
        lifespan="on",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        ssl_keyfile=settings.tls_key,
        ssl_certfile=settings.tls_certificate,
    )
    return DrainingServer(config, service, started)


def serve(llm: LLM, settings: ServeSettings, sock: socket.socket, started: Callable[[], None]) -> int:
    """Serve until a signal ends it; the exit status, 130 for Ctrl-C. `started` is called once it listens."""
    if settings.host not in LOOPBACK and settings.api_keys is None:
        log.warning("Everybody who reaches %s is answered, since there is no --api-keys.", settings.host)
    if settings.api_keys is not None:
        warn_of_readers(settings.api_keys)
    server = server_of(llm, settings, started)
    try:
        asyncio.run(server.serve(sockets=[sock]))
    finally:
        server.service.close()
    return 130 if server.signalled == signal.SIGINT else 0
