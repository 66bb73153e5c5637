"""The server: runs the application on a socket until a signal. Only this file and `connections.py` import uvicorn.

After the first SIGTERM or Ctrl-C the server drains: it answers the open requests, refuses new ones with 503, and then
exits. At a second signal it exits at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import uvicorn

from forerun.errors import InvalidRequest
from forerun.serve.access import is_loopback, warn_if_readable
from forerun.serve.app import application
from forerun.serve.connections import GRACE_S, HEAD_S, Connection, Connections, keep_little_unsent, most_connections
from forerun.serve.envelope import MOST_HEAD_BYTES
from forerun.serve.service import Service
from forerun.serve.settings import ServeSettings

BACKLOG = 512  # of connections that are not accepted yet
POLL_S = 0.02  # polling interval while answers are being sent
log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains before it exits, and disconnects slow clients. `started` is called once it listens.

    `signalled` is the first signal received, if any.
    """

    def __init__(self, service: Service, started: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            application(service),
            http="h11",
            backlog=BACKLOG,
            access_log=False,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
            log_config=None,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=math.ceil(HEAD_S),
            timeout_graceful_shutdown=1,
            ssl_keyfile=service.settings.tls_key,
            ssl_certfile=service.settings.tls_cert,
        )
        super().__init__(config)
        self.service = service
        self.on_started = started
        self.connections = Connections(most_connections(BACKLOG), service.settings.request_s)
        self.signalled: int | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and call `started`."""
        self.loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self.config.ssl is not None:
            tls = {"ssl": self.config.ssl, "ssl_handshake_timeout": HEAD_S, "ssl_shutdown_timeout": GRACE_S}
        self.servers = []
        for sock in sockets or ():
            keep_little_unsent(sock)
            server = await self.loop.create_server(self.connection, sock=sock, backlog=self.config.backlog, **tls)
            self.servers.append(server)
        self.started = True
        self.on_started()

    def connection(self) -> Connection:
        """The protocol of a new connection."""
        return Connection(self.connections, self.config, self.server_state, self.lifespan.state)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second: enforce time limits."""
        self.connections.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections and stop the service."""
        if self.force_exit:
            log.warning("Second signal: %d unfinished answers are cut off.", self.connections.num_busy)
        self.connections.close()
        await super().shutdown(sockets)
        await asyncio.to_thread(self.service.close)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; exit at once at the second."""
        if self.signalled is not None or self.loop is None:
            self.should_exit = self.force_exit = True
            return
        self.signalled = sig
        self.loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Refuse new requests, and exit once the open ones are answered. To be called in the event loop."""
        gate = self.service.gate
        gate.drain()
        self.service.uploads.end(gate.shutting_down())
        if self.draining is None:
            most_s = self.service.settings.drain_s
            log.info("Shutting down: requests still open: %d; they have %g s to end.", gate.num_in, most_s)
            self.draining = asyncio.ensure_future(self.exit_when_drained())

    async def exit_when_drained(self) -> None:
        """Exit when every answer has been sent, or after `drain_s`."""
        most_s = self.service.settings.drain_s
        sent = await self.wait_until_sent(most_s)
        if self.force_exit:
            return
        if sent:
            log.info("All requests are answered; the server exits.")
        else:
            log.warning("%d unfinished answers are cut off after %g s.", self.connections.num_busy, most_s)
            await asyncio.to_thread(self.service.close)
            await self.wait_until_sent(GRACE_S)  # the streams end with an error event
        self.should_exit = True

    async def wait_until_sent(self, most_s: float) -> bool:
        """Wait up to `most_s` seconds until every request is answered; False if that takes longer."""
        end_s = time.monotonic() + most_s
        while self.service.gate.num_in or self.connections.num_busy:
            if time.monotonic() >= end_s:
                return False
            await asyncio.sleep(min(POLL_S, most_s))
        return True


def bound_socket(settings: ServeSettings) -> socket.socket:
    """Bind the socket, without listening. Raises InvalidRequest if the address is not available."""
    try:
        addresses = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        with ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, kind, protocol))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            stack.pop_all()  # keeps the socket open
            return sock
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        is_port = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        field = "port" if is_port else "host"
        fix = "name another port, or 0 for any free one" if is_port else "name an address of this machine"
        bound = f"{settings.host}:{settings.port}"
        raise InvalidRequest(field, f"the server cannot listen on {bound} ({reason}): {fix}.") from error


def serve(service: Service, sock: socket.socket, started: Callable[[], None]) -> int:
    """Serve until a signal; returns the exit status (130 after Ctrl-C). `started` is called once it listens."""
    settings = service.settings
    if not is_loopback(settings.host) and settings.api_keys is None:
        log.warning("Anyone who can reach %s can use this server: --api-keys restricts access.", settings.host)
    if settings.api_keys is not None:
        warn_if_readable(settings.api_keys)
    server = DrainingServer(service, started)
    gc.collect()
    gc.freeze()  # a full collection over the loaded model takes 0.3 s and blocks all requests
    try:
        asyncio.run(server.serve(sockets=[sock]))
    finally:
        service.close()
    return 130 if server.signalled == signal.SIGINT else 0
