"""Under load: disconnected clients leave within a round, late ones get an error, failures do not affect others."""

import asyncio
import json
import logging
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from forerun.engine.engine import Engine, RoundPlan
from forerun.errors import InvalidRequest
from forerun.serve.access import ApiKeys
from forerun.serve.gate import Gate
from forerun.serve.settings import require_certificate
from kit.engines import PATIENCE_S
from kit.servers import ENDLESS, OK, Paced, Running, drafting, expected, posted, running, serving, started, until

HOUR_S = 3600.0
server = serving()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_leaves_the_engine_within_a_round(
    server: Running, paced: Paced, path: str, stream: bool
) -> None:
    """Counted in rounds that the test itself lets through: of the next one the request is no part any more."""
    paced.hold()
    body: dict[str, Any] = {**ENDLESS, "prompt": ["Lily", "Once upon a time"], "stream": stream}  # two requests
    if "chat" in path:
        del body["prompt"]
        body |= {"n": 2, "messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ messages[0].content }}"}
    engine = server.llm.engine
    with server.raw(posted(path, body)):
        until(lambda: len(engine.sequences) == 2)
        paced.passes.release(3)
        until(lambda: paced.num_rounds == 3)
        assert len(engine.sequences) == 2
    until(lambda: server.llm.driver.jobs or not engine.sequences)  # it waits for the round under way, if there is one
    paced.passes.release(1)
    until(lambda: not engine.sequences)
    assert paced.num_rounds <= 4
    until(lambda: not server.server.service.gate.num_open.total())


def test_a_client_that_disconnects_while_waiting_never_enters_the_engine(server: Running, paced: Paced) -> None:
    paced.hold()
    gate = server.server.service.gate
    with ThreadPoolExecutor(gate.num_places) as pool:
        running_ones = [pool.submit(server.post, "/v1/completions", **OK) for _ in range(gate.num_places)]
        until(lambda: gate.held.total() == gate.num_places)
        with server.raw(posted("/v1/completions", OK)):
            until(lambda: gate.num_waiting)
        until(lambda: not gate.num_waiting)
        num_before = len(server.llm.engine.sequences)
        paced.let_go()
        assert all(each.result().json()["choices"][0]["text"] == expected() for each in running_ones)
        assert num_before <= gate.num_places


def test_a_full_queue_says_when_to_come_back(paced: Paced) -> None:
    paced.hold()
    with drafting(max_num_seqs=1) as llm, running(llm, max_queue=2) as server, ThreadPoolExecutor(8) as pool:
        gate = server.server.service.gate
        asked = [pool.submit(server.post, "/v1/completions", **OK) for _ in range(3)]
        until(lambda: gate.num_open.total() == 3)
        refused = server.post("/v1/completions", **OK)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert server.post("/tokenize", prompt="a").status_code == 429
        with pytest.raises(openai.RateLimitError):
            server.client().completions.create(model="stories", prompt="a", stream=True)
        paced.let_go()
        assert [each.result().json()["choices"][0]["text"] for each in asked] == [expected()] * 3
        assert server.post("/v1/completions", **OK).status_code == 200


