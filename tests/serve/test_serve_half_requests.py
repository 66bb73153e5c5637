"""Incomplete requests: heads and bodies without an end, and silent connections, do not block other requests."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forerun.serve import connections, uploads
from forerun.serve.connections import Phase
from forerun.serve.problems import ApiError
from forerun.serve.uploads import MOST_AT_ONCE, Upload, Uploads
from kit.engines import PATIENCE_S
from kit.servers import OK, Running, drafting, ended, expected, head, posted, running, serving, until
from serve.test_serve_load import certificate_at

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"]
server = serving(max_body_bytes=1000)


def text(server: Running) -> str:
    """What an honest client is answered."""
    answer = server.post("/v1/completions", **OK)
    return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else answer.text


def status_of(sock: socket.socket) -> int:
    """The status of the next answer."""
    return int(sock.recv(1 << 16).split()[1])


def test_incomplete_bodies_take_no_place_in_the_queue(server: Running) -> None:
    with ExitStack() as stack:
        for number in range(300):
            stack.enter_context(server.raw(head(PATHS[number % len(PATHS)], 99) + b"{"))
        until(lambda: len(server.server.service.uploads.under_way) == 300)
        assert not server.server.service.gate.num_open.total()
        assert text(server) == expected()
    until(lambda: not server.server.service.uploads.under_way)


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nX: "], ids=["nothing", "line", "head"])
@pytest.mark.parametrize("first", [b"", b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "second"])
def test_incomplete_heads_time_out(server: Running, sent: bytes, first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """However steadily their bytes come, and also behind an answer, where uvicorn itself waits for ever."""
    began_s = time.monotonic()
    with server.raw(first) as sock:
        found = bytearray()
        while first and not found.endswith(b'{"status":"ok"}'):
            found += sock.recv(1 << 16)
        monkeypatch.setattr(connections, "HEAD_S", 0.2)
        with suppress(OSError):
            sock.sendall(sent)
        reader = threading.Thread(target=lambda: found.extend(ended(sock)))
        reader.start()
        while reader.is_alive():
            with suppress(OSError):
                sock.sendall(sent[-1:])
            time.sleep(0.01)
            assert time.monotonic() - began_s < PATIENCE_S
    assert time.monotonic() - began_s >= 0.15
    assert (b'{"status":"ok"}' in found) == bool(first)
    assert text(server) == expected()


def test_an_idle_connection_is_open_for_longer_than_clients_reuse_it(server: Running) -> None:
    """A request that is sent while the server closes its connection fails."""
    reused_s = httpx.Limits().keepalive_expiry
    assert reused_s is not None
    assert min(connections.HEAD_S, server.server.config.timeout_keep_alive) > reused_s


@pytest.mark.parametrize("key", ["", "unknown"], ids=["let in", "refused"])
def test_a_slowly_sent_body_times_out(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was refused from its head, the rest of which is not read."""
    (tmp_path / "keys").write_text("known")
    with drafting() as llm, running(llm, api_keys=tmp_path / "keys" if key else None) as server:
        server.server.service.uploads.most_s = 0.2
        length = 100 * PATIENCE_S  # a drip takes longer than any wait of a test
        with server.raw(head("/v1/completions", length, f"Authorization: Bearer {key}") + b"{") as sock:
            assert status_of(sock) == (401 if key else 408)
            monkeypatch.setattr(connections, "BODY_S", 0.2)
            monkeypatch.setattr(connections, "GRACE_S", 0.1)
            with pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012 - it is written until that fails
                for _ in range(length - 1):
                    sock.sendall(b" ")
                    time.sleep(0.01)


def test_bodies_being_received_have_bounded_memory_and_the_oldest_is_dropped(server: Running) -> None:
    """Nothing is read of one more than is let in, so what 17 of them hold is at most what 16 may."""
    held = server.server.service.uploads
    with ExitStack() as stack:
        socks = []
        for number in range(uploads.MOST_AT_ONCE + 1):
            socks.append(stack.enter_context(server.raw(head("/v1/completions", 1000) + b" " * 999)))
            until(lambda number=number: len(held.under_way) == min(number + 1, uploads.MOST_AT_ONCE))
        until(lambda: held.num_bytes == uploads.MOST_AT_ONCE * 999)
        assert status_of(socks[0]) == 408
        assert text(server) == expected()
        body = json.dumps(OK).encode()
        socks[-1].sendall(b" ")
        assert status_of(socks[-1]) == 400, "the newest was read to its end"
        assert len(body) < 1000
    until(lambda: not held.under_way)
    assert not held.num_bytes


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=60))
@example([(3, 20), (2, 20), (1, 20), (0, 20)])  # the oldest is the one that sends
def test_bodies_in_any_order_stay_within_the_memory_limit(steps: list[tuple[int, int]]) -> None:
    """The body that a client is sending is never the one that makes room, and at the end nothing is held."""

    async def work() -> None:
        kept = Uploads(most_bytes=20, most_s=60.0)
        feeds = [asyncio.Queue[bytes | None]() for _ in range(6)]

        async def pieces(feed: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
            while (piece := await feed.get()) is not None:
                yield piece

        async def read(feed: asyncio.Queue[bytes | None]) -> int:
            try:
                return len(await kept.read(pieces(feed)))
            except ApiError as error:
                return error.status

        tasks = [asyncio.create_task(read(feed)) for feed in feeds]
        await asyncio.sleep(0)
        bodies = list(kept.under_way)
        for index, size in steps:
            body, before = bodies[index], list(kept.under_way)
            stays = body in kept.under_way and body.num_bytes + size <= 20
            feeds[index].put_nowait(b" " * size)
            await asyncio.sleep(0)
            assert 0 <= kept.num_bytes <= 20 * 3
            assert (body in kept.under_way) == stays
            others = [each for each in before if each is not body]
            refused = [each for each in others if each not in kept.under_way]
            assert refused == others[: len(refused)], "the oldest ones make room"
            assert not any(each.pieces for each in refused)
        for feed in feeds:
            feed.put_nowait(None)
        assert all(number in (408, 413) or number <= 20 for number in await asyncio.gather(*tasks))
        assert not kept.under_way
        assert not kept.num_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploads, "MOST_AT_ONCE", 3)
        asyncio.run(work())


