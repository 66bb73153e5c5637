"""Raw HTTP: whatever bytes a client sends, it gets answers in HTTP or none, and the server is as before."""

import json
import logging
import random
import re
import socket
import struct
from contextlib import suppress

import pytest

from kit.servers import ENDLESS, OK, Running, ended, expected, head, posted, serving, until

BODY = json.dumps(OK).encode()
READY = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
JSON = b"Host: localhost\r\nContent-Type: application/json\r\n"
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
POST = b"POST /v1/completions HTTP/1.1\r\n"
LENGTH = b"Content-Length: %d\r\n"


server = serving(max_body_bytes=10_000)


def answers(raw: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """The answers on one connection; what is none raises."""
    found = []
    while raw:
        top, _, raw = raw.partition(b"\r\n\r\n")
        status, *lines = top.decode("ascii").split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Za-z -]+", status)
        assert match, status
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if match[1] == "100":
            continue
        assert "x-request-id" in headers, top
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            size = 1
            while size:
                line, _, raw = raw.partition(b"\r\n")
                size = int(line, 16)
                body, end, raw = body + raw[:size], raw[size : size + 2], raw[size + 2 :]
                assert end == b"\r\n"
        else:
            size = int(headers["content-length"])
            body, raw = raw[:size], raw[size:]
            assert len(body) == size
        found.append((int(match[1]), headers, body))
    return found


def asked(server: Running, raw: bytes, half_close: bool = False) -> list[tuple[int, dict[str, str], bytes]]:
    """What these bytes are answered; behind them comes the end, or the server ends it."""
    sock = server.raw(raw)
    if half_close:
        with suppress(OSError):  # the server may have ended it
            sock.shutdown(socket.SHUT_WR)
    return answers(ended(sock))


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (POST + JSON + LENGTH % 6 + CHUNKED + b"\r\n" + CHUNKS, 400),
        (POST + JSON + CHUNKED + LENGTH % len(BODY) + b"\r\n" + CHUNKS, 400),
        (POST + JSON + LENGTH % 5 + LENGTH % 6 + b"\r\n" + BODY, 400),
        (POST + JSON + b"Content-Length: 5, 6\r\n\r\n" + BODY, 400),
        (POST + JSON + b"Content-Length: +5\r\n\r\n" + BODY, 400),
        (POST + JSON + b"Content-Length: 0x5\r\n\r\n" + BODY, 400),
        (POST + JSON + b"Content-Length: -1\r\n\r\n" + BODY, 400),
        (POST + JSON + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS, 400),
        (POST + JSON + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS, 400),
        (POST + JSON + CHUNKED + CHUNKED + b"\r\n" + CHUNKS, 400),
        (POST + JSON + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKS, 400),
        (POST.replace(b"1.1", b"1.0") + JSON + CHUNKED + b"\r\n" + CHUNKS, 400),
        (POST + JSON + CHUNKED + b"\r\nzz\r\n", 400),
        (POST + JSON + CHUNKED + b"\r\n5\r\nabcdefgh", 400),
        (POST + JSON + b"X: a\x00b\r\n\r\n", 400),
        (POST + JSON + b"X\x00: a\r\n\r\n", 400),
        (POST + b" folded: x\r\n" + JSON + b"\r\n", 400),
        (POST + b"Content-Type: application/json\r\nContent-Length: 0\r\n\r\n", 400),
        (POST + JSON + b"Host: localhost\r\nContent-Length: 0\r\n\r\n", 400),
        (POST + JSON + b"X: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (POST + JSON + b"".join(b"X-%d: a\r\n" % i for i in range(20_000)) + b"\r\n", 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + JSON + b"\r\n", 431),
        (POST + JSON + b"X: " + b"a" * 17_000 + b"\r\n\r\n", 431),
        (b"GET /ready\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /ready HTTP/9.9\r\n" + JSON + b"\r\n", 400),
        (b"GET /ready HTTP/1.2\r\n" + JSON + b"\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
        (b"\x00\r\n\r\n", 400),
    ],
)
def test_ambiguous_and_broken_requests_are_refused_and_the_connection_ends(
    server: Running, raw: bytes, status: int
) -> None:
    """What comes behind such a request, which might be smuggled, is not read as another one."""
    ((answered, headers, body),) = asked(server, raw + READY.replace(b"close", b"keep-alive"))
    code = "head_too_large" if status == 431 else "invalid_http"
    assert (answered, json.loads(body)["error"]["code"]) == (status, code)
    assert headers["connection"] == "close"


