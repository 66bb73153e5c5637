"""A clock for a client and its stand-ins, so that what is measured does not depend on how busy the machine is."""

import asyncio
import threading

import pytest

from forerun.remote import measure, time_limit
from forerun.traffic import client, run
from forerun.traffic.client import ChunkTimes
from kit.servers import until


class RoundClock:
    """A clock that only the rounds of stand-ins put forward, each when the client has all that was written before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s, self.num_written, self.num_arrived, self.lock = 0.0, 0, 0, threading.Lock()
        arrived = ChunkTimes.record_time

        def record_time(times: ChunkTimes, now_s: float) -> None:
            arrived(times, now_s)
            self.num_arrived += 1

        patch.setattr(ChunkTimes, "record_time", record_time)
        for module in (client, run, measure, time_limit):
            patch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        """The time, which `monotonic` is, too."""
        return self.now_s

    monotonic = perf_counter

    def of_timeouts(self, patch: pytest.MonkeyPatch) -> None:
        """Let timeouts in event loops go by this clock; nothing may sleep there, since time stands still meanwhile."""
        patch.setattr(asyncio.BaseEventLoop, "time", lambda _: self.now_s)

    def wrote(self) -> None:
        """Count a chunk that a stand-in has written."""
        with self.lock:
            self.num_written += 1

    def put_forward(self, seconds: float) -> None:
        """Let the time of a round pass."""
        until(lambda: self.num_arrived >= self.num_written)
        with self.lock:
            self.now_s += seconds