def test_the_rest_of_a_refused_body_is_not_stored() -> None:
    async def send() -> tuple[int, list[bytes]]:
        all_uploads = Uploads(most_bytes=100, most_s=30.0)
        refused = Upload(asyncio.timeout(None), ApiError(408, "late", code="body_too_slow"))
        for _ in range(2 * MOST_AT_ONCE):
            all_uploads.add(refused, b"x" * 60)
        return all_uploads.num_bytes, refused.pieces

    assert asyncio.run(send()) == (0, [])


def test_a_drain_refuses_bodies_that_are_on_their_way() -> None:
    with drafting() as llm, running(llm) as server, server.raw(head("/v1/completions", 99) + b"{") as sock:
        until(lambda: server.server.service.uploads.under_way)
        server.server.loop.call_soon_threadsafe(server.server.drain)
        answer = ended(sock)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"shutting_down"' in answer


def waiting(server: Running) -> list[tuple[int, bool]]:
    """The ports of the clients of all connections, and whether each is to send a body."""
    port = lambda each: each.transport.get_extra_info("peername")[1]  # noqa: E731
    by_phase = server.server.connections.by_phase
    return server.look(lambda: [(port(each), phase is Phase.BODY) for phase in Phase for each in by_phase[phase]])


def test_a_drain_at_the_moment_of_a_bodys_deadline_refuses_it() -> None:
    async def drain() -> None:
        all_uploads, reason = Uploads(most_bytes=100, most_s=0.0), ApiError(503, "closing", code="closing")

        async def pieces() -> AsyncIterator[bytes]:
            yield b"x"
            try:
                await asyncio.sleep(PATIENCE_S)
            except asyncio.CancelledError:
                all_uploads.end(reason)
                raise

        with pytest.raises(ApiError, match="closing"):
            await all_uploads.read(pieces())

    asyncio.run(drain())


@pytest.mark.parametrize("sent", [b"", b"GET /", head("/v1/completions", 99)], ids=["nothing", "head", "body"])
def test_too_many_connections_close_the_longest_waiting_one(server: Running, sent: bytes) -> None:
    all_of_them = server.server.connections
    before, all_of_them.most = all_of_them.most, 20
    try:
        with ExitStack() as stack:
            socks = []
            for _ in range(60):  # each is there before the next one comes
                socks.append(stack.enter_context(server.raw(sent)))
                newest = socks[-1].getsockname()[1], b"Length" in sent
                until(lambda newest=newest: newest in waiting(server))
            assert text(server) == expected()
            until(lambda: len(waiting(server)) <= 20)
            for sock in socks[:40]:
                assert ended(sock) == b""
            socks[-1].settimeout(0.05)
            with pytest.raises(TimeoutError):
                socks[-1].recv(1)  # the newest is there
    finally:
        all_of_them.most = before
    assert text(server) == expected()


def test_a_request_that_is_answered_is_not_cut_off_for_new_connections(server: Running) -> None:
    all_of_them = server.server.connections
    before, all_of_them.most = all_of_them.most, 5
    try:
        with (
            ExitStack() as stack,
            server.raw(posted("/v1/completions", {**OK, "max_tokens": 500, "stream": True})) as sock,
        ):
            found = sock.recv(100)
            for _ in range(30):
                stack.enter_context(server.raw(b"GET"))
            while b"[DONE]" not in found:
                piece = sock.recv(1 << 16)
                assert piece
                found += piece
    finally:
        all_of_them.most = before


def test_a_tls_handshake_without_an_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.serve.server.HEAD_S", 0.2)
    key, certificate = certificate_at(tmp_path)
    with drafting() as llm, running(llm, tls_key=key, tls_cert=certificate) as server:
        for sent in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            with server.raw(sent) as sock:
                ended(sock)


def test_as_many_files_are_opened_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource", reason="limits of files are of POSIX")
    for soft, hard, most in ((256, 1024, 1024 - 128 - 100), (256, resource.RLIM_INFINITY, 4096), (90, 100, 1)):
        raised: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits, to=raised: to.append(limits))
        assert connections.most_connections(backlog=100) == most
        assert raised == [(hard, hard)]
