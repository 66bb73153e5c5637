"""Servers on real sockets for the tests of forerun.serve, and OpenAI's specification if it is available."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import jsonschema
import openai
import pytest
import yaml

from forerun.engine.engine import Engine, RoundPlan
from forerun.llm import LLM
from forerun.output import RequestOutput
from forerun.sampling.params import SamplingParams
from forerun.serve.settings import ServeSettings
from kit.checkpoints import ROOT, SMALL, TARGET
from kit.engines import PATIENCE_S, plain

JSON = {"content-type": "application/json"}
OK = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 1}
ENDLESS = OK | {"max_tokens": 500, "ignore_eos": True}
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}{{ opening or 'One day' }}{% endif %}"
)


def drafting(draft: str = f"model:{SMALL}", **options: Any) -> LLM:
    """An LLM with a drafter, for a server."""
    settings: dict[str, Any] = {"dtype": "float32", "speculation": 3, "max_num_seqs": 4}
    return LLM(str(TARGET), draft, **settings | options)


@dataclass(frozen=True)
class Running:
    """A running server."""

    url: str
    server: Any  # a DrainingServer
    clients: list[Any] = field(default_factory=list)  # closed with the server

    @property
    def llm(self) -> LLM:
        return self.server.service.llm

    def look(self, function: Callable[[], Any]) -> Any:
        """What a function returns in the server's event loop, where connections do not change meanwhile."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.server.loop).result(PATIENCE_S)

    @property
    def num_busy(self) -> int:
        """Connections whose answer is not completely sent."""
        return int(self.look(lambda: self.server.connections.num_busy))

    def client(self, key: str = "none", **options: Any) -> Any:
        """OpenAI's client, without retries, which would hide errors."""
        options.setdefault("max_retries", 0)
        options.setdefault("timeout", PATIENCE_S)
        options.setdefault("http_client", openai.DefaultHttpxClient(verify=False))
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)
        self.clients.append(client)
        return client

    def http(self, **options: Any) -> Any:
        """An HTTP client; it does not load the system's certificates, which takes longer than most answers."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False, verify=False, **options)

    def post(self, path: str, **body: Any) -> Any:
        """The response to one POST request."""
        with self.http() as http:
            return http.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, without its [DONE]."""
        return events_of(self.post(path, **body, stream=True).text)

    def raw(self, sent: bytes = b"", buffer: int = 0) -> socket.socket:
        """A connection on which `sent` was sent, with a receive buffer of `buffer` bytes (0 for the default)."""
        sock = socket.socket()
        sock.settimeout(PATIENCE_S)
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        host, port = self.url.removeprefix("http://").split(":")
        sock.connect((host, int(port)))
        with suppress(BrokenPipeError, ConnectionResetError):  # the server may end it at the first bytes
            sock.sendall(sent)
        return sock


def events_of(text: str) -> list[dict[str, Any]]:
    """The objects in the lines of a stream of events."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def library_answer(body: dict[str, Any]) -> RequestOutput:
    """The library's answer to a completions body with one prompt, decoded plainly and alone in the batch."""
    values = {name: value for name, value in body.items() if name not in ("prompt", "speculation")}
    prompt = body["prompt"] if isinstance(body["prompt"], str) else [body["prompt"]]
    return plain().generate(prompt, SamplingParams(**values), use_tqdm=False)[0]


@cache
def expected() -> str:
    """The library's text for the request OK."""
    return library_answer(OK).outputs[0].text


class Paced:
    """Engines whose rounds wait to be let through, one by one, once they are held."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passes, self.held, self.num_rounds = threading.Semaphore(0), False, 0
        honest = Engine.round

        def one(engine: Engine, plan: RoundPlan) -> object:
            if self.held:
                assert self.passes.acquire(timeout=PATIENCE_S)
            self.num_rounds += 1
            return honest(engine, plan)

        patch.setattr(Engine, "round", one)

    def hold(self, num_rounds: int = 0) -> None:
        """Let so many rounds through, and hold the next ones."""
        self.passes, self.held = threading.Semaphore(num_rounds), True

    def let_go(self) -> None:
        self.held = False
        self.passes.release(1000)

    def let_go_when(self, condition: Callable[[], object]) -> None:
        """Let the rounds go on once a condition holds: no request can end before that."""
        until(condition)
        self.let_go()


def head(path: str, length: int, *more: str, method: str = "POST") -> bytes:
    """The head of a request whose body has this length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", *more, "", ""]).encode()


def posted(path: str, body: Any, *more: str) -> bytes:
    """The bytes of a POST request with this body."""
    raw = json.dumps(body).encode()
    return head(path, len(raw), *more) + raw


