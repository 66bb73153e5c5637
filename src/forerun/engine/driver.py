"""EngineDriver: lets several threads share one engine.

A thread that waits for deltas steps the engine, unless another thread is already doing so. A round advances the
requests of all threads, so the others wait until their inboxes are filled. Submitting and cancelling are jobs in a
queue, which the stepping thread runs between rounds. They never block, so a stream can be closed at any time, even by
the garbage collector in the middle of a round of the same thread.

An interrupt (Ctrl-C) cannot leave the engine without a stepping thread. The stepping thread holds a seat, which is
freed by instructions between which Python delivers no interrupt. A job stays in the queue until it has completed, and
running it twice has the same effect as running it once. A waiting thread checks again after `PATIENCE_S`.

A forked process has a copy of the engine and none of the other threads, not even those that compute. So threads that
compute are ended before a fork, and afterwards a seat that another thread held is free.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakSet

from forerun.accept.delta import Delta
from forerun.engine.engine import Engine
from forerun.engine.sequence import OnDelta, Sequence, Status
from forerun.errors import EngineClosed, InvalidRequest, RequestFailed
from forerun.guard import attempt
from forerun.kernels.threads import end_idle_threads

Inbox = queue.SimpleQueue[Delta | None]  # None wakes the waiting thread without a delta
SEAT = "seat"
PATIENCE_S = 0.05
CLOSED = "this LLM was closed; create a new one."
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Driver:
    """The call that steps the engine at the moment; `thread` is the id of its thread."""

    thread: int


class DeltaReader:
    """Reads the deltas of these sequences without duplicates; `num_open` of the sequences are unfinished."""

    def __init__(self, sequences: Seq[Sequence]) -> None:
        self.num_open = len(sequences)
        self.last: dict[int, Delta] = {}

    def accepts(self, delta: Delta) -> bool:
        """Whether a delta is new (after an interrupt the last one may come twice). Raises the delta's error, if any."""
        if self.last.get(delta.seq_id) is delta:
            return False
        if delta.error is not None:
            raise delta.error
        self.last[delta.seq_id] = delta
        self.num_open -= delta.finish_reason is not None
        return True


class EngineDriver:
    """Access to one engine from any thread. Use the engine directly only while no other thread does."""

    def __init__(self, engine: Engine) -> None:
        self.open: Engine | None = engine
        self.jobs: deque[Callable[[], None]] = deque()
        self.seat: dict[str, Driver] = {}
        self.waiting: deque[Inbox] = deque()
        DRIVERS.add(self)
        end_idle_threads()  # of loading: a thread that steps the engine starts its own

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineClosed after `close`."""
        if self.open is None:
            raise EngineClosed(CLOSED)
        return self.open

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self.open is None

    def close(self) -> None:
        """Drop the engine after the current round. Streams that are still open raise EngineClosed."""
        self.jobs.append(self.drop_engine)
        inbox: Inbox = queue.SimpleQueue()
        while not self.closed and not self.drive(rounds=False):
            self.wait(inbox)

    def drop_engine(self) -> None:
        """The job of `close`: cancel all requests, so that drafters which learn from answers save them, and drop it."""
        engine = self.open
        if engine is not None:
            for sequence in list(engine.sequences.values()):
                engine.cancel(sequence.request_id)
        self.open = None

    def follow(self, sequences: Seq[Sequence], idle: Callable[[], None]) -> Iterator[Delta]:
        """Submit sequences and yield their deltas until they are finished. Closing the iterator cancels them.

        `idle` is called after each round without a delta of theirs.
        """
        inbox: Inbox = queue.SimpleQueue()
        cancel = self.cancel_job({sequence.request_id for sequence in sequences})
        reader = DeltaReader(sequences)
        try:
            self.submit(sequences, inbox.put)
            while reader.num_open:
                delta = self.next_delta(inbox)
                if delta is None:
                    if all(sequence.status is Status.FINISHED for sequence in sequences) and inbox.empty():
                        if self.closed:
                            raise EngineClosed(CLOSED)
                        return  # another part of the program cancelled the request
                    idle()
                elif reader.accepts(delta):
                    yield delta
        finally:
            self.jobs.append(cancel)
            self.drive(rounds=False)
            if threading.active_count() > 1:  # another thread may step the engine from now on
                end_idle_threads()

    def submit(self, sequences: Seq[Sequence], on_delta: OnDelta) -> None:
        """Queue the job that submits sequences; `on_delta` is called with their deltas, from any thread.

        If submitting raises, each sequence gets a final delta with the error.
        """

        def submit_all() -> None:
            if self.open is None:
                return
            for sequence in sequences:
                self.open.submit(sequence, on_delta)

        def submit_or_fail() -> None:
            error = attempt(submit_all)
            if error is not None:
                self.cancel_job({sequence.request_id for sequence in sequences})()
                for sequence in sequences:
                    failed = RequestFailed(sequence.id, f"it could not be queued: {type(error).__name__}: {error}")
                    failed.__cause__ = error
                    on_delta(sequence.failure(failed))

        self.jobs.append(submit_or_fail)

    def cancel_job(self, request_ids: Collection[int]) -> Callable[[], None]:
        """The job that cancels these requests."""

        def cancel() -> None:
            if self.open is not None:
                for request_id in request_ids:
                    self.open.cancel(request_id)

        return cancel

    def next_delta(self, inbox: Inbox) -> Delta | None:
        """The next delta of an inbox. If the inbox is empty, run a round or wait for one, and return perhaps None."""
        if not inbox.empty():
            return inbox.get()
        return None if self.drive() else self.wait(inbox)

    def drive(self, rounds: bool = True) -> bool:
        """Run the queued jobs and, with `rounds`, one round. False if a thread, perhaps this one, is doing so now."""
        me = Driver(threading.get_ident())
        try:
            if self.seat.setdefault(SEAT, me) is not me:
                return False
            self.run_jobs()
            if rounds:
                self.engine.step()
        finally:
            if SEAT in self.seat and self.seat[SEAT] is me:  # there is no call here, and so no interrupt
                del self.seat[SEAT]
        with suppress(IndexError):
            while self.waiting:
                self.waiting.popleft().put(None)
        if self.jobs:  # queued after `run_jobs` and before the seat was free
            self.drive(rounds=False)
        return True

    def run_jobs(self) -> None:
        """Run the queued jobs. Errors are logged and not raised, since another thread may have queued the job."""
        while self.jobs:
            error = attempt(self.jobs[0])
            if error is not None:
                log.error("A request could not be submitted or cancelled.", exc_info=error)
            self.jobs.popleft()

    def wait(self, inbox: Inbox) -> Delta | None:
        """Wait for the next delta while another thread steps; None when that thread stops, or after `PATIENCE_S`."""
        self.waiting.append(inbox)
        driver = self.seat.get(SEAT)
        if driver is None:
            return None
        if driver.thread == threading.get_ident():
            raise InvalidRequest("prompt", "code that a round calls cannot wait for an answer from the same engine.")
        with suppress(queue.Empty):
            return inbox.get(timeout=PATIENCE_S)
        return None


DRIVERS: WeakSet[EngineDriver] = WeakSet()


def free_seats() -> None:
    """After a fork: free the seats that other threads of the parent held."""
    for driver in DRIVERS:
        if SEAT in driver.seat and driver.seat[SEAT].thread != threading.get_ident():
            del driver.seat[SEAT]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=end_idle_threads, after_in_child=free_seats)
