"""Replicas by Ray: every answer is one engine's, while replicas are killed; metrics, sessions, and a page for all.

Ray is not needed to work on anything else, so where it is not installed these tests are skipped.
"""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from kit.checkpoints import ROOT, SMALL, TARGET
from kit.servers import command, launched, library_answer, running, started, until
from replicas.conversations import known_share
from replicas.load import (
    BODIES,
    NUM_CLIENTS,
    PATIENCE_S,
    ask_while,
    num_running,
    num_taken_over,
    replicas_among,
    tokens_of,
)
from replicas.test_routers import free_port

pytest.importorskip("ray", reason="Ray is not installed: pip install 'forerun[ray]'")
pytestmark = pytest.mark.full


def replica_processes(server: subprocess.Popen[str]) -> list[Any]:
    """The processes of the replicas."""
    return replicas_among(psutil.Process(server.pid).children(recursive=True))


@contextmanager
def serving(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command in a process of its own, and where it listens."""
    process, url = started(*options)
    assert process.stderr is not None
    threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
    try:
        yield url, process
    finally:
        with process:  # which closes its pipe
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command with so many replicas, of 8 places each."""
    with serving("--replicas", str(request.param), "--max-num-seqs", "8", "--max-queue", "256") as made:
        yield made


def test_every_answer_is_one_engines_while_replicas_are_killed(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = server
    chance, num_killed = random.Random(2), 0

    def kill() -> None:
        nonlocal num_killed
        there = replica_processes(process)
        if there:
            chance.choice(there).kill()
            num_killed += 1

    num_answered, taken_over = ask_while(url, 40.0, kill), num_taken_over(url)
    print(f"{num_answered} answers, {num_killed} replicas killed, {taken_over} requests taken over")
    assert num_killed >= 3
    assert taken_over > 0
    assert num_answered >= NUM_CLIENTS


def test_conversations_go_to_the_replica_that_has_their_cache(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, _ = server
    shares = []
    with LLM(str(TARGET), dtype="float32", max_num_seqs=8) as llm, running(llm) as plain_server:
        for where in (plain_server.url, url):
            with httpx.Client(base_url=where, timeout=PATIENCE_S, trust_env=False) as http:
                shares.append(known_share(lambda body: http.post("/v1/completions", json=body).json()))
    print(f"known of prompts: {shares[1]:.3f} by replicas, {shares[0]:.3f} by one engine")
    assert shares[0] > 0.3
    assert shares[1] >= 0.9 * shares[0]


def test_load_adds_a_replica() -> None:
    with serving("--replicas", "1:2", "--max-num-seqs", "4", "--max-queue", "256") as (url, _):
        seen = [num_running(url)]
        num_answered = ask_while(url, 100.0, lambda: seen.append(num_running(url)))
        print(f"{num_answered} answers, replicas: {seen}")
    assert {*seen} == {1, 2}


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
        until(lambda goal=goal: num_answered() >= goal or process.poll() is not None, PATIENCE_S, 0.05)
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


def page_command(name: str) -> list[str]:
    """The command of docs/scaling.md that has this name and two replicas."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^forerun ({name} .*--replicas 2\b.*)$", page, re.MULTILINE)
    return [sys.executable, "-m", "forerun", *shlex.split(line)]


def test_the_pages_server_answers_and_ends_soon_when_rays_processes_are_ended_too() -> None:
    """As systemd does, unless configured otherwise; Ray's own way out would take a minute, and end with an error."""
    process = launched([*page_command("serve"), "--port", "0"], subprocess.PIPE)
    assert process.stderr is not None
    url = next(line for line in process.stderr if "/v1" in line).split(" at ")[1].split("/v1")[0]
    body = {"prompt": "class Stack:", "max_tokens": 24, "temperature": 0.8, "seed": 4}
    with LLM("stdlib") as llm:
        wanted = llm.generate("class Stack:", SamplingParams(max_tokens=24, temperature=0.8, seed=4))[0]
    assert tokens_of(url, body, True) == list(wanted.outputs[0].token_ids)
    there = psutil.Process(process.pid)
    for each in (there, *there.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=40.0)
    assert process.returncode == 0, errors


def test_the_pages_file_is_answered_as_by_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"def f{i}("}) + "\n" for i in range(6)))
    words, output = [*page_command("generate"), "--seed", "1", "-n", "16"], Path("answers.jsonl")
    assert launched(words).wait(PATIENCE_S) == 0
    shared, at = output.read_bytes(), words.index("--replicas")
    output.unlink()
    assert launched(words[:at] + words[at + 2 :]).wait(PATIENCE_S) == 0
    assert shared == output.read_bytes()


def test_a_missing_model_is_reported_by_the_command() -> None:
    words = [word if word != str(TARGET) else "./no-such-model" for word in command("--replicas", "1")]
    process = launched(words, subprocess.PIPE)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "no-such-model" in errors.splitlines()[-1]


def test_an_address_without_a_cluster_is_refused_at_once() -> None:
    process = launched(command("--replicas", "1", "--ray", f"127.0.0.1:{free_port()}"), subprocess.PIPE)
    _, output = process.communicate(timeout=60.0)
    assert process.returncode == 2
    assert "nothing listens there" in output.splitlines()[-1]
