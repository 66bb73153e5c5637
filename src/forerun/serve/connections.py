"""Connections: how long a client may take to ask and to read, and how many there may be; it extends uvicorn's protocol.

Whoever is too slow is cut off, and its request ends as if it had gone away. The application tells slow bodies so
(`uploads.py`); here is what it cannot see: heads, refused bodies, and answers that wait in a socket's buffer.
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

from forerun.serve.envelope import CLOSE, HEAD_TOO_LARGE, id_headers, new_id, written
from forerun.serve.problems import ApiError
from forerun.serve.settings import BODY_S

HEAD_S = 10.0  # that a client has for a head, from the connection or the answer before on, and for a TLS handshake
WRITE_S = 30.0  # in which a client has to take so much of what waits for it:
LEAST_BYTES_S = 1024
GRACE_S = 1.0  # beyond the limits of the application, for what it says of them
MOST_CONNECTIONS = 4096
SPARE_FILES = 128  # for what is no connection
READ_BYTES = 1 << 13  # at once: a body in chunks of one byte takes 4 µs a byte, in which nobody else is read
BODY_BYTES = 1 << 16  # at once, of a body without chunks: a piece takes 0.1 ms, however long it is
UNSENT_BYTES = 1 << 14  # in the system's buffer: with more there, progress on a slow line would be seen in large steps


class Phase(Enum):
    """What a connection waits for: a head, the rest of a body, or the answer."""

    HEAD = auto()
    BODY = auto()
    ANSWER = auto()


PHASES = {h11.IDLE: Phase.HEAD, h11.SEND_BODY: Phase.BODY}  # by the state of the client


class CountedTransport:
    """A transport that counts the bytes that are written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.num_written = 0

    def write(self, data: bytes) -> None:
        """Send the bytes, now or later."""
        self.num_written += len(data)
        self.transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


@dataclass(slots=True, eq=False)
class Connections:
    """The connections of one server, at most `most`; a request may take `request_s`, sending included."""

    most: int
    request_s: float | None
    by_phase: dict[Phase, OrderedDict[Connection, None]] = field(
        default_factory=lambda: {phase: OrderedDict() for phase in Phase}
    )

    def __iter__(self) -> Iterator[Connection]:
        return iter([each for connections in self.by_phase.values() for each in connections])

    @property
    def num_busy(self) -> int:
        """Connections with an answer under way."""
        return sum(each.is_busy for each in self)

    def place(self, connection: Connection, phase: Phase) -> None:
        """Put a connection behind all others of its phase.

        Where a new one is too much, the one is cut off that has waited longest for its client's head or body.
        """
        self.forget(connection)
        self.by_phase[phase][connection] = None
        if sum(map(len, self.by_phase.values())) > self.most:
            longest = (next(iter(self.by_phase[phase]), connection) for phase in (Phase.HEAD, Phase.BODY))
            min(longest, key=lambda each: each.since_s).cut()

    def forget(self, connection: Connection) -> None:
        """Count a connection no longer; a second time has no effect."""
        for connections in self.by_phase.values():
            connections.pop(connection, None)

    def sweep(self) -> None:
        """Cut off who takes too long. To be called several times a second."""
        now_s = time.monotonic()
        for each in self:
            if each.is_late(now_s):
                each.cut()

    def close(self) -> None:
        """Cut off everybody."""
        for each in self:
            each.cut()


class Connection(H11Protocol):
    """One connection. `since_s` is when it began to wait for what it waits for, `asked_s` when its last head came."""

    def __init__(self, connections: Connections, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.all = connections
        self.wait: tuple[Phase, object] | None = None
        self.since_s = self.asked_s = self.sent_s = time.monotonic()
        self.num_sent = 0
        self.rest_bytes = 0  # of a body without chunks, at least

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(cast(asyncio.Transport, CountedTransport(transport)))
        self.read_at_once(READ_BYTES)
        self.note()

    def data_received(self, data: bytes) -> None:
        """Read what came."""
        super().data_received(data)
        self.note()
        self.rest_bytes -= len(data)
        self.read_at_once(min(BODY_BYTES, self.rest_bytes))

    def read_at_once(self, num_bytes: int) -> None:
        """Read so many bytes at a time, and READ_BYTES at least."""
        cast(Any, self.transport).transport.max_size = max(READ_BYTES, num_bytes)

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        super().on_response_complete()
        self.note()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self.all.forget(self)
        super().connection_lost(exc)

    def note(self) -> None:
        """Note what the connection waits for, if that is something new."""
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

    def cut(self) -> None:
        """Break the connection off; what it has not sent is dropped."""
        self.all.forget(self)
        self.transport.abort()

    @property
    def is_busy(self) -> bool:
        """Whether an answer is under way."""
        return bool(self.cycle and not self.cycle.response_complete) or self.transport.get_write_buffer_size() > 0

    def is_late(self, now_s: float) -> bool:
        """Whether it takes longer than is allowed."""
        phase = self.wait[0] if self.wait else Phase.HEAD
        if phase is Phase.HEAD and self.transport.get_write_buffer_size():
            self.since_s = now_s  # the next request may wait until the last one's answer is there
        limit_s = {Phase.HEAD: HEAD_S, Phase.BODY: BODY_S + GRACE_S}.get(phase)
        if limit_s is not None and not self.transport.is_closing() and now_s - self.since_s > limit_s:
            return True
        request_s = self.all.request_s
        if request_s is not None and self.is_busy and now_s - self.asked_s > request_s + GRACE_S:
            return True
        return self.does_not_read(now_s)

    def does_not_read(self, now_s: float) -> bool:
        """Whether the client took too little in a time in which there always was something for it."""
        waiting = self.transport.get_write_buffer_size()
        num_sent = cast(Any, self.transport).num_written - waiting
        reads = num_sent - self.num_sent >= LEAST_BYTES_S * WRITE_S
        if waiting and now_s - self.sent_s < WRITE_S:
            return False
        self.sent_s, self.num_sent = now_s, num_sent
        return bool(waiting) and not reads

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, where an answer is still possible, and close."""
        if self.cycle is not None:  # its request has no end any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = sys.exception()
            status = 431 if getattr(error, "error_status_hint", 0) == 431 else 400
            message = f"this is no request in HTTP/1.1: {str(error or msg)[:200]}."
            problem = HEAD_TOO_LARGE if status == 431 else ApiError(status, message, code="invalid_http")
            body = written(problem.body)
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
    """How much of a body comes at least behind what came with its head; 0 where its chunks have to be taken apart."""
    fields = dict(headers)
    return 0 if b"transfer-encoding" in fields else int(fields.get(b"content-length", 0)) - READ_BYTES


def most_connections(backlog: int) -> int:
    """How many connections there may be, with as many open files as the system allows this process."""
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
    """Let the connections of a listening socket keep little in the system's buffer, where the system has that."""
    with suppress(AttributeError, OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
