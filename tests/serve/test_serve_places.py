"""Places: whatever clients do and whenever they disconnect, the gate's counts are right, and others are served."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from forerun.request import Request
from forerun.serve.app import CLIENT_GONE, application
from forerun.serve.gate import Gate, OpenRequest
from forerun.serve.problems import ApiError
from forerun.serve.service import Service
from forerun.serve.settings import ServeSettings
from kit.engines import PATIENCE_S
from kit.servers import drafting

TENANTS = ("busy", "busy", "shy")
OPERATIONS = st.tuples(
    st.sampled_from(["enter"] * 3 + ["place"] * 4 + ["finish"] * 3 + ["leave", "late", "cancel"]), st.integers(0, 99)
)


class Crowd:
    """Requests to a gate, with the expected counts of each by its own history."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.inside: list[OpenRequest] = []
        self.asked: dict[OpenRequest, int] = {}  # places, in the order of the asking
        self.left: dict[OpenRequest, int] = {}  # sequences that the engine has, once there is a place
        self.tasks: dict[OpenRequest, asyncio.Task[None]] = {}

    async def do(self, what: str, number: int) -> None:
        """One operation, of the entry with this number where there is one."""
        if what == "enter":
            tenant = TENANTS[number % len(TENANTS)]
            room = self.gate.num_requests + self.gate.max_queue
            if sum(self.counted(entry) for entry in self.inside if entry.tenant == tenant) < room:
                self.inside.append(self.gate.enter(tenant))
            else:
                with pytest.raises(ApiError, match="the queue is full"):
                    self.gate.enter(tenant)
        elif self.inside:
            entry = self.inside[number % len(self.inside)]
            if what == "place" and entry not in self.tasks:
                self.tasks[entry] = asyncio.create_task(self.stay(entry, 1 + number % 4))
            elif what == "finish" and self.left.get(entry):
                self.left[entry] -= 1
                self.gate.free(entry)
            elif what == "leave":
                self.leave(entry)
            elif what in ("late", "cancel") and entry.turn is not None and not entry.turn.done():
                if what == "cancel":
                    self.tasks[entry].cancel()
                else:
                    entry.turn.set_exception(ApiError(504, "late", code="took_too_long"))
        for _ in range(4):
            await asyncio.sleep(0)
        self.check()

    async def stay(self, entry: OpenRequest, num_sequences: int) -> None:
        waiting = [number for each, number in self.asked.items() if each.tenant == entry.tenant]
        full = bool(waiting) and sum(waiting) + num_sequences > self.gate.max_queue
        self.asked[entry] = num_sequences
        try:
            await self.gate.place(entry, num_sequences)
            assert not full, "too many samples wait"
            assert entry is next(each for each in self.asked if each.tenant == entry.tenant), "others came first"
            assert self.asked.pop(entry) == entry.num_places
            others = {each.tenant for each in self.asked} - {entry.tenant}
            fewest = min((self.held(tenant) for tenant in others), default=0)
            assert not others or self.held(entry.tenant) <= fewest, "tenants take turns"
            self.left[entry] = num_sequences
        except (ApiError, asyncio.CancelledError) as error:
            self.leave(entry)
            if not full and getattr(error, "code", None) == "queue_full":
                raise AssertionError("there was room in the queue") from error

    def leave(self, entry: OpenRequest) -> None:
        if entry in self.inside:
            self.inside.remove(entry)
        self.asked.pop(entry, None)
        self.left.pop(entry, None)
        self.gate.leave(entry)
        if entry in self.tasks:
            self.tasks[entry].cancel()

    def held(self, tenant: str) -> int:
        """The sequences of a tenant that the engine has."""
        return sum(number for entry, number in self.left.items() if entry.tenant == tenant)

    def counted(self, entry: OpenRequest) -> bool:
        """Whether the engine has still to do with it."""
        return self.left.get(entry) != 0

    def check(self) -> None:
        """Every count is that of the histories; no request waits while a place is free or overtakes an earlier one."""
        held = Counter({tenant: self.held(tenant) for tenant in TENANTS})
        assert +self.gate.held == +held
        assert +self.gate.num_open == Counter(entry.tenant for entry in self.inside if self.counted(entry))
        assert (self.gate.num_in, self.gate.num_waiting) == (len(self.inside), len(self.asked))
        for tenant in {entry.tenant for entry in self.asked}:
            assert held.total() >= self.gate.num_places, "a place is free, and somebody waits"
            assert held[tenant], "a tenant that has nothing in the engine is given one request"
            waiting = [entry for entry in self.asked if entry.tenant == tenant]
            assert list(self.gate.queues[tenant]) == waiting


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.sampled_from([0, 2, 12, 12]), st.lists(OPERATIONS, min_size=20, max_size=60))
def test_the_gate_counts_who_is_there(num_places: int, max_queue: int, operations: list[tuple[str, int]]) -> None:
    async def work() -> None:
        gate = Gate(num_places, num_places, max_queue)
        crowd = Crowd(gate)
        for what, number in operations:
            await crowd.do(what, number)
        while crowd.inside:  # the engine goes on: whoever has a place ends, and whoever waits gets one
            for entry in list(crowd.inside):
                for _ in range(crowd.left.get(entry, 0)):
                    await crowd.do("finish", crowd.inside.index(entry))
                if entry not in crowd.asked:
                    crowd.leave(entry)
            crowd.check()
        ends = await asyncio.gather(*crowd.tasks.values(), return_exceptions=True)
        assert not [end for end in ends if isinstance(end, AssertionError)]
        assert not gate.num_in + gate.num_waiting + gate.held.total() + gate.num_open.total() + gate.num_sending

    asyncio.run(work())


