"""Uploads: bodies on their way in. This file decides how large and slow they may be, and how much all of them may hold.

They are outside the gate: what has not been read yet takes no place in a queue. Long ones, once they are there, are
taken apart one by one, so that everything else has its share of the interpreter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from forerun.serve.problems import ApiError

MOST_AT_ONCE = 16  # bodies of the greatest length
PAUSE = 3.0  # behind a task, over the time that it took
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Upload:
    """One body so far, and the time at which it is refused, for `reason`."""

    deadline: asyncio.Timeout
    reason: ApiError
    pieces: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    def end(self, reason: ApiError) -> None:
        """Refuse it now."""
        self.reason = reason
        if not self.deadline.expired():
            self.deadline.reschedule(0)


@dataclass(slots=True, eq=False)
class Uploads:
    """The bodies that one server is being sent, the oldest first.

    One may have at most `most_bytes` and take `most_s`. Together they hold at most MOST_AT_ONCE times as much; if more
    comes, those that have been sent the longest are refused, so that a client which sends a body at once gets it in.
    """

    most_bytes: int
    most_s: float
    under_way: dict[Upload, None] = field(default_factory=dict)
    num_bytes: int = 0

    async def read(self, pieces: AsyncIterator[bytes]) -> bytes:
        """The whole body. Raises the ApiError for 408 or 413 where it is not let in, or what `end` was given."""
        late = ApiError(408, f"the body did not arrive within {self.most_s:g} seconds.", code="body_too_slow")
        deadline = asyncio.timeout(self.most_s)
        upload = Upload(deadline, late)
        try:
            async with deadline:
                self.under_way[upload] = None
                async for piece in pieces:
                    self.add(upload, piece)
        except TimeoutError:
            raise upload.reason from None
        finally:
            self.forget(upload)
        return b"".join(upload.pieces)

    def add(self, upload: Upload, piece: bytes) -> None:
        """Keep the next piece of a body, at the cost of older bodies if need be; of one that was refused, nothing."""
        if upload not in self.under_way:
            return
        upload.num_bytes += len(piece)
        self.num_bytes += len(piece)
        if upload.num_bytes > self.most_bytes:
            raise ApiError(413, f"the body has more than {self.most_bytes} bytes.", code="body_too_large")
        upload.pieces.append(piece)
        while self.num_bytes > self.most_bytes * MOST_AT_ONCE:
            oldest = next(each for each in self.under_way if each is not upload)
            self.forget(oldest)
            oldest.pieces.clear()
            message = "the body was being sent for longer than others for which there is no room: send it faster."
            oldest.end(ApiError(408, message, code="body_too_slow"))

    def forget(self, upload: Upload) -> None:
        """Count a body no longer; a second time has no effect."""
        self.num_bytes -= upload.num_bytes
        upload.num_bytes = 0
        self.under_way.pop(upload, None)

    def end(self, reason: ApiError) -> None:
        """Refuse all bodies that are not here yet."""
        for upload in self.under_way:
            upload.end(reason)


@dataclass(slots=True, eq=False)
class OneByOne:
    """Runs tasks in another thread, one at a time and in their order, each with a pause behind it.

    Python runs one thread at a time, and what reads JSON does not stop for others. So however many tasks there are,
    they have at most 1 / (1 + PAUSE) of the time. No task waits for the pause behind it.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, task: Callable[[], T]) -> T:
        """What a task gives. Cancelled before its turn it is not run; later, it keeps its turn to its end."""
        await self.turn.acquire()
        return await asyncio.shield(self.begun(task))

    def begun(self, task: Callable[[], T]) -> asyncio.Task[T]:
        """A task that has its turn, which ends with the pause."""
        loop, began_s = asyncio.get_running_loop(), time.perf_counter()

        def pause(_: object) -> None:
            loop.call_later(PAUSE * (time.perf_counter() - began_s), self.turn.release)

        running = loop.create_task(asyncio.to_thread(task))
        running.add_done_callback(pause)
        return running
