"""Turns: one engine for any number of threads, of which one at a time steps it.

The file decides who steps: whoever waits for news of its own and finds nobody at it. A round moves on the requests of
all threads, so those who find somebody at it wait for their inboxes to be filled. What is asked of the engine meanwhile
is a job, done between rounds by whoever steps next, so that nobody has to wait in order to submit or to leave: a
stream may be closed by the garbage collector, in the middle of a round of the same thread.

No interrupt leaves the engine without a driver: the seat is given up by instructions between which none can come, a
job stays in its queue until it is done (done twice it is done once), and who waits looks again after a while.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass

from forerun.engine.delta import Delta
from forerun.engine.engine import Engine
from forerun.engine.roster import Hear
from forerun.engine.sequence import Sequence, Status
from forerun.errors import EngineClosed, InvalidRequest
from forerun.guard import attempt

Inbox = queue.SimpleQueue[Delta | None]  # None only wakes who waits for it
SEAT = "seat"
PATIENCE_S = 0.05
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Driver:
    """Who steps the engine: one call, in one thread."""

    thread: int


class Turns:
    """The one way to an engine that threads share; who uses the engine itself must be alone with it."""

    def __init__(self, engine: Engine) -> None:
        self.open: Engine | None = engine
        self.jobs: deque[Callable[[], None]] = deque()
        self.seat: dict[str, Driver] = {}
        self.waiting: deque[Inbox] = deque()

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineClosed after `close`."""
        if self.open is None:
            raise EngineClosed("this LLM was closed; build a new one.")
        return self.open

    @property
    def closed(self) -> bool:
        """Whether the engine is gone."""
        return self.open is None

    def close(self) -> None:
        """Let go of the engine, after the round under way. Who follows a request gets EngineClosed."""
        self.jobs.append(self.let_go)
        inbox: Inbox = queue.SimpleQueue()
        while not self.closed and not self.drive(rounds=False):
            self.wait(inbox)

    def let_go(self) -> None:
        """Cancel all requests, so that drafters that remember answers keep what was said; a job like others."""
        engine = self.open
        if engine is not None:
            for sequence in list(engine.sequences.values()):
                engine.cancel(sequence.request_id)
        self.open = None

    def follow(self, sequences: Seq[Sequence], idle: Callable[[], None]) -> Iterator[Delta]:
        """Submit sequences and give what they gain, until they are finished. Closing it cancels their requests.

        `idle` is called after each round that gave them nothing.
        """
        inbox: Inbox = queue.SimpleQueue()
        cancel = self.cancelling({sequence.request_id for sequence in sequences})
        heard: dict[int, Delta] = {}
        num_open = len(sequences)
        try:
            self.submit(sequences, inbox.put)
            while num_open:
                delta = self.news(inbox)
                if delta is None:
                    if all(sequence.status is Status.FINISHED for sequence in sequences) and inbox.empty():
                        return  # cancelled behind our back
                    idle()
                elif heard.get(delta.seq_id) is not delta:  # an interrupted round may say its last twice
                    if delta.error is not None:
                        raise delta.error
                    heard[delta.seq_id] = delta
                    num_open -= delta.finish_reason is not None
                    yield delta
        finally:
            self.jobs.append(cancel)
            self.drive(rounds=False)

    def submit(self, sequences: Seq[Sequence], hear: Hear) -> None:
        """Have sequences enter the engine; `hear` is given their deltas, in whichever thread drives."""

        def enter() -> None:
            if self.open is not None:
                for sequence in sequences:
                    self.open.submit(sequence, hear)

        self.jobs.append(enter)

    def cancelling(self, request_ids: Seq[int] | set[int]) -> Callable[[], None]:
        """The job of taking requests out of the engine."""

        def cancel() -> None:
            if self.open is not None:
                for request_id in request_ids:
                    self.open.cancel(request_id)

        return cancel

    def news(self, inbox: Inbox) -> Delta | None:
        """The next delta of an inbox. Where it is empty, a round is made or waited for, and None may come of it."""
        if not inbox.empty():
            return inbox.get()
        return None if self.drive() else self.wait(inbox)

    def drive(self, rounds: bool = True) -> bool:
        """Do the jobs and, if wanted, one round; False where a thread is at it, be it this one further down."""
        me = Driver(threading.get_ident())
        try:
            if self.seat.setdefault(SEAT, me) is not me:
                return False
            self.work()
            if rounds:
                self.engine.step()
        finally:
            if SEAT in self.seat and self.seat[SEAT] is me:  # no call: no interrupt and no other thread comes between
                del self.seat[SEAT]
        with suppress(IndexError):
            while self.waiting:
                self.waiting.popleft().put(None)
        if self.jobs:  # they came when the work was done and the seat not free
            self.drive(rounds=False)
        return True

    def work(self) -> None:
        """Do the jobs. One that raises says so in the log, and is nobody else's trouble."""
        while self.jobs:
            error = attempt(self.jobs[0])
            if error is not None:
                log.error("A request could not be submitted or cancelled.", exc_info=error)
            self.jobs.popleft()

    def wait(self, inbox: Inbox) -> Delta | None:
        """The next delta of an inbox while another thread drives; None once it does not, or after a while."""
        self.waiting.append(inbox)
        driver = self.seat.get(SEAT)
        if driver is None:
            return None
        if driver.thread == threading.get_ident():
            raise InvalidRequest("prompt", "code that a round calls cannot wait for an answer from the same engine.")
        with suppress(queue.Empty):
            return inbox.get(timeout=PATIENCE_S)
        return None