def test_a_free_place_goes_to_the_tenant_with_the_fewest_whoever_had_the_last_turn() -> None:
    async def work() -> None:
        gate = Gate(num_requests=8, num_places=4, max_queue=8)
        entries = [gate.enter(tenant) for tenant in "aaabab"]
        tasks = [asyncio.create_task(gate.place(entry, 1)) for entry in entries]
        await asyncio.sleep(0)
        gate.leave(entries[0])  # now "a" holds two places, and "b", whose turn was the last, one
        await asyncio.sleep(0)
        assert [entry.placed for entry in entries] == [True, True, True, True, False, True]
        gate.leave(entries[4])
        await asyncio.gather(*tasks[:4], tasks[5])
        tasks[4].cancel()

    asyncio.run(work())


def test_as_many_samples_wait_as_the_queue_is_long() -> None:
    async def work() -> None:
        gate = Gate(num_requests=8, num_places=1, max_queue=5)
        entries = [gate.enter("a") for _ in range(5)]
        tasks = [asyncio.create_task(gate.place(entry, n)) for entry, n in zip(entries, (9, 2, 4, 3, 1), strict=True)]
        await asyncio.sleep(0)
        refused = [task.done() and isinstance(task.exception(), ApiError) for task in tasks]
        assert refused == [False, False, True, False, True]
        for entry in entries:
            gate.leave(entry)
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(work())


