"""Connections: time limits for clients and a maximum number of connections, as an extension of uvicorn's protocol.

Slow clients are disconnected, and their requests are cancelled. Slow bodies get an error answer from the application
(`uploads.py`); this file handles what the application cannot see: slow request heads, bodies of refused requests, and
clients that do not read their answers.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.serve.envelope import CLOSE, HEAD_TOO_LARGE, encode_json, id_headers, new_id
from forerun.serve.problems import ApiError
from forerun.serve.settings import BODY_S

# For a request head, since the connection or the previous answer, and for a TLS handshake. Clients of httpx reuse a
# connection for 5 s after an answer: a request would fail if the connection were closed at that moment.
HEAD_S = 10.0
WRITE_S = 30.0  # a client must read at least LEAST_BYTES_S bytes per second, on average over this time
LEAST_BYTES_S = 1024
GRACE_S = 1.0  # after the application's limits, so that it can answer with an error first
MOST_CONNECTIONS = 4096
SPARE_FILES = 128  # open files that are not connections
READ_BYTES = 1 << 13  # per read: a body in chunks of one byte takes 4 µs a byte and blocks the event loop
BODY_BYTES = 1 << 16  # per read of a body without chunks: 0.1 ms, whatever its length
UNSENT_BYTES = 1 << 14  # in the kernel's buffer; with more, a slow line would seem to stand still between large steps


class Phase(Enum):
    """What a connection waits for: a request head, the rest of a body, or the answer."""

    HEAD = auto()
    BODY = auto()
    ANSWER = auto()


PHASES = {h11.IDLE: Phase.HEAD, h11.SEND_BODY: Phase.BODY}  # by h11's state of the client


class CountedTransport:
    """A transport that counts the bytes written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.num_written = 0

    def write(self, data: bytes) -> None:
        """Count the bytes and pass them on."""
        self.num_written += len(data)
        self.transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


@dataclass(slots=True, eq=False)
class Connections:
    """The connections of one server, at most `most`; a request may take `request_s` seconds, sending included."""

    most: int
    request_s: float | None
    by_phase: dict[Phase, OrderedDict[Connection, None]] = field(
        default_factory=lambda: {phase: OrderedDict() for phase in Phase}
    )

    def __iter__(self) -> Iterator[Connection]:
        return iter([each for connections in self.by_phase.values() for each in connections])

    @property
    def num_busy(self) -> int:
        """Connections whose answer is not completely sent."""
        return sum(each.is_busy for each in self)

    def place(self, connection: Connection, phase: Phase) -> None:
        """Append a connection to those of its phase.

        If there are more than `most`, the one that has waited longest for a head or a body is closed.
        """
        self.forget(connection)
        self.by_phase[phase][connection] = None
        if sum(map(len, self.by_phase.values())) > self.most:
            longest = (next(iter(self.by_phase[phase]), connection) for phase in (Phase.HEAD, Phase.BODY))
            min(longest, key=lambda each: each.since_s).abort()

    def forget(self, connection: Connection) -> None:
        """Remove a connection; idempotent."""
        for connections in self.by_phase.values():
            connections.pop(connection, None)

    def sweep(self) -> None:
        """Close the connections that exceed a time limit. To be called several times per second."""
        now_s = time.monotonic()
        for each in self:
            if each.is_late(now_s):
                each.abort()

    def close(self) -> None:
        """Close all connections at once."""
        for each in self:
            each.abort()


