"""Slow readers: a client that does not read holds no place, is cut off in time, and blocks no answer or shutdown."""

import logging
import signal
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.serve import connections
from forerun.serve.connections import Connection
from kit.servers import ENDLESS, OK, Running, drafting, ended, posted, running, serving, until
from serve.test_serve_load import certificate_at

MUCH = ENDLESS | {"max_tokens": 200, "logprobs": 20}
SMALL_BUFFER = 4096
LONG_S = 3600.0


server = serving(lambda: drafting(max_num_seqs=1))


def unread(server: Running, stream: bool, **body: Any) -> socket.socket:
    """A client that asks for much and reads nothing; the engine has finished its request."""
    num_before = server.llm.stats.num_emitted
    sock = server.raw(posted("/v1/completions", {**MUCH, **body, "stream": stream}), SMALL_BUFFER)
    until(lambda: server.llm.stats.num_emitted > num_before and not server.llm.engine.has_work)
    unsent = lambda: sum(each.transport.get_write_buffer_size() for each in server.server.connections)  # noqa: E731
    until(lambda: server.look(unsent))
    return sock


def quiet(server: Running) -> bool:
    """Whether nothing is left of any request."""
    gate = server.server.service.gate
    return not (gate.num_in + gate.held.total() + server.num_busy)


def test_a_client_that_does_not_read_holds_no_place_in_batch_or_queue(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WRITE_S", LONG_S)
    alone = server.post("/v1/completions", **OK).json()["choices"]
    gate = server.server.service.gate
    socks = [unread(server, stream=True) for _ in range(gate.num_places + 1)]
    until(lambda: gate.num_sending == len(socks))
    assert not gate.held.total()
    assert not gate.num_open.total()
    assert gate.num_in == len(socks), "a drain would still wait for them"
    assert server.post("/v1/completions", **OK).json()["choices"] == alone
    for sock in socks:
        sock.close()
    until(lambda: quiet(server))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_reads_nothing_is_cut_off(server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sock = unread(server, stream)
    time.sleep(0.2)
    assert not quiet(server), "not at once"
    monkeypatch.setattr(connections, "WRITE_S", 0.1)
    until(lambda: quiet(server))
    assert b"[DONE]" not in ended(sock)


class Pipe:
    """A transport whose client reads a given number of bytes at given times."""

    def __init__(self) -> None:
        self.num_written = self.waiting = 0

    def write(self, num_bytes: int) -> None:
        self.num_written += num_bytes
        self.waiting += num_bytes

    def get_write_buffer_size(self) -> int:
        return self.waiting


def cut_after_s(bytes_s: float, every_s: float, written_s: float = 0.0) -> float | None:
    """When a client is cut off that takes so much in steps, of a buffer that is full or gets so many bytes a second."""
    connection: Any = object.__new__(Connection)
    connection.transport, connection.sent_s, connection.num_sent = Pipe(), 0.0, 0
    pipe = connection.transport
    for tick in range(1, 6000):
        now_s = tick / 10
        pipe.write(int(written_s / 10) if written_s else 1 << 20)
        if tick % round(every_s * 10) == 0:
            pipe.waiting -= min(pipe.waiting, int(bytes_s * every_s))
        if connection.does_not_read(now_s):
            return now_s
    return None


@pytest.mark.parametrize("every_s", [0.1, 1.0, 7.0])
def test_a_client_below_the_least_rate_is_cut_off(every_s: float) -> None:
    least = connections.LEAST_BYTES_S
    for slow in (0.0, 1.0, 0.7 * least):
        cut = cut_after_s(slow, every_s)
        assert cut is not None
        assert connections.WRITE_S <= cut <= 2 * connections.WRITE_S + 1
    for fast in (1.4 * least, 100.0 * least):
        assert cut_after_s(fast, every_s) is None
    assert cut_after_s(bytes_s=50.0, every_s=every_s, written_s=40.0) is None, (
        "whoever takes all there is is fast enough"
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_time_of_a_request_counts_sending(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "GRACE_S", 0.05)
    with drafting() as llm, running(llm, request_s=LONG_S) as server:
        sock = unread(server, stream)
        server.server.connections.request_s = 0.1
        until(lambda: quiet(server))
        assert b"[DONE]" not in ended(sock)


@pytest.mark.parametrize(("stream", "drain_s"), [(True, 0.0), (False, 0.3)], ids=["stream", "whole"])
def test_a_drain_cuts_off_clients_that_do_not_read(
    stream: bool, drain_s: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would: the server waits longer than a test for clients to read."""
    monkeypatch.setattr(connections, "WRITE_S", LONG_S)
    with caplog.at_level(logging.INFO), drafting() as llm:
        with running(llm, drain_s=drain_s) as server:
            sock = unread(server, stream)
        ended(sock)
    assert f"1 unfinished answers are cut off after {drain_s:g} s." in caplog.messages
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.parametrize("drain_s", [0.0, LONG_S])
def test_a_drain_waits_only_for_open_requests(drain_s: float, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO),
        drafting() as llm,
        running(llm, drain_s=drain_s) as server,
        server.http() as http,
    ):
        assert http.post("/v1/completions", json=OK).status_code == 200
        until(lambda: quiet(server))
        server.server.loop.call_soon_threadsafe(server.server.drain)
        until(lambda: server.server.should_exit)
    assert "All requests are answered; the server exits." in caplog.messages


def test_a_drain_sends_whole_answers_to_their_end() -> None:
    """Their bytes sit in the transport: the request has left, and a slow reader still gets all of it."""
    with drafting() as llm, running(llm, drain_s=LONG_S) as server:
        sock = unread(server, stream=False)
        server.server.loop.call_soon_threadsafe(server.server.drain)
        time.sleep(0.3)
        assert not server.server.should_exit
        found = sock.recv(1 << 16)
        length = int(found.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(found.partition(b"\r\n\r\n")[2]) < length:
            found += sock.recv(1 << 16)
        assert found.endswith(b"}")
        sock.close()


def test_a_second_signal_cuts_off_clients_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), drafting() as llm, running(llm) as server:
        sock = unread(server, stream=True)
        for _ in range(2):
            server.server.handle_exit(signal.SIGTERM, None)
        ended(sock)
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_slow_readers_of_other_addresses_are_cut_off_too(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40
    with server.raw(ask, SMALL_BUFFER):
        until(lambda: server.num_busy)
        monkeypatch.setattr(connections, "WRITE_S", 0.1)
        until(lambda: quiet(server))
    with server.http() as http:
        assert http.get("/openapi.json").status_code == httpx.codes.OK


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_reads_nothing_over_tls_is_cut_off(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = certificate_at(tmp_path)
    verify = ssl.create_default_context(cafile=str(certificate))
    much = {**MUCH, "max_tokens": 450, "stream": stream}
    tls: dict[str, Any] = {"tls_key": key, "tls_cert": certificate}
    with drafting() as llm, running(llm, drain_s=1.0, **tls) as server, server.raw(buffer=SMALL_BUFFER) as sock:
        wrapped = verify.wrap_socket(sock, server_hostname="127.0.0.1")
        wrapped.sendall(posted("/v1/completions", much))
        until(lambda: llm.stats.num_emitted and not llm.engine.has_work)
        until(lambda: server.num_busy)
        monkeypatch.setattr(connections, "WRITE_S", 0.1)
        until(lambda: not server.server.server_state.connections)
        assert quiet(server)
        wrapped.close()
