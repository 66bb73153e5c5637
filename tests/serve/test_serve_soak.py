"""Sixty-four clients at once for as long as FORERUN_SOAK_S says: every answer is its solo run, and memory stays.

A tenth of the requests leave in the midst of their stream, and a tenth cannot be served.
`FORERUN_SOAK_S=300 scripts/test -m full -s tests/serve/test_serve_soak.py` does so for five minutes and prints figures.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forerun.sampling.params import SamplingParams
from serve.servers import PATIENCE_S, httpx, plain
from serve.test_serve_load import started

SECONDS = float(os.environ.get("FORERUN_SOAK_S", "20"))
NUM_CLIENTS = 64
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


def solo(body: dict[str, Any]) -> tuple[int, ...]:
    """The library's answer to a body, alone and without a drafter."""
    params = SamplingParams(**{name: value for name, value in body.items() if name != "prompt"})
    prompt = body["prompt"] if isinstance(body["prompt"], str) else [body["prompt"]]
    return plain().generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


class Soak:
    """The clients, what they met, and what the server's memory was."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.expected = [solo(body) for body in BODIES]
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


@pytest.mark.full
def test_every_answer_is_its_solo_run_and_memory_stays() -> None:
    process, url = started("--max-num-seqs", "8")
    try:
        soak = Soak(url)
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
            for each in [pool.submit(soak.watch), *(pool.submit(soak.client, n) for n in range(NUM_CLIENTS))]:
                each.result()
        early, late = soak.memory[len(soak.memory) // 5], soak.memory[-1]
        print(f"\n{dict(soak.counts)}, memory {early / 1e6:.0f} MB after a fifth and {late / 1e6:.0f} MB at the end")
        assert not soak.wrong, soak.wrong[:5]
        assert min(soak.counts[kind] for kind in ("answered", "left", "refused")) > 0
        assert late <= MOST_GROWTH * early
        with httpx.Client(base_url=url, trust_env=False) as http:
            assert http.get("/health").status_code == 200
    finally:
        process.kill()
        process.communicate()
