"""A server in the test's own event loop that answers as OpenAI's would, after delays that the test knows."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

WORDS = ("one", " two", " three", " four")
NO_DELAY: tuple[float, ...] = (0.0,) * len(WORDS)
LIMIT_S = 60.0  # which only ends a hang


@dataclass
class FakeServer:
    """Writes WORDS, each after a delay; `delays` and `words` get the body. Records bodies and when it wrote.

    How a delay goes by is up to `wait`, and what time it is to `clock`. It answers a body once as many were there at
    the same time as `company` says.
    """

    delays: Callable[[Mapping[str, Any]], tuple[float, ...]] = lambda body: NO_DELAY
    words: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda body: WORDS
    company: Callable[[Mapping[str, Any]], int] = lambda body: 1
    wait: Callable[[float], Awaitable[object]] = asyncio.sleep
    clock: Callable[[], float] = time.perf_counter
    owner: str = "somebody"
    models: object = None  # instead of the list with one model
    usage: bool = True
    status: int = 200
    ending: bytes = b"data: [DONE]\n\n"
    key: str = ""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    written_s: dict[int, list[float]] = field(default_factory=dict)  # by seed
    num_written: int = 0  # chunks
    most_at_once: int = 0
    now: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        """Within it the server answers at `url`."""
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self
            server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, with one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        if self.key and f"bearer {self.key}" not in head:
            self.whole(writer, 401, {"error": {"message": "no key"}})
        elif head.startswith("get /health"):
            self.whole(writer, 200, {})
        elif head.startswith("get /v1/models"):
            self.whole(writer, 200, {"data": self.models or [{"id": "fake", "owned_by": self.owner}]})
        elif self.status != 200:
            self.whole(writer, self.status, {"error": {"message": "not now"}})
        else:
            self.now += 1
            self.most_at_once = max(self.most_at_once, self.now)
            await self.answer(writer, body, chat="/chat/" in head)
            self.now -= 1
        writer.close()

    def whole(self, writer: asyncio.StreamWriter, status: int, body: object) -> None:
        """An answer that is no stream."""
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)

    def chunk(self, writer: asyncio.StreamWriter, choice: dict[str, Any]) -> None:
        """A part of a stream that says something of its only choice."""
        self.num_written += 1
        writer.write(event({"choices": [choice]}))

    async def answer(self, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool) -> None:
        """A stream."""
        self.bodies.append(body)
        ends_s = time.monotonic() + LIMIT_S
        while self.most_at_once < self.company(body) and time.monotonic() < ends_s:
            await asyncio.sleep(0.001)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        stamps = self.written_s.setdefault(body["seed"], [])
        words, delays = self.words(body), self.delays(body)
        for word, delay in zip(words, delays, strict=True):
            await self.wait(delay)
            stamps.append(self.clock())
            choice: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
            self.chunk(writer, choice)
            await writer.drain()
        self.chunk(writer, {"finish_reason": "stop"})
        if self.usage:
            writer.write(event({"choices": [], "usage": {"completion_tokens": 2 * len(words)}}))
        writer.write(self.ending)
        await writer.drain()


def event(body: object) -> bytes:
    """A server-sent event; its JSON is not ASCII, as that of some servers."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