def test_a_head_that_grows_too_long_is_431_before_its_end(server: Running) -> None:
    with server.raw(POST + JSON + b"X: " + b"a" * 20_000) as sock:
        ((status, headers, _),) = answers(ended(sock))
    assert (status, headers["connection"]) == (431, "close")


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "gzip, identity", "zstd", "x" * 200])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
)
def test_bodies_that_are_encoded_are_415(server: Running, path: str, coding: str) -> None:
    with server.http() as http:
        answer = http.post(path, json=OK, headers={"Content-Encoding": coding})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
        assert "Content-Encoding" in answer.json()["error"]["message"]
        good = http.post("/v1/completions", json=OK, headers={"Content-Encoding": "Identity"})
        assert good.json()["choices"][0]["text"] == expected()


@pytest.mark.parametrize(
    "raw",
    [
        posted("/v1/completions", OK, "Connection: close"),
        POST + JSON + CHUNKED + b"Connection: close\r\n\r\n" + CHUNKS,
        POST + JSON + LENGTH % len(BODY) + LENGTH % len(BODY) + b"Connection: close\r\n\r\n" + BODY,
        POST + JSON + LENGTH % len(BODY) + b"X: a\r\n b\r\nConnection: close\r\n\r\n" + BODY,
        POST.replace(b"1.1", b"1.0") + JSON + LENGTH % len(BODY) + b"\r\n" + BODY,
        POST + JSON + LENGTH % len(BODY) + b"Expect: 100-continue\r\nConnection: close\r\n\r\n" + BODY,
    ],
    ids=["length", "chunks", "twice the same", "folded", "HTTP/1.0", "expects"],
)
def test_other_forms_of_a_request_are_answered(server: Running, raw: bytes) -> None:
    ((status, _, body),) = asked(server, raw)
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == expected()


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/health", "localhost", 200),
        ("HTTP://localhost:80/v1/models/stories?x=http://a/b", "localhost", 200),
        ("http://localhost/v1%2Fmodels", "localhost", 200),
        ("http://localhost/health", "elsewhere", 200),
        ("http://elsewhere/health", "localhost", 403),
        ("http://me@localhost/health", "localhost", 403),
        ("http:///health", "localhost", 403),
        ("http://localhost%2Fhealth", "localhost", 403),
        ("http://localhost", "localhost", 200),
        ("http://localhost/nowhere", "localhost", 404),
        ("ftp://localhost/health", "localhost", 404),
        ("localhost/health", "localhost", 404),
    ],
)
def test_a_target_in_absolute_form_replaces_the_host(server: Running, target: str, host: str, status: int) -> None:
    """RFC 9112, section 3.2.2."""
    lines = (f"GET {target} HTTP/1.1", f"Host: {host}", "Connection: close", "", "")
    ((answered, _, body),) = asked(server, "\r\n".join(lines).encode())
    assert answered == status, body


@pytest.mark.parametrize("more", [(), ("Expect: 100-continue",)], ids=["", "expects"])
def test_a_body_that_is_announced_as_too_long_is_refused_before_it_comes(server: Running, more: tuple[str]) -> None:
    with server.raw(head("/v1/completions", 10_001, "Connection: close", *more)) as sock:
        raw = ended(sock)
    ((_, _, body),) = answers(raw)
    assert raw.startswith(b"HTTP/1.1 413 ")  # not 100
    assert json.loads(body)["error"]["code"] == "body_too_large"
    padded = BODY.ljust(10_000)
    ((status, _, _),) = asked(server, head("/v1/completions", 10_000, "Connection: close") + padded)
    assert status == 200