def test_clients_are_told_to_wait_by_the_mean_time_between_departures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single late departure changes little."""

    async def work() -> None:
        now_s, gate = 0.0, Gate(num_requests=55, num_places=1, max_queue=55)
        monkeypatch.setattr("forerun.serve.gate.time.perf_counter", lambda: now_s)
        entries = [gate.enter("a") for _ in range(55)]
        tasks = [asyncio.create_task(gate.place(entry, 1)) for entry in entries]
        await asyncio.sleep(0)
        for entry in entries[:51]:
            now_s += 2.0
            gate.leave(entry)
        assert (gate.num_waiting, gate.retry_s) == (3, 6)
        now_s += 20.0
        gate.leave(entries[51])
        assert gate.num_waiting == 2
        assert 4 <= gate.retry_s <= 8
        for entry in entries[52:]:
            gate.leave(entry)
        await asyncio.gather(*tasks)

    asyncio.run(work())


class AsgiClient:
    """A client of an application that takes the first `num_taken` messages and then goes, or stays and reads nothing.

    One that takes all has the whole answer, slowly where `slow`.
    """

    def __init__(self, body: dict[str, Any], num_taken: int | None, stays: bool, slow: bool) -> None:
        self.raw = json.dumps(body).encode()
        self.num_taken, self.stays, self.slow = num_taken, stays and num_taken is not None, slow
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.read = False
        self.status = 0
        self.leave_early()

    def leave_early(self) -> None:
        if self.num_taken is not None and len(self.sent) >= self.num_taken and not self.stays:
            self.gone.set()

    async def receive(self) -> dict[str, Any]:
        if not self.read:
            self.read = True
            return {"type": "http.request", "body": self.raw, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        if self.num_taken is not None and len(self.sent) >= self.num_taken:
            await self.gone.wait()
        if not self.gone.is_set():
            await asyncio.sleep(0.001 if self.slow else 0)
            self.sent.append(message)
            self.leave_early()

    async def ask(self, app: Callable[..., Awaitable[None]]) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        await app(
            {
                "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "scheme": "http",
                "query_string": b"", "headers": headers, "client": None, "raw_path": b"/v1/completions", "state": {},
            },
            self.receive,
            self.send,
        )  # fmt: skip

    def texts(self) -> list[str]:
        """Of all samples."""
        raw = b"".join(message.get("body", b"") for message in self.sent).decode()
        events = [line.removeprefix("data: ") for line in raw.splitlines() if line not in ("", "data: [DONE]")]
        by_sample: dict[int, str] = {}
        for event in map(json.loads, events):
            for choice in event["choices"]:
                by_sample[choice["index"]] = by_sample.get(choice["index"], "") + choice["text"]
        return [by_sample[place] for place in sorted(by_sample)]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, Callable[..., Awaitable[None]]]]:
    with drafting(max_num_seqs=1) as llm:
        service = Service(llm, ServeSettings(served_model_name="stories"))
        yield service, application(service)
        service.close()


def test_the_time_limit_of_a_request_counts_from_its_arrival(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service, _ = served
    monkeypatch.setattr(service, "settings", replace(service.settings, request_s=3600.0))
    answers = service.llm.ask([Request.of("Once")])

    async def work() -> None:
        entry = OpenRequest("a", time.perf_counter() - 3600)
        entry.turn = asyncio.get_running_loop().create_future()
        with service.limited(entry, answers), pytest.raises(ApiError, match="took more than 3600 seconds"):
            await asyncio.wait_for(entry.turn, 5)

    asyncio.run(work())


def test_a_request_is_finished_if_all_of_its_samples_are(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service, _ = served
    outcomes: list[str] = []
    monkeypatch.setattr("forerun.serve.service.log_request", lambda record: outcomes.append(record["outcome"]))

    async def work(num_read: int) -> None:
        entry, finished = service.gate.enter("a"), 0
        writer = service.read(entry, "completions", {"prompt": "Once", "max_tokens": 4, "n": 2})
        try:
            async with aclosing(service.deltas(entry, writer)) as deltas:
                async for delta in deltas:
                    finished += delta.finish_reason is not None
                    if finished == num_read:
                        break
        finally:
            service.gate.leave(entry)

    for num_read in (1, 2):
        asyncio.run(asyncio.wait_for(work(num_read), PATIENCE_S))
    monkeypatch.setattr(service, "settings", replace(service.settings, request_s=1e-9))
    with pytest.raises(ApiError, match="took more than"):
        asyncio.run(asyncio.wait_for(work(2), PATIENCE_S))
    assert outcomes == ["client_left", "finished", "took_too_long"]


CLIENTS = st.tuples(
    st.booleans(),  # streams
    st.integers(1, 3),  # samples
    st.none() | st.integers(0, 4),  # messages taken
    st.booleans(),  # stays
    st.booleans(),  # reads slowly
)


@settings(max_examples=10, deadline=None, phases=[Phase.generate])  # what hangs is not tried again
@given(clients=st.lists(CLIENTS, min_size=3, max_size=9))
def test_others_are_served_whatever_clients_do(served: Any, clients: list[tuple[bool, int, Any, bool, bool]]) -> None:
    """While those that have stopped reading are still there, nothing is held for them any more."""
    service, app = served
    gate, llm = service.gate, service.llm

    async def work() -> None:
        asked, tasks = [], []
        for stream, n, num_taken, stays, slow in clients:
            body = {"prompt": "Once", "max_tokens": 8, "seed": 1, "n": n, "stream": stream}
            asked.append(AsgiClient(body, num_taken, stays, slow))
            tasks.append(asyncio.create_task(asked[-1].ask(app)))
            await asyncio.sleep(0.002 if slow else 0)
        honest = AsgiClient({"prompt": "Once", "max_tokens": 8, "seed": 1, "n": 3}, None, False, False)
        await honest.ask(app)
        await asyncio.gather(*(task for task, one in zip(tasks, asked, strict=True) if not one.stays))
        streaming = lambda: sum(s and not task.done() for task, (s, *_) in zip(tasks, clients, strict=True))  # noqa: E731
        while llm.engine.has_work or gate.held.total() or gate.num_in > streaming():  # a whole answer is still written
            await asyncio.sleep(0.001)
        assert not gate.num_open.total() + gate.num_waiting
        assert gate.num_in == streaming()
        for one in asked:
            if one.num_taken is None:
                assert one.texts() == honest.texts()[: len(one.texts())] != []
            elif one.num_taken == 0 and not one.stays:
                assert one.status == CLIENT_GONE, "nothing is written for who has gone"
            one.gone.set()
        await asyncio.gather(*tasks)
        assert not gate.num_in + gate.held.total() + len(service.uploads.under_way)
        assert not llm.engine.runner.cache.num_rows

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
