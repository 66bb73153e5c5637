"""Sixty-four clients at once for as long as FORERUN_SOAK_S says: every answer is its solo run, and memory stays.

A tenth of the requests leave in the midst of their stream, and a tenth cannot be served. Four of the clients are
processes of their own that are killed at any moment, and started again.
`FORERUN_SOAK_S=300 scripts/test -m full -s tests/serve/test_serve_soak.py` does so for five minutes and prints figures.
"""

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kit.engines import PATIENCE_S
from kit.servers import library_answer, started, until

SECONDS = float(os.environ.get("FORERUN_SOAK_S", "20"))
NUM_CLIENTS = 64
NUM_KILLED = 4  # of the clients: processes that are killed
LONGEST_LIFE_S = 2.0
CLIENT = """
import itertools, json, sys, urllib.request
for number in itertools.count():
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": bool(number % 2)}
    ask = urllib.request.Request(sys.argv[1] + "/v1/completions", json.dumps(body).encode())
    ask.add_header("Content-Type", "application/json")
    for _ in urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask):
        print(number, flush=True)
"""
MOST_GROWTH = 1.05  # of the memory, from one fifth of the time to the end
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "seed": seed, "max_tokens": length, "temperature": heat}
    for seed, (prompt, length, heat) in enumerate(
        [
            ("Once upon a time", 40, 0.0),
            ("Lily had a", 60, 1.0),
            ("Tom and his dog " * 20, 20, 0.8),
            ([410] * 400, 16, 1.2),
            ("One day", 100, 0.6),
        ]
    )
]
WRONG: list[dict[str, Any]] = [
    {"prompt": "a", "n": 0},
    {"prompt": []},
    {"prompt": "a", "temprature": 1},
    {"prompt": "a", "max_tokens": 10**9},
    {"prompt": [1] * 600},
]


class Soak:
    """The clients, what they met, and what the server's memory was."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.expected = [library_answer(body).outputs[0].token_ids for body in BODIES]
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[float] = []
        self.lock = threading.Lock()
        self.end_s = time.monotonic() + SECONDS

    def met(self, what: str, problem: str = "") -> None:
        with self.lock:
            self.counts[what] += 1
            self.wrong += [problem] if problem else []

    def client(self, number: int) -> None:
        """One client, until the time is over."""
        dice = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S * 4, trust_env=False) as http:
            while time.monotonic() < self.end_s:
                draw = dice.random()
                if draw < 0.1:
                    answer = http.post("/v1/completions", json=dice.choice(WRONG))
                    self.met("refused", "" if answer.status_code == 400 else f"{answer.status_code}: {answer.text}")
                elif draw < 0.2:
                    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
                    with http.stream("POST", "/v1/completions", json=body) as stream:
                        for _, _ in zip(stream.iter_lines(), range(dice.randrange(1, 9)), strict=False):
                            pass
                    self.met("left")
                else:
                    self.ask(http, dice.randrange(len(BODIES)))

    def killed(self, number: int) -> None:
        """One client after another in a process of its own, each killed at a random moment."""
        dice = random.Random(number)
        while time.monotonic() < self.end_s:
            command = [sys.executable, "-S", "-c", CLIENT, self.url]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                first_line = process.stdout.readline()  # so that it is killed during its requests
                time.sleep(dice.random() * LONGEST_LIFE_S)
                problem = "" if first_line and process.poll() is None else process.communicate()[1]
                process.kill()
            self.met("killed", problem)

    def ask(self, http: Any, number: int) -> None:
        """One request that is to be answered as alone."""
        answer = http.post("/v1/completions", json=BODIES[number] | {"return_token_ids": True})
        if answer.status_code != 200:
            return self.met("failed", f"{answer.status_code}: {answer.text}")
        tokens = tuple(answer.json()["choices"][0]["token_ids"])
        return self.met("answered", "" if tokens == self.expected[number] else f"body {number} was answered otherwise")

    def watch(self) -> None:
        """The server's memory, ten times and more."""
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S * 4, trust_env=False) as http:
            while time.monotonic() < self.end_s:
                lines = http.get("/metrics").text.splitlines()
                self.memory += [float(each.split()[1]) for each in lines if each.startswith("process_resident_memory")]
                time.sleep(SECONDS / 40)


def running_of(url: str) -> float:
    """Samples that the server generates at the moment."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return next(float(each.split()[1]) for each in text.splitlines() if each.startswith("forerun:num_requests_running"))


@pytest.mark.full
def test_every_answer_is_its_solo_run_and_memory_stays() -> None:
    process, url = started("--max-num-seqs", "8")
    try:
        soak = Soak(url)
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
            clients = [soak.killed] * NUM_KILLED + [soak.client] * (NUM_CLIENTS - NUM_KILLED)
            begun = [pool.submit(client, number) for number, client in enumerate(clients)]
            for each in [pool.submit(soak.watch), *begun]:
                each.result()
        early, late = soak.memory[len(soak.memory) // 5], soak.memory[-1]
        print(f"\n{dict(soak.counts)}, memory {early / 1e6:.0f} MB after a fifth and {late / 1e6:.0f} MB at the end")
        assert not soak.wrong, soak.wrong[:5]
        assert min(soak.counts[kind] for kind in ("answered", "left", "refused", "killed")) > 0
        assert late <= MOST_GROWTH * early
        until(lambda: running_of(url) == 0)  # no request of a killed client is left
        with httpx.Client(base_url=url, trust_env=False) as http:
            assert http.get("/health").status_code == 200
    finally:
        process.kill()
        process.communicate()