class Connection(H11Protocol):
    """One connection. `since_s` is when its current phase began, `asked_s` when its last request head arrived."""

    def __init__(self, connections: Connections, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.all = connections
        self.wait: tuple[Phase, object] | None = None
        self.since_s = self.asked_s = self.sent_s = time.monotonic()
        self.num_sent = 0
        self.rest_bytes = 0  # lower bound of the bytes still to come of a body without chunks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the first phase."""
        super().connection_made(cast(asyncio.Transport, CountedTransport(transport)))
        self.read_at_once(READ_BYTES)
        self.update_phase()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes and update the phase."""
        super().data_received(data)
        self.update_phase()
        self.rest_bytes -= len(data)
        self.read_at_once(min(BODY_BYTES, self.rest_bytes))

    def read_at_once(self, num_bytes: int) -> None:
        """Set the size of the next reads, at least READ_BYTES."""
        cast(Any, self.transport).transport.max_size = max(READ_BYTES, num_bytes)

    def on_response_complete(self) -> None:
        """Start the phase of the next request."""
        super().on_response_complete()
        self.update_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the count."""
        self.all.forget(self)
        super().connection_lost(exc)

    def update_phase(self) -> None:
        """Record a change of phase."""
        if self.transport.is_closing():
            return
        wait = PHASES.get(cast(Any, self.conn.their_state), Phase.ANSWER), self.cycle
        if wait != self.wait:
            self.since_s = time.monotonic()
            if self.wait is not None and self.wait[1] is not self.cycle:
                self.asked_s = self.since_s
            self.wait = wait
            self.all.place(self, wait[0])
            self.rest_bytes = unread_bytes(self.headers) if wait[0] is Phase.BODY else 0

    def abort(self) -> None:
        """Abort the connection and drop unsent data."""
        self.all.forget(self)
        self.transport.abort()

    @property
    def is_busy(self) -> bool:
        """Whether an answer is not sent completely."""
        return bool(self.cycle and not self.cycle.response_complete) or self.transport.get_write_buffer_size() > 0

    def is_late(self, now_s: float) -> bool:
        """Whether a time limit is exceeded."""
        phase = self.wait[0] if self.wait else Phase.HEAD
        if phase is Phase.HEAD and self.transport.get_write_buffer_size():
            self.since_s = now_s  # the time for the next head starts when the previous answer is sent
        limit_s = {Phase.HEAD: HEAD_S, Phase.BODY: BODY_S + GRACE_S}.get(phase)
        if limit_s is not None and not self.transport.is_closing() and now_s - self.since_s > limit_s:
            return True
        request_s = self.all.request_s
        if request_s is not None and self.is_busy and now_s - self.asked_s > request_s + GRACE_S:
            return True
        return self.does_not_read(now_s)

    def does_not_read(self, now_s: float) -> bool:
        """Whether the client has read too slowly for WRITE_S although there was unsent data."""
        waiting = self.transport.get_write_buffer_size()
        num_sent = cast(Any, self.transport).num_written - waiting
        reads = num_sent - self.num_sent >= LEAST_BYTES_S * WRITE_S
        if waiting and now_s - self.sent_s < WRITE_S:
            return False
        self.sent_s, self.num_sent = now_s, num_sent
        return bool(waiting) and not reads

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error, if none is being sent yet, and close."""
        if self.cycle is not None:  # the rest of the current request cannot be read
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = sys.exception()
            status = 431 if getattr(error, "error_status_hint", 0) == 431 else 400
            message = f"this is not a valid HTTP/1.1 request: {str(error or msg)[:200]}."
            problem = HEAD_TOO_LARGE if status == 431 else ApiError(status, message, code="invalid_http")
            body = encode_json(problem.body)
            length = (b"content-length", str(len(body)).encode())
            headers = [(b"content-type", b"application/json"), length, *id_headers(new_id()), CLOSE]
            events = (
                h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def unread_bytes(headers: list[tuple[bytes, bytes]]) -> int:
    """Lower bound of the body bytes that were not received with the head; 0 for a chunked body."""
    fields = dict(headers)
    return 0 if b"transfer-encoding" in fields else int(fields.get(b"content-length", 0)) - READ_BYTES


def most_connections(backlog: int) -> int:
    """The maximum number of connections, after raising the limit of open files as far as the system allows."""
    with suppress(ImportError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        if soft != resource.RLIM_INFINITY:
            return min(MOST_CONNECTIONS, max(1, soft - SPARE_FILES - backlog))
    return MOST_CONNECTIONS


def keep_little_unsent(sock: socket.socket) -> None:
    """Limit unsent data in the kernel's buffer for connections of a listening socket, if the system supports it."""
    with suppress(AttributeError, OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
