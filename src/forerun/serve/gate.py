"""Gate: who is let in, who waits, and whose turn it is.

Requests wait here, and not in the engine, so that tenants can take turns: the next place goes to the tenant that holds
the fewest, and among those to the one that has waited longest for a turn. The engine is given a few more sequences than
its batch holds, so that a place that becomes free is taken in the next round. A tenant that has nothing there is given
one request at once, however many samples another tenant's has, since tenants take turns in the engine too. All of it
runs in one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from forerun.serve.problems import FAULT_OF_SERVER, ApiError

MOST_RETRY_S = 60
SMOOTHING = 0.9  # of the mean time between departures


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One HTTP request between entering and leaving; `num_places` sequences of it are in the engine.

    `queue_s` and `first_token_s` are the seconds from its arrival to its place in the batch and to its first token, and
    `last_s` says when each of its samples last grew.
    """

    tenant: str
    entered_s: float
    traceparent: str = ""  # the header of that name: whose trace it belongs to
    request_id: str = ""
    session_id: str = ""  # the x-session-id header: what belongs together, for those who choose among engines
    turn: asyncio.Future[None] | None = None
    wanted: int = 0
    num_places: int = 0
    placed: bool = False
    finished: bool = False  # by the engine; the answer may still be on its way
    gone: bool = False
    queue_s: float | None = None
    first_token_s: float | None = None
    last_s: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Gate:
    """Lets in at most `num_requests` + `max_queue` requests of each tenant, and `num_places` sequences to the engine.

    Beyond these places a tenant that has nothing in the engine is given one request there.
    A request with more samples than places are left is let through when any place is free: it could never be otherwise.
    Every sample holds the prompt's tokens, so the samples that wait are bounded too: a request that has to wait behind
    others of its tenant is refused where they would be more than `max_queue`.
    """

    num_requests: int
    num_places: int
    max_queue: int
    visits: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    queues: dict[str, deque[OpenRequest]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    num_turns: int = 0
    between_s: float = 1.0  # departures, on average
    left_s: float | None = None
    num_sending: int = 0  # requests that the engine has finished
    draining: bool = False
    empty: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self, tenant: str) -> None:
        """Raise the ApiError for 503 while draining, for 429 where the tenant's queue is full."""
        if self.draining:
            raise self.shutting_down()
        if self.visits[tenant] >= self.num_requests + self.max_queue:
            raise self.full(f"{self.visits[tenant]} requests are being answered or waiting")

    def enter(self, tenant: str, arrived_s: float | None = None) -> OpenRequest:
        """Let a request in that came at `arrived_s`, or now. Raises what `check` does."""
        self.check(tenant)
        self.visits[tenant] += 1
        self.empty.clear()
        return OpenRequest(tenant, time.perf_counter() if arrived_s is None else arrived_s)

    async def place(self, visit: OpenRequest, num_sequences: int) -> None:
        """Wait until so many sequences may be given to the engine. Raises the ApiError for 429 where too many wait."""
        queue = self.queues.setdefault(visit.tenant, deque())
        waiting = sum(each.wanted for each in queue)
        if queue and waiting + num_sequences > self.max_queue:
            raise self.full(f"{waiting} samples are waiting")
        visit.wanted, visit.turn = num_sequences, asyncio.get_running_loop().create_future()
        queue.append(visit)
        self.advance()
        await visit.turn

    def shutting_down(self) -> ApiError:
        """The refusal of a request that comes while draining."""
        message = "the server is shutting down and takes no new requests."
        return ApiError(503, message, code="shutting_down", kind=FAULT_OF_SERVER, retry_s=1)

    def full(self, why: str) -> ApiError:
        """The refusal of a request that would have to wait."""
        message = f"{why}, and no more may wait: try again."
        return ApiError(429, message, code="queue_full", kind="rate_limit_error", retry_s=self.retry_s)

    def free(self, visit: OpenRequest) -> None:
        """Take back the place of a sequence that is finished; behind the last one, that of the visit in its queue."""
        if visit.gone:
            return
        visit.num_places -= 1
        self.held[visit.tenant] -= 1
        if not visit.num_places:
            self.depart(visit)
            visit.finished = True
            self.num_sending += 1
        self.advance()

    def leave(self, visit: OpenRequest) -> None:
        """End a visit, wherever it is; a second time has no effect."""
        if visit.gone:
            return
        visit.gone = True
        if visit.finished:
            self.num_sending -= 1
        else:
            self.depart(visit)
        if visit.turn is not None and not visit.placed:
            self.queues[visit.tenant].remove(visit)
        self.advance()
        if not self.num_in:
            self.empty.set()

    def depart(self, visit: OpenRequest) -> None:
        """Give back all that a visit holds, here and in the engine."""
        self.visits[visit.tenant] -= 1
        self.held[visit.tenant] -= visit.num_places
        if visit.placed:
            now = time.perf_counter()
            if self.left_s is not None:
                self.between_s = SMOOTHING * self.between_s + (1 - SMOOTHING) * (now - self.left_s)
            self.left_s = now

    def advance(self) -> None:
        """Give free places to whose turn it is."""
        while True:
            free = self.held.total() < self.num_places
            waiting = [tenant for tenant, queue in self.queues.items() if queue and (free or not self.held[tenant])]
            if not waiting:
                return
            tenant = min(waiting, key=lambda name: (self.held[name], self.turns.get(name, 0)))
            visit = self.queues[tenant].popleft()
            visit.num_places, visit.placed = visit.wanted, True
            self.held[tenant] += visit.wanted
            self.num_turns += 1
            self.turns[tenant] = self.num_turns
            assert visit.turn is not None, "only visits with a turn to come wait"
            if not visit.turn.done():  # a cancelled one gives its places back when it leaves
                visit.turn.set_result(None)

    def drain(self) -> None:
        """Let nobody in from here on; `empty` is set once all who are in have left."""
        self.draining = True
        if not self.num_in:
            self.empty.set()

    @property
    def num_in(self) -> int:
        """Requests that were let in and have not left."""
        return self.visits.total() + self.num_sending

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return sum(len(queue) for queue in self.queues.values())

    @property
    def retry_s(self) -> int:
        """Seconds after which some place in the queue should be free, by the departures so far."""
        return max(1, min(MOST_RETRY_S, math.ceil(self.between_s * self.num_waiting)))