def test_a_broken_round_fails_its_own_request_and_the_server_goes_on(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = Engine.round

    def broken(engine: Engine, plan: RoundPlan) -> object:
        if any(row.sequence.seed == 666 and row.sequence.num_output > 2 for row in plan.rows):
            raise RuntimeError("on purpose")
        return honest(engine, plan)

    monkeypatch.setattr(Engine, "round", broken)
    with ThreadPoolExecutor(3) as pool:
        good = [pool.submit(server.post, "/v1/completions", **OK) for _ in range(2)]
        bad = pool.submit(server.post, "/v1/completions", **{**OK, "seed": 666}).result()
        assert bad.status_code == 500
        assert bad.json()["error"]["code"] == "round_failed"
        assert "RuntimeError" in bad.json()["error"]["message"]
        assert [each.result().json()["choices"][0]["text"] for each in good] == [expected()] * 2
    stream = server.client().completions.create(model="stories", **{**OK, "seed": 666}, stream=True)
    with pytest.raises(openai.APIError, match="failed in a round of this request"):
        list(stream)
    assert server.post("/v1/completions", **OK).json()["choices"][0]["text"] == expected()
    with server.http() as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 200


def test_an_engine_that_has_stopped_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    with drafting() as llm, running(llm) as server:
        monkeypatch.setattr(Engine, "step", lambda _: 1 / 0)
        assert server.post("/v1/completions", **OK).json()["error"]["code"] == "internal_error"
        with server.http() as http:
            until(lambda: http.get("/health").status_code == 503)
        assert server.post("/v1/completions", **OK).json()["error"]["code"] == "engine_closed"
        monkeypatch.undo()


def test_a_key_is_required_if_keys_are_configured(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("# who may ask\nalice  secret-a\nsecret-b # nobody in particular\n\n")
    known = ApiKeys.read(keys)
    assert known.tenant("Bearer secret-a") == "alice"
    assert known.tenant("bearer secret-b").startswith("key-")
    assert "secret" not in repr(known) + known.tenant("bearer secret-b")
    with drafting() as llm, running(llm, api_keys=keys) as server:
        assert [m.id for m in server.client("secret-a").models.list()] == ["stories"]
        for client in (server.client("secret"), server.client("secret-a "[:-2])):
            with pytest.raises(openai.AuthenticationError):
                client.completions.create(model="stories", prompt="a")
        with server.http() as http:
            for path in ("/v1/models", "/v1/models/stories"):
                assert http.get(path).status_code == 401
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                answer = http.post(path, json=OK, headers={"Authorization": "Basic secret-a"})
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            for path in ("/health", "/ready", "/metrics"):
                assert http.get(path).status_code == 200
            good = http.post("/v1/completions", json=OK, headers={"Authorization": "Bearer secret-b"})
            assert good.json()["choices"][0]["text"] == expected()


@pytest.mark.short("one of many samples")
@pytest.mark.parametrize("together", [False, True], ids=["many requests", "one of many samples"])
def test_a_tenants_first_request_does_not_wait_behind_all_of_anothers(
    paced: Paced, together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which the engine finishes samples: clients are told of it at once, and read when they can."""
    keys, ends, honest = tmp_path / "keys.txt", list[str](), Gate.free
    keys.write_text("busy  k-busy\ncalm  k-calm\n")
    monkeypatch.setattr(Gate, "free", lambda gate, entry: (ends.append(entry.tenant), honest(gate, entry)))
    with drafting(max_num_seqs=2) as llm, running(llm, api_keys=keys) as server, ThreadPoolExecutor(51) as pool:

        def ask(tenant: str, body: dict[str, Any]) -> None:
            headers = {"Authorization": f"Bearer k-{tenant}"}
            with server.http(headers=headers) as http:
                answer = http.post("/v1/completions", json={**body, "stream": True}).text
            assert answer.count('"finish_reason":"length"') == body.get("n", 1)

        paced.hold()
        bodies = [{**OK, "n": 50}] if together else [OK] * 50
        asked = [pool.submit(ask, "busy", body) for body in bodies]
        gate = server.server.service.gate
        until(lambda: gate.num_open["busy"] == len(bodies) and gate.held["busy"])
        asked.append(pool.submit(ask, "calm", OK))
        until(lambda: gate.num_open["calm"])
        paced.let_go()
        for each in asked:
            each.result()
    assert (ends.count("busy"), ends.count("calm")) == (50, 1)
    assert ends.index("calm") < 8


def test_prompts_are_not_logged_unless_requested(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(server: Running) -> None:
        server.post("/v1/completions", **{**OK, "prompt": "zebrafish", "stop": "zebrafish"})
        server.post("/v1/completions", prompt="zebrafish", zebrafish=1)
        server.post("/v1/completions", prompt=["zebrafish", 1])
        server.post("/tokenize", prompt="zebrafish")
        with server.http() as http:
            http.post("/v1/completions", content=b'{"zebrafish', headers={"content-type": "application/json"})
        with monkeypatch.context() as patch:
            patch.setattr("forerun.serve.service.prepare", lambda body, *_: int(body["prompt"]))
            assert server.post("/v1/completions", prompt="zebrafish").json()["error"]["code"] == "internal_error"

    with caplog.at_level(logging.DEBUG), drafting() as llm:
        with running(llm) as server:
            ask(server)
        assert "ValueError" in caplog.text
        assert "zebrafish" not in caplog.text
        with running(llm, log_prompts=True) as server:
            ask(server)
        assert "zebrafish" in caplog.text


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)]
)
def test_a_signal_drains_the_server_before_it_exits(sent: signal.Signals, status: int) -> None:
    """Unfinished answers are completed, new requests on an open connection get 503, and then the process ends."""
    process, url = started()
    try:
        little = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])  # in the kernel
        with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S, transport=little) as http:
            assert http.get("/ready").status_code == 200
            much = {**ENDLESS, "max_tokens": 100, "n": 5, "logprobs": 20, "stream": True}  # it is sent as it is read
            with http.stream("POST", "/v1/completions", json=much) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(sent)
                until(lambda: http.get("/ready").status_code == 503)
                late = http.post("/v1/completions", json=OK)
                assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
                assert late.headers["retry-after"] == "1"
                assert http.get("/health").status_code == 200
                reader = stream.extensions["network_stream"].get_extra_info("socket")
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # with the little one it takes 10 s
                events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        ends = [choice["index"] for each in events for choice in each["choices"] if choice["finish_reason"]]
        assert sorted(ends) == list(range(5))
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == status, errors
        assert out == ""
        server = "forerun.serve.server: "
        logged = [line.partition(server)[2] for line in errors.splitlines() if server in line]
        assert logged == [  # the controller may also log that drafting saves no time
            "Shutting down: requests still open: 1; they have 60 s to end.",
            "All requests are answered; the server exits.",
        ]
    finally:
        process.kill()


FREEZING = (  # two values of 60 lists each, whose comparison is of 2**60 pairs
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}"
    "{% endfor %}{{ n.x == n.y }}"
)


def rendering_s(server: int) -> float:
    """The processor time of the processes that render for a server."""
    with suppress(psutil.NoSuchProcess):
        return sum(each.cpu_times().user for each in psutil.Process(server).children())
    return 0.0


def test_a_template_that_hangs_is_refused_soon_while_others_go_on_and_a_signal_still_counts() -> None:
    process, url = started("--trust-request-templates")
    body = {**ENDLESS, "seed": 5, "temperature": 1, "stream": True}

    def streamed(http: Any) -> Iterator[str]:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    yield "".join(choice["text"] for choice in json.loads(line[6:])["choices"])

    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
            alone = "".join(streamed(http))
            other = streamed(http)
            begun = next(other)
            asked = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": FREEZING}
            begin_s = time.monotonic()
            answer = http.post("/v1/chat/completions", json=asked)
            took_s = time.monotonic() - begin_s
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
            assert "takes more time or memory than a conversation needs" in answer.json()["error"]["message"]
            assert took_s < 20, "two seconds are usual at most"
            assert begun + "".join(other) == alone
            before_s = rendering_s(process.pid)
            with ThreadPoolExecutor(1) as pool:
                late = pool.submit(http.post, "/v1/chat/completions", json=asked)
                until(lambda: rendering_s(process.pid) > before_s + 0.05)  # it hangs
                process.send_signal(signal.SIGTERM)
                assert late.result().status_code in (400, 503)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    finally:
        process.kill()


def certificate_at(folder: Path, *more: str) -> tuple[Path, Path]:
    """A key and a certificate for this machine, signed with the key."""
    folder.mkdir(exist_ok=True)
    key, certificate = folder / "key.pem", folder / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        run = [*made, *names, *(more or ["-nodes"]), "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(run, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return key, certificate


def test_over_tls(tmp_path: Path) -> None:
    key, certificate = certificate_at(tmp_path)
    with drafting() as llm, running(llm, tls_key=key, tls_cert=certificate) as server:
        verify = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=server.url.replace("http", "https"), verify=verify, trust_env=False) as http:
            assert http.post("/v1/completions", json=OK).json()["choices"][0]["text"] == expected()


def test_a_key_and_a_certificate_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (key, certificate), (other, _) = certificate_at(tmp_path / "a"), certificate_at(tmp_path / "b")
    locked, its_certificate = certificate_at(tmp_path / "c", "-passout", "pass:secret")
    require_certificate(key, certificate)
    for files, message in (
        ((tmp_path / "none", certificate), r"tls_key: .*none cannot be read \(No such file"),
        ((key, tmp_path), r"tls_cert: .* cannot be read \(Is a directory"),
        ((other, certificate), "tls_key: .*key.pem is not the private key of .*cert.pem"),
        ((certificate, key), "tls_cert: .*are not a certificate and a key in PEM"),
        ((locked, its_certificate), "tls_key: .*key.pem is encrypted"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            require_certificate(*files)


def test_the_time_limit_of_a_request_includes_waiting(paced: Paced, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine is blocked in a round, both running and waiting requests get the error."""
    timers, honest = list[Callable[[], None]](), asyncio.BaseEventLoop.call_later

    def call_later(loop: asyncio.BaseEventLoop, delay: float, end: Callable[[], None], *rest: Any, **more: Any) -> Any:
        if delay > HOUR_S / 2:
            timers.append(end)
        return honest(loop, delay, end, *rest, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", call_later)
    with drafting(max_num_seqs=1) as llm, running(llm, request_s=HOUR_S) as server, ThreadPoolExecutor(4) as pool:
        stream = server.client().completions.create(model="stories", **OK | {"max_tokens": 400}, stream=True)
        next(stream)
        paced.hold()
        asked = [pool.submit(server.post, "/v1/completions", **OK) for _ in range(3)]
        until(lambda: len(timers) == 4)
        for end in timers:  # the hour is over
            server.server.loop.call_soon_threadsafe(end)
        for each in asked:
            assert each.result().status_code == 504
            assert each.result().json()["error"]["code"] == "took_too_long"
            assert each.result().headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIError, match="took more than 3600 seconds"):
            list(stream)
        paced.let_go()
        assert server.post("/v1/completions", **OK).json()["choices"][0]["text"] == expected()
