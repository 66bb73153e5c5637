"""Replicas in a cluster of two machines, by the commands of docs/scaling.md: answers are one engine's, whatever ends.

The machines are network namespaces, each with a node of Ray's that has a processor. Skipped without Ray, root and ip.
"""

import random
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count

import pytest

from kit.checkpoints import ROOT, SMALL, TARGET
from kit.machines import FIRST, INSIDE, Machine, needs_namespaces, two_machines
from kit.servers import library_answer, until
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

pytest.importorskip("ray", reason="Ray is not installed: pip install 'forerun[ray]'")
pytestmark = [pytest.mark.full, needs_namespaces]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PORT = 8000


def env_of(machine: Machine) -> dict[str, str]:
    """Ray's token, which all machines have, and where a machine's Ray has its files."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(machine.folder.parent / "token")}
    return token | {"RAY_TMPDIR": str(machine.folder), "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def node(machine: Machine, line: str, *options: str) -> Iterator[None]:
    """A machine's node of Ray's, by a line of the page's, once it is there."""
    words = [*RAY, *shlex.split(line.replace("HEAD", FIRST))[1:], "--num-cpus", "1", "--block", *options]
    process = machine.start([*words, "--include-log-monitor", "false"], subprocess.DEVNULL, **env_of(machine))
    try:
        until(lambda: has_node(machine) or process.poll() is not None, PATIENCE_S, 0.2)
        assert process.poll() is None, f"{line} ended"
        yield
    finally:
        machine.kill_all()  # behind a cable that was pulled Ray would look for the other machine for a minute
        process.wait(PATIENCE_S)


def has_node(machine: Machine) -> bool:
    return any(each.name() == "raylet" for each in machine.processes())


@dataclass(frozen=True)
class Cluster:
    """A server on the first machine, with a replica on each. The last of `servers` is the one that runs."""

    head: Machine
    worker: Machine
    nodes: ExitStack
    servers: list[subprocess.Popen[str]] = field(default_factory=list)
    url: str = f"http://{INSIDE}:{PORT}"

    def join(self) -> None:
        """Let the worker's machine join, if it is not there."""
        if not has_node(self.worker):
            (line,) = re.findall(r"`(ray start --address .*?)`", PAGE)
            self.nodes.enter_context(node(self.worker, line))

    def replicas(self) -> list[int]:
        """How many there are on each machine."""
        return [len(replicas_among(each.processes())) for each in (self.head, self.worker)]

    def serve(self) -> None:
        """Start a server by the page's command, with other values; it answers then."""
        (command,) = re.findall(r"^forerun (serve .*--ray .*)$", PAGE, re.MULTILINE)
        words = [sys.executable, "-m", "forerun", *shlex.split(command)]
        for option, value in (
            ("--model", str(TARGET)), ("--replicas", "2"), ("--threads", "1"), ("--allowed-hosts", INSIDE),
        ):  # fmt: skip
            words[words.index(option) + 1] = value
        words += ["--draft", f"model:{SMALL}", "--depth", "3", "--dtype", "float32", "--port", str(PORT)]
        words += ["--max-num-seqs", "8", "--max-queue", "256"]
        process = self.head.start(words, subprocess.PIPE, **env_of(self.head))
        assert process.stderr is not None
        self.servers.append(process)
        patience = threading.Timer(PATIENCE_S, process.kill)
        patience.start()
        lines = list[str]()
        while "/v1" not in (line := process.stderr.readline()):
            lines.append(line)
            assert line, f"it ended: {''.join(lines[-20:])}"
        patience.cancel()
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it

    def end_server(self, number: signal.Signals) -> int:
        """End the server, with its status."""
        with self.servers[-1] as process:  # which closes its pipe
            process.send_signal(number)
            return process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Both machines, with all that the page starts on them."""
    (line,) = re.findall(r"`(ray start --head)`", PAGE)
    with ExitStack() as stack:
        head, worker = stack.enter_context(two_machines())
        (head.folder.parent / "token").write_text(secrets.token_hex(32))
        stack.enter_context(node(head, line, "--include-dashboard", "false"))
        made = Cluster(head, worker, stack.enter_context(ExitStack()))
        made.join()
        made.serve()
        yield made
        assert made.end_server(signal.SIGTERM) == 0


def test_every_answer_is_one_engines_while_replicas_of_both_machines_are_killed(cluster: Cluster) -> None:
    chance, killed = random.Random(2), list[str]()
    assert cluster.replicas() == [1, 1]

    def kill() -> None:
        machine = chance.choice([cluster.head, cluster.worker])
        for each in replicas_among(machine.processes()):
            each.kill()
            killed.append(machine.name)

    num_answered, taken_over = ask_while(cluster.url, 40.0, kill), num_taken_over(cluster.url)
    print(f"{num_answered} answers, {len(killed)} replicas killed, {taken_over} requests taken over")
    assert {*killed} == {cluster.head.name, cluster.worker.name}
    assert taken_over > 0
    assert num_answered >= NUM_CLIENTS


def test_a_server_that_was_killed_is_started_again_in_the_place_of_its_replicas(cluster: Cluster) -> None:
    """For which there would be no processors otherwise."""
    assert cluster.end_server(signal.SIGKILL) == -signal.SIGKILL
    assert cluster.replicas() != [0, 0]
    cluster.serve()
    assert tokens_of(cluster.url, BODIES[1], True) == list(library_answer(BODIES[1]).outputs[0].token_ids)
    assert cluster.replicas() == [1, 1]


@pytest.mark.parametrize("lose", [Machine.kill_all, Machine.pull_cable])
def test_a_machine_that_is_lost_costs_no_answer(cluster: Cluster, lose: Callable[[Machine], None]) -> None:
    """A machine whose cable is pulled sends no message that it is gone."""
    cluster.join()
    until(lambda: cluster.replicas() == [1, 1] and num_running(cluster.url) == 2, PATIENCE_S, 0.5)
    before, times = num_taken_over(cluster.url), count()

    def harm() -> None:
        if next(times):  # at first not all clients have asked yet
            lose(cluster.worker)

    num_answered = ask_while(cluster.url, 15.0, harm)
    taken_over = num_taken_over(cluster.url) - before
    print(f"{num_answered} answers, {taken_over} requests taken over")
    assert num_running(cluster.url) == 1
    assert taken_over > 0
    assert num_answered >= NUM_CLIENTS
