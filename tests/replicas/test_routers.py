"""Other routers in front of two plain servers: nginx and SGLang's gateway, each skipped where it is not installed.

Answers are one engine's, sessions stay, and a server that ends is left out.
"""

import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.checkpoints import ROOT
from kit.engines import PATIENCE_S
from kit.servers import OK, events_of, expected, launched, started, until

pytestmark = pytest.mark.full
Server = tuple[subprocess.Popen[str], str]


@contextmanager
def two_servers(*options: str) -> Iterator[list[Server]]:
    """Two plain servers, which may have ended at the end."""
    servers = [started("--served-model-name", "stories", "--drain-s", "1", *options) for _ in range(2)]
    try:
        yield servers
    finally:
        for process, _ in servers:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def router(words: list[str], port: int) -> Iterator[Any]:
    """A client of a router that is started by these words."""
    process = launched(words)
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:

        def answers() -> bool:
            try:
                return bool(http.get("/health").status_code == 200)
            except httpx.TransportError:
                assert process.poll() is None, "the router ended"
                return False

        try:
            until(answers, pause_s=0.1)
            yield http
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def num_answered(url: str) -> float:
    """How many requests a server finished."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return sum(float(each) for each in re.findall(r"^forerun:request_success_total\{.*\} (.*)$", text, re.MULTILINE))


def assert_answers(http: Any, **headers: str) -> None:
    """That an answer and a stream are the library's."""
    body = OK | {"model": "stories"}
    whole = http.post("/v1/completions", json=body, headers=headers)
    assert whole.json()["choices"][0]["text"] == expected()
    stream = http.post("/v1/completions", json=body | {"stream": True}, headers=headers).text
    assert "".join(choice["text"] for event in events_of(stream) for choice in event["choices"]) == expected()
    assert stream.endswith("data: [DONE]\n\n")


def nginx_words(servers: list[Server], port: int, folder: Path) -> list[str]:
    """nginx with the file of contrib, with these ports and without the folders of an installation."""
    text = (ROOT / "contrib" / "nginx.conf").read_text(encoding="utf-8")
    for fixed, (_, url) in zip(("8001", "8002"), servers, strict=True):
        text = text.replace(f"127.0.0.1:{fixed}", url.removeprefix("http://"))
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    folders = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    inside = "".join(f"{name}_temp_path {folder}/{name};\n" for name in folders) + "access_log off;\n"
    (folder / "nginx.conf").write_text(text.replace("http {\n", f"http {{\n{inside}", 1))
    settings = f"daemon off; pid {folder}/pid; error_log stderr;"
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", settings]


def test_nginx_keeps_sessions_shares_the_rest_and_leaves_out_who_ends(tmp_path: Path) -> None:
    if shutil.which("nginx") is None:
        pytest.skip("there is no nginx")
    port = free_port()
    with two_servers() as servers, router(nginx_words(servers, port, tmp_path), port) as http:
        for session in ("one", "two", "three", "four"):
            before = [num_answered(url) for _, url in servers]
            for _ in range(3):
                assert_answers(http, **{"x-session-id": session})
            gained = [num_answered(url) - was for (_, url), was in zip(servers, before, strict=True)]
            assert sorted(gained) == [0, 6]
        before = [num_answered(url) for _, url in servers]
        for _ in range(4):
            assert_answers(http)
        assert all(num_answered(url) > was for (_, url), was in zip(servers, before, strict=True))
        servers[0][0].kill()
        for session in ("one", "two", "three", "four"):
            assert_answers(http, **{"x-session-id": session})
        assert_answers(http)


def test_sglangs_gateway_routes_to_plain_servers() -> None:
    if find_spec("sglang_router") is None:
        pytest.skip("SGLang's gateway is not installed: pip install sglang-router")
    port, metrics = free_port(), free_port()
    with two_servers("--lenient") as servers:
        page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
        (line,) = re.findall(r"^python (-m sglang_router.*)$", page, re.MULTILINE)
        for written, address in (("127.0.0.1:8001", servers[0][1]), ("127.0.0.1:8002", servers[1][1])):
            line = line.replace(f"http://{written}", address)
        words = [sys.executable, *shlex.split(line.replace("--port 8000", f"--port {port}"))]
        with router([*words, "--prometheus-port", str(metrics)], port) as http:
            for _ in range(4):
                assert_answers(http)
            chat = {"model": "stories", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            assert http.post("/v1/chat/completions", json=chat).status_code in (200, 400)  # it has no template
            assert sum(num_answered(url) for _, url in servers) >= 8
            servers[0][0].kill()  # until the gateway looks at it again, requests may be answered with an error
            until(lambda: http.post("/v1/completions", json=OK | {"model": "stories"}).status_code == 200, pause_s=0.5)
            for _ in range(4):
                assert_answers(http)
