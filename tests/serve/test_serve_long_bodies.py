"""Long bodies are read one at a time, and short requests are answered in the meantime."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.serve import connections, service, uploads
from forerun.serve.uploads import SerialRunner
from kit.engines import PATIENCE_S
from kit.servers import OK, drafting, expected, head, posted, running, until
from serve.test_serve_half_requests import status_of, text

LONG = b'{"prompt":"Once","no_field":[' + b'["marker"],' * 999 + b'["marker"]]}' + b" " * service.LONG_BODY_BYTES


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.002, 0.006]), min_size=2, max_size=6), st.sets(st.integers(0, 5)))
def test_tasks_run_one_by_one_with_a_pause_behind_each(lengths: list[float], failing: set[int]) -> None:
    times: list[tuple[float, float]] = []

    def task(number: int) -> int:
        began_s = time.perf_counter()
        time.sleep(lengths[number])
        times.append((began_s, time.perf_counter()))
        return number if number not in failing else 1 // 0

    async def work() -> list[Any]:
        tasks = SerialRunner()
        asked = [tasks.run(lambda number=number: task(number)) for number in range(len(lengths))]
        return await asyncio.gather(*asked, return_exceptions=True)

    for number, result in enumerate(asyncio.run(work())):
        assert isinstance(result, ZeroDivisionError) if number in failing else result == number
    for (began_s, ended_s), (next_s, _) in pairwise(times):
        assert next_s - ended_s >= 0.9 * uploads.PAUSE * (ended_s - began_s)


def test_a_task_without_its_client_keeps_its_turn_and_one_that_waits_is_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads, "PAUSE", 0.0)

    async def work() -> list[str]:
        tasks, begun, ends, done = SerialRunner(), threading.Event(), threading.Event(), list[str]()
        first = asyncio.create_task(tasks.run(lambda: (begun.set(), ends.wait(PATIENCE_S), done.append("first"))))
        others = [asyncio.create_task(tasks.run(lambda name=name: done.append(name))) for name in ("gone", "last")]
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        first.cancel()
        others[0].cancel()
        await asyncio.wait([first, others[0]])
        assert not done
        ends.set()
        await others[1]
        return done

    assert asyncio.run(work()) == ["first", "last"]


@pytest.mark.parametrize("step", ["parse_json_body", "prepare"])
def test_short_bodies_are_answered_while_long_ones_are_read_one_at_a_time(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, passes, lock, inside = getattr(service, step), threading.Event(), threading.Lock(), [0, 0]

    def held(body: Any, *others: Any) -> Any:
        if len(body if step == "parse_json_body" else body.get("user", "")) <= service.LONG_BODY_BYTES:
            return honest(body, *others)
        with lock:
            inside[0] += 1
            inside[1] = max(inside)
        passes.wait(PATIENCE_S)
        try:
            return honest(body, *others)
        finally:
            with lock:
                inside[0] -= 1

    monkeypatch.setattr(service, step, held)
    monkeypatch.setattr(uploads, "PAUSE", 0.0)  # the first one waits long
    with drafting() as llm, running(llm) as server, ExitStack() as stack:
        good = {**OK, "user": "x" * len(LONG)}
        bodies = [*[{**good, "no_field": 1}] * 11, good]
        socks = [stack.enter_context(server.raw(posted("/v1/completions", body))) for body in bodies]
        try:
            until(lambda: server.server.service.gate.num_open.total() == 12)
            assert text(server) == expected()
        finally:
            passes.set()
        assert [status_of(sock) for sock in socks] == [400] * 11 + [200]
    assert inside == [0, 1]


def test_nothing_of_a_refused_body_waits_for_the_collector() -> None:
    def markers() -> int:
        return sum(type(each) is list and each[:1] == ["marker"] for each in gc.get_objects())

    with drafting() as llm, running(llm) as server, server.http() as http:
        gc.collect()
        gc.disable()
        try:
            for body in (LONG, LONG.strip()):
                answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
                assert answer.json()["error"]["code"] == "unknown_parameter"
            until(lambda: not server.server.service.gate.num_in)
            until(lambda: not markers())  # the thread that read it may end a moment after the answer
        finally:
            gc.enable()


@pytest.mark.parametrize("num_bytes", [20_000, 300_000])
def test_long_bodies_are_read_in_few_pieces_and_little_of_what_follows_with_them(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows may be in chunks, and take longer than its length says."""
    lengths, honest = [], connections.Connection.data_received

    def data_received(connection: connections.Connection, data: bytes) -> None:
        lengths.append(len(data))
        honest(connection, data)

    monkeypatch.setattr(connections.Connection, "data_received", data_received)
    first = head("/v1/completions", num_bytes) + b" " * num_bytes
    chunks = head("/v1/completions", 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    sent = first + chunks + b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n"
    with drafting() as llm, running(llm) as server, server.raw(sent) as sock:
        assert status_of(sock) == 400
        until(lambda: sum(lengths) == len(sent))
    ends = [sum(lengths[: place + 1]) for place in range(len(lengths))]
    for start, end in zip([0, *ends], ends, strict=False):
        assert end - start <= (connections.BODY_BYTES if end <= len(first) else connections.READ_BYTES)
    assert sum(end <= len(first) for end in ends) <= 12 + num_bytes // connections.BODY_BYTES