def test_pipelined_requests_are_answered_in_their_order(server: Running) -> None:
    found = asked(server, posted("/v1/completions", OK) * 3 + READY)
    assert [status for status, _, _ in found] == [200] * 4
    assert [json.loads(body)["choices"][0]["text"] for _, _, body in found[:3]] == [expected()] * 3


def test_a_body_that_is_refused_from_its_head_is_not_asked_for(server: Running) -> None:
    """The client may go on with its body or with another request: so the connection ends, and neither is mistaken."""
    expects = head("/v1/completions", 99, "Expect: 100-continue").replace(b"application/json", b"text/plain")
    with server.raw(expects) as sock:
        ((status, headers, _),) = answers(ended(sock))
    assert (status, headers["connection"]) == (415, "close")
    with server.raw(head("/v1/completions", len(BODY), "Expect: 100-continue", "Connection: close")) as sock:
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        sock.sendall(BODY)
        assert answers(ended(sock))[0][0] == 200


def test_a_broken_chunk_behind_a_refusal_is_no_fault(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    raw = POST + JSON.replace(b"json", b"xml") + CHUNKED + b"\r\n5\r\nab"
    with server.raw(raw) as sock:
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 415")
        sock.sendall(b"cdefgh")
        ended(sock)
    until(lambda: not server.num_busy)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_client_that_closes_its_side_counts_as_disconnected(server: Running) -> None:
    """The end of what a client sends is all that a server sees of one that has gone away."""
    assert not asked(server, posted("/v1/completions", ENDLESS), half_close=True)
    until(lambda: not server.server.service.gate.num_in and not server.llm.engine.has_work)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_reset_ends_a_request_wherever_it_is(server: Running, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Within its head, its body, its prompt and its answer."""
    raw = posted("/v1/completions", {**ENDLESS, "stream": stream})
    for length in (10, raw.index(b"\r\n\r\n") + 10, len(raw), len(raw)):
        sock = server.raw(raw[:length])
        if length == len(raw) and stream:
            sock.recv(10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    until(lambda: not server.server.service.gate.num_in and not server.llm.engine.has_work)
    until(lambda: not server.server.server_state.connections)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def mutated(source: random.Random) -> bytes:
    """Bytes that are much like a request."""
    seeds = [
        posted("/v1/completions", OK), posted("/tokenize", {"prompt": "a"}), posted("/v1/responses", {"input": "a"}),
        posted("/v1/chat/completions", {"messages": []}, "Expect: 100-continue"), READY,
        POST + JSON + CHUNKED + b"\r\n" + CHUNKS,
        b"GET /v1/models/%2e%2e/a HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: ,\r\nX-Forwarded-Proto: wss\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]  # fmt: skip
    pieces = [
        b"\r\n", b"\n", b"\x00", b":", b" ", b"\xff", b"\t", b"Host: a", b"0", b"-1", b"HTTP/1.1", b"%s" * 9,
        b"a" * 20_000,
    ]  # fmt: skip
    raw = bytearray(b"".join(source.choices(seeds, k=source.randint(1, 3))))
    for _ in range(source.randint(0, 4)):
        at, length = source.randrange(len(raw) + 1), source.choice((0, 0, 1, 2, 20))
        raw[at : at + length] = source.choice([*pieces, raw[: source.randrange(40)], source.randbytes(3)])
    return bytes(raw)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 20))])
def test_any_bytes_are_answered_in_http_or_not_at_all(
    server: Running, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = random.Random(seed)
    for _ in range(60):
        raw = mutated(source)
        for status, _, body in asked(server, raw, half_close=True):
            assert status < 500, (raw, body)
    until(lambda: not server.server.service.gate.num_in and not server.llm.engine.has_work)
    until(lambda: not server.server.server_state.connections)
    assert not server.server.service.uploads.num_bytes
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert server.post("/v1/completions", **OK).json()["choices"][0]["text"] == expected()
