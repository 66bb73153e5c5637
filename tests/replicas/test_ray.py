"""Replicas by Ray: every answer is one engine's, while replicas are killed; metrics, sessions, and a page for all.

Ray is not needed to work on anything else, so where it is not installed these tests are skipped.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from forerun.llm import LLM
from kit.checkpoints import ROOT, SMALL, TARGET
from kit.servers import command, events_of, httpx, launched, library_answer, running, started, until
from replicas.conversations import known_share
from replicas.test_routers import free_port

pytest.importorskip("ray", reason="Ray is not installed: pip install 'forerun[ray]'")
pytestmark = pytest.mark.full
NUM_CLIENTS = 32
PATIENCE_S = 240.0
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "max_tokens": 48, "seed": seed, "temperature": temperature, "ignore_eos": True}
    for seed, prompt in enumerate(("Once upon a time", "The dog ran", "Lily and Ben", "One day, a big"))
    for temperature in (0.0, 1.0)
]
RETURNED = {"return_token_ids": True}


def replica_processes(server: subprocess.Popen[str]) -> list[Any]:
    """The processes of the replicas."""
    children = psutil.Process(server.pid).children(recursive=True)
    return [each for each in children if "ServeReplica" in "".join(each.cmdline()[:1])]


def tokens_of(url: str, body: dict[str, Any], stream: bool, session: str = "") -> list[int]:
    """The token ids of an answer, whole or as a stream, which may have no error in it."""
    headers = {"x-session-id": session} if session else {}
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False, headers=headers) as http:
        answer = http.post("/v1/completions", json=body | RETURNED | {"stream": stream})
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["choices"][0]["token_ids"]  # type: ignore[no-any-return]
        events = events_of(answer.text)
        assert not [event for event in events if "error" in event], answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command with so many replicas, of 8 places each."""
    process, url = started("--replicas", str(request.param), "--max-num-seqs", "8", "--max-queue", "256")
    assert process.stderr is not None
    threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
    try:
        yield url, process
    finally:
        with process:  # which closes its pipe
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def test_every_answer_is_one_engines_while_replicas_are_killed(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = server
    wanted = [list(library_answer(body).outputs[0].token_ids) for body in BODIES]
    num_killed, end_s = 0, time.monotonic() + 40
    over, chance = threading.Event(), random.Random(1)

    def ask(client: int) -> int:
        num_asked, turn = 0, random.Random(client)
        while time.monotonic() < end_s:
            number = turn.randrange(len(BODIES))
            assert tokens_of(url, BODIES[number], stream=turn.random() < 0.5) == wanted[number]
            num_asked += 1
        return num_asked

    def kill() -> None:
        nonlocal num_killed
        while not over.wait(chance.uniform(1.0, 4.0)):
            there = replica_processes(process)
            if there:
                chance.choice(there).kill()
                num_killed += 1

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            num_answered = sum(pool.map(ask, range(NUM_CLIENTS)))
    finally:
        over.set()
        killer.join()
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    taken_over = float(metrics.split("\nforerun:requests_taken_over_total ")[1].split()[0])
    print(f"{num_answered} answers, {num_killed} replicas killed, {taken_over:.0f} requests taken over")
    assert num_killed >= 3
    assert taken_over > 0
    assert num_answered >= NUM_CLIENTS


def test_conversations_find_what_replicas_know_of_them(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, _ = server
    shares = []
    with LLM(str(TARGET), dtype="float32", max_num_seqs=8) as llm, running(llm) as plain_server:
        for where in (plain_server.url, url):
            with httpx.Client(base_url=where, timeout=PATIENCE_S, trust_env=False) as http:
                shares.append(known_share(lambda body: http.post("/v1/completions", json=body).json()))
    assert shares[0] > 0.3
    assert shares[1] >= 0.9 * shares[0]


def test_a_file_is_answered_as_by_one_engine_while_replicas_are_killed(tmp_path: Path) -> None:
    prompts, shared, alone = (tmp_path / name for name in ("prompts.jsonl", "shared.jsonl", "alone.jsonl"))
    prompts.write_text("".join(json.dumps({"prompt": f"One day {number}"}) + "\n" for number in range(120)))

    def words(output: Path, *more: str) -> list[str]:
        line = ["generate", "--model", str(TARGET), "--input", str(prompts), "--output", str(output), "--ignore-eos"]
        return [sys.executable, "-m", "forerun", *line, "--seed", "3", "-n", "200", "--max-num-seqs", "4", *more]

    def num_answered() -> int:
        return shared.read_bytes().count(b"\n") if shared.exists() else 0

    process = launched(words(shared, "--replicas", "2", "--draft", f"model:{SMALL}"))
    for goal in (20, 50):
        until(lambda goal=goal: num_answered() >= goal or process.poll() is not None, PATIENCE_S, 0.05)  # type: ignore[misc]
        replica_processes(process)[0].kill()
    until(lambda: num_answered() >= 80 or process.poll() is not None, PATIENCE_S, 0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert 80 <= num_answered() < 120
    for output, more in ((shared, ("--replicas", "2")), (alone, ())):
        assert launched(words(output, *more)).wait(PATIENCE_S) == 0
    assert shared.read_bytes() == alone.read_bytes()


@pytest.fixture(scope="module")
def application() -> Iterator[str]:
    """The application of the RayService, with the test's model, behind Ray's proxy."""
    service = yaml.safe_load((ROOT / "contrib" / "rayservice.yaml").read_text(encoding="utf-8"))
    (described,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    described["args"] |= {"model": str(TARGET), "draft": f"model:{SMALL}", "dtype": "float32", "speculation": 3}
    port = free_port()
    code = (
        "import json, signal, sys, threading, ray\n"
        "from importlib import import_module\n"
        "from ray import serve\n"
        "app = json.loads(sys.argv[1])\n"
        "ray.init('local', include_dashboard=False)\n"
        "serve.start(http_options={'port': int(sys.argv[2])})\n"
        "module, name = app['import_path'].split(':')\n"
        "made = getattr(import_module(module), name)(app['args'])\n"
        "serve.run(made, name=app['name'], route_prefix=app['route_prefix'])\n"
        "print('it runs', flush=True)\n"
        "threading.Event().wait()\n"
    )
    patient = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")} | patient
    words = [sys.executable, "-c", code, json.dumps(described), str(port)]
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert any("it runs" in line for line in process.stdout)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def test_the_application_of_the_rayservice_answers(application: str) -> None:
    body = BODIES[1]
    wanted = list(library_answer(body).outputs[0].token_ids)
    for stream in (False, True):
        assert tokens_of(application, body, stream) == wanted
    with httpx.Client(base_url=application, timeout=PATIENCE_S, trust_env=False) as http:
        assert http.get("/ready").status_code == 200
        assert "forerun:num_replicas 1.0" in http.get("/metrics").text
        refused = http.post("/v1/completions", json=body | {"max_tokens": -1})
        assert refused.json()["error"]["param"] == "max_tokens"


def test_a_model_that_is_not_there_is_told_by_the_command() -> None:
    words = [word if word != str(TARGET) else "./no-such-model" for word in command("--replicas", "1")]
    process = launched(words, subprocess.PIPE)
    _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "no-such-model" in told.splitlines()[-1]


def test_an_address_without_a_cluster_is_refused_at_once() -> None:
    process = launched(command("--replicas", "1", "--ray", f"127.0.0.1:{free_port()}"), subprocess.PIPE)
    _, output = process.communicate(timeout=60.0)
    assert process.returncode == 2
    assert "no Ray cluster is there" in output.splitlines()[-1]