def ended(sock: socket.socket) -> bytes:
    """All bytes that arrive until the server closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            received += piece
    sock.close()
    return received


# asyncio for uvicorn: a server checks every 5 ms, not every 100, whether it should end, and so ends sooner.
LOOKING_OFTEN = SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 20)})


@contextmanager
def running(llm: LLM, service_of: Any = None, engines: Sequence[LLM] = (), **settings: Any) -> Iterator[Running]:
    """A server in a thread. At the end it is drained, and neither it nor its engines may hold state of a request."""
    import uvicorn.server

    from forerun.serve.server import DrainingServer, bound_socket
    from forerun.serve.service import Service

    usual: dict[str, Any] = {"port": 0, "served_model_name": "stories", "trust_request_templates": True}
    options = ServeSettings(**usual | settings)
    sock = bound_socket(options)
    server = DrainingServer((service_of or Service)(llm, options))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    looking_often = patch.object(uvicorn.server, "asyncio", LOOKING_OFTEN)
    looking_often.start()
    thread.start()
    until(lambda: server.started)
    try:
        yield (served := Running(f"http://127.0.0.1:{sock.getsockname()[1]}", server))
        for client in served.clients:
            client.close()
    finally:
        assert server.loop is not None
        with suppress(RuntimeError):  # it has ended already
            server.loop.call_soon_threadsafe(server.drain)
        thread.join(PATIENCE_S)
        looking_often.stop()
        assert not thread.is_alive()
        for each in engines or [llm]:
            assert not each.engine.has_work
            assert each.engine.runner.cache.num_rows == 0
        assert not server.service.gate.num_open.total()
        assert not server.service.gate.held.total()


def serving(made: Callable[[], LLM] = drafting, **settings: Any) -> Any:
    """A fixture: one server with this model and these settings for all tests of a module."""

    @pytest.fixture(scope="module")
    def server() -> Iterator[Running]:
        with made() as llm, running(llm, **settings) as served:
            yield served

    return server


def command(*options: str) -> list[str]:
    """The command that serves this model with a drafter, at a free port unless the options say otherwise."""
    words = [sys.executable, "-m", "forerun", "serve", "--model", str(TARGET), "--draft", f"model:{SMALL}"]
    return [*words, "--dtype", "float32", "--depth", "3", "--port", "0", *options]


def launched(words: list[str], streams: int = subprocess.DEVNULL, **env: str) -> subprocess.Popen[str]:
    """Start a command as a process with these output streams and environment variables."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | env
    return subprocess.Popen(words, env=env, stdout=streams, stderr=streams, text=True)


def started(*options: str) -> tuple[subprocess.Popen[str], str]:
    """Start `forerun serve` as a process; the process and its URL, read from its log."""
    process = launched(command(*options), subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if "/v1" in line:
            return process, line.split(" at ")[1].split("/v1")[0]
    raise AssertionError(f"it ended with {process.wait()}")


def until(condition: Callable[[], object], patience_s: float = PATIENCE_S, pause_s: float = 0.002) -> None:
    """Wait until the condition holds."""
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not become true in time"
        time.sleep(pause_s)


def specification_file() -> Path | None:
    """Where OpenAI's specification is: FORERUN_OPENAPI, or a folder `shared` next to or in the checkout."""
    places = [ROOT.parent / "shared", ROOT / "shared"]
    files = [Path(os.environ.get("FORERUN_OPENAPI", "")), *(place / "data" / "openapi.yaml" for place in places)]
    return next((file for file in files if file.is_file()), None)


@cache
def specification() -> dict[str, Any]:
    """OpenAI's specification; without its file a skip."""
    file = specification_file()
    if file is None:
        pytest.skip("OpenAI's specification is not here: FORERUN_OPENAPI names openapi.yaml of openai/openai-openapi")
    with file.open("rb") as text:
        loaded: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return loaded


def assert_valid(body: object, schema: str) -> None:
    """Assert that a body is valid by the specification's schema of this name."""
    schema_of_body = {"$ref": f"#/components/schemas/{schema}", "components": {"schemas": schemas()}}
    jsonschema.Draft202012Validator(schema_of_body).validate(body)


@cache
def schemas() -> Any:
    """The specification's schemas, for a validator."""
    return strict(specification()["components"]["schemas"])


def strict(node: Any) -> Any:
    """Schemas of OpenAPI as JSON schemas: `nullable` is an alternative, and `$recursiveAnchor` nothing."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    converted = {
        key: strict(value) for key, value in node.items() if key not in ("nullable", "$recursiveAnchor", "example")
    }
    return {"anyOf": [converted, {"type": "null"}]} if node.get("nullable") is True else converted
