"""Gate: admission and fair queueing of requests.

Requests wait here, not in the engine, so that tenants can take turns: a free place goes to the waiting tenant that
holds the fewest places, and among equals to the one whose last turn is longest ago. The engine gets a few more
sequences than its batch holds, so that a free slot is filled in the next round. One request of a tenant that has none
in the engine is admitted at once, even without a free place, since tenants also take turns in the engine. The gate runs
in one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from forerun.serve.problems import ApiError

MOST_RETRY_S = 60
SMOOTHING = 0.9  # of the moving average of the time between departures


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One HTTP request from `enter` to `leave`.

    It needs `num_sequences` places in the engine and holds `num_places`. `queue_s` and `first_token_s`: seconds from
    its arrival to its place in the batch and to its first token. `last_s`: when each sequence last grew, by id.
    """

    tenant: str
    entered_s: float
    traceparent: str = ""  # the request header
    request_id: str = ""
    session_id: str = ""  # the x-session-id header; requests of one session go to the same replica
    turn: asyncio.Future[None] | None = None
    num_sequences: int = 0
    num_places: int = 0
    placed: bool = False
    finished: bool = False  # in the engine; the answer may not be sent yet
    closed: bool = False
    queue_s: float | None = None
    first_token_s: float | None = None
    last_s: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Gate:
    """Admits at most `num_requests` + `max_queue` requests of each tenant, and `num_places` sequences to the engine.

    One request of a tenant that has none in the engine is admitted beyond these places. A request with more samples
    than free places is admitted when any place is free, since it might never fit otherwise. Every waiting sample holds
    the prompt's tokens, so their number is bounded too: a request is refused if it would have to wait behind others of
    its tenant and all of them together had more than `max_queue` samples.
    """

    num_requests: int
    num_places: int
    max_queue: int
    num_open: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    queues: dict[str, deque[OpenRequest]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)  # the number of each tenant's last turn
    num_turns: int = 0
    between_s: float = 1.0  # moving average of the time between departures
    departed_s: float | None = None  # time of the last departure
    num_sending: int = 0  # requests that the engine has finished, but whose answers are not sent
    draining: bool = False

    def check(self, tenant: str) -> None:
        """Raise ApiError 503 while draining, 429 if the tenant's queue is full."""
        if self.draining:
            raise self.shutting_down()
        if self.num_open[tenant] >= self.num_requests + self.max_queue:
            raise self.full(f"{self.num_open[tenant]} requests are being answered or waiting")

    def enter(self, tenant: str, arrived_s: float | None = None) -> OpenRequest:
        """Admit a request that arrived at `arrived_s` (by default now). Raises what `check` does."""
        self.check(tenant)
        self.num_open[tenant] += 1
        return OpenRequest(tenant, time.perf_counter() if arrived_s is None else arrived_s)

    async def place(self, entry: OpenRequest, num_sequences: int) -> None:
        """Wait until `num_sequences` may enter the engine. Raises ApiError 429 if too many samples wait."""
        queue = self.queues.setdefault(entry.tenant, deque())
        waiting = sum(each.num_sequences for each in queue)
        if queue and waiting + num_sequences > self.max_queue:
            raise self.full(f"{waiting} samples are waiting")
        entry.num_sequences, entry.turn = num_sequences, asyncio.get_running_loop().create_future()
        queue.append(entry)
        self.advance()
        await entry.turn

    def shutting_down(self) -> ApiError:
        """The ApiError 503 for requests while draining."""
        message = "the server is shutting down and does not accept new requests."
        return ApiError(503, message, code="shutting_down", retry_s=1)

    def full(self, why: str) -> ApiError:
        """The ApiError 429 for a full queue."""
        message = f"the queue is full ({why}): try again later."
        return ApiError(429, message, code="queue_full", kind="rate_limit_error", retry_s=self.retry_s)

    def free(self, entry: OpenRequest) -> None:
        """Free the place of a finished sequence; after the request's last one, the request no longer counts as open."""
        if entry.closed:
            return
        entry.num_places -= 1
        self.held[entry.tenant] -= 1
        if not entry.num_places:
            self.depart(entry)
            entry.finished = True
            self.num_sending += 1
        self.advance()

    def leave(self, entry: OpenRequest) -> None:
        """Close a request in any state; idempotent."""
        if entry.closed:
            return
        entry.closed = True
        if entry.finished:
            self.num_sending -= 1
        else:
            self.depart(entry)
        if entry.turn is not None and not entry.placed:
            self.queues[entry.tenant].remove(entry)
        self.advance()

    def depart(self, entry: OpenRequest) -> None:
        """Free all places that a request holds."""
        self.num_open[entry.tenant] -= 1
        self.held[entry.tenant] -= entry.num_places
        if entry.placed:
            now = time.perf_counter()
            if self.departed_s is not None:
                self.between_s = SMOOTHING * self.between_s + (1 - SMOOTHING) * (now - self.departed_s)
            self.departed_s = now

    def advance(self) -> None:
        """Give free places to the waiting requests, whose tenants take turns."""
        while True:
            free = self.held.total() < self.num_places
            waiting = [tenant for tenant, queue in self.queues.items() if queue and (free or not self.held[tenant])]
            if not waiting:
                return
            tenant = min(waiting, key=lambda name: (self.held[name], self.turns.get(name, 0)))
            entry = self.queues[tenant].popleft()
            entry.num_places, entry.placed = entry.num_sequences, True
            self.held[tenant] += entry.num_sequences
            self.num_turns += 1
            self.turns[tenant] = self.num_turns
            assert entry.turn is not None, "every waiting request has a future"
            if not entry.turn.done():  # a cancelled request frees its places when it leaves
                entry.turn.set_result(None)

    def drain(self) -> None:
        """Admit no more requests; `num_in` is 0 once all open ones have left."""
        self.draining = True

    @property
    def num_in(self) -> int:
        """Requests that have entered and not left."""
        return self.num_open.total() + self.num_sending

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return sum(len(queue) for queue in self.queues.values())

    @property
    def retry_s(self) -> int:
        """Estimated seconds until a place in the queue is free, from the mean time between departures."""
        return max(1, min(MOST_RETRY_S, math.ceil(self.between_s * self.num_waiting)))
