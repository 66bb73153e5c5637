"""Uploads: receives request bodies, with limits on size, time, and the memory of all bodies together.

Bodies are received before the gate, so that an incomplete body holds no place in a queue. Long bodies are parsed one at
a time, with pauses, so that other threads get the GIL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from forerun.serve.problems import ApiError

MOST_AT_ONCE = 16  # memory for all bodies, in bodies of maximum size
PAUSE = 3.0  # after a task, as a multiple of its duration
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Upload:
    """The received part of one body, which is refused at its deadline, with `reason` if it is ended before."""

    deadline: asyncio.Timeout
    reason: ApiError | None = None
    pieces: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    def end(self, reason: ApiError) -> None:
        """Refuse the body now."""
        self.reason = reason
        if not self.deadline.expired():
            self.deadline.reschedule(0)


@dataclass(slots=True, eq=False)
class Uploads:
    """The bodies that one server is receiving, oldest first.

    Each may have at most `most_bytes` and take `most_s` seconds. Together they may have MOST_AT_ONCE times as many
    bytes; beyond that the oldest are refused, so that clients which send quickly succeed.
    """

    most_bytes: int
    most_s: float
    under_way: dict[Upload, None] = field(default_factory=dict)
    num_bytes: int = 0

    async def read(self, pieces: AsyncIterator[bytes], announced_bytes: int = 0) -> bytes:
        """Receive a complete body; one that is announced as too long is not received at all.

        Raises ApiError 408 or 413, or the reason passed to `end`.
        """
        self.check_length(announced_bytes)
        deadline = asyncio.timeout(self.most_s)
        upload = Upload(deadline)
        try:
            async with deadline:
                self.under_way[upload] = None
                async for piece in pieces:
                    self.add(upload, piece)
        except TimeoutError:
            late = f"the body did not arrive within {self.most_s:g} seconds."
            raise upload.reason or ApiError(408, late, code="body_too_slow") from None
        finally:
            self.forget(upload)
        return b"".join(upload.pieces)

    def add(self, upload: Upload, piece: bytes) -> None:
        """Store the next piece of a body unless it was refused; refuse older bodies if memory is short."""
        if upload not in self.under_way:
            return
        upload.num_bytes += len(piece)
        self.num_bytes += len(piece)
        self.check_length(upload.num_bytes)
        upload.pieces.append(piece)
        while self.num_bytes > self.most_bytes * MOST_AT_ONCE:
            oldest = next(each for each in self.under_way if each is not upload)
            self.forget(oldest)
            oldest.pieces.clear()
            message = "the memory for incomplete bodies is full, and this one is the oldest: send it faster."
            oldest.end(ApiError(408, message, code="body_too_slow"))

    def check_length(self, num_bytes: int) -> None:
        """Raise ApiError 413 for a body that has at least so many bytes, if that is too many."""
        if num_bytes > self.most_bytes:
            raise ApiError(413, f"the body has more than {self.most_bytes} bytes.", code="body_too_large")

    def forget(self, upload: Upload) -> None:
        """Remove a body from the count; idempotent."""
        self.num_bytes -= upload.num_bytes
        upload.num_bytes = 0
        self.under_way.pop(upload, None)

    def end(self, reason: ApiError) -> None:
        """Refuse all incomplete bodies."""
        for upload in self.under_way:
            upload.end(reason)


@dataclass(slots=True, eq=False)
class SerialRunner:
    """Runs tasks in another thread, one at a time and in order, each followed by a pause.

    JSON parsing holds the GIL. With the pauses, tasks use at most 1 / (1 + PAUSE) of the time, however many there are.
    A task's result is available before its pause.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, task: Callable[[], T]) -> T:
        """Run a task and return its result. Cancelled before its turn, it does not run; later, it runs to its end."""
        await self.turn.acquire()
        loop, began_s = asyncio.get_running_loop(), time.perf_counter()

        def pause(_: object) -> None:
            loop.call_later(PAUSE * (time.perf_counter() - began_s), self.turn.release)

        running = loop.create_task(asyncio.to_thread(task))
        running.add_done_callback(pause)
        return await asyncio.shield(running)
