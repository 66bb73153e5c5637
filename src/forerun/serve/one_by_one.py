"""One by one: how the reading of long bodies shares the interpreter with everything else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

PAUSE = 3.0  # behind a task, over the time that it took
T = TypeVar("T")


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
