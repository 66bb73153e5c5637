"""Clients that ask servers with replicas, and hold every answer against one engine's while something is broken."""

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil

from kit.servers import events_of, library_answer

NUM_CLIENTS = 32
PATIENCE_S = 240.0
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "max_tokens": 48, "seed": seed, "temperature": temperature, "ignore_eos": True}
    for seed, prompt in enumerate(("Once upon a time", "The dog ran", "Lily and Ben", "One day, a big"))
    for temperature in (0.0, 1.0)
]
RETURNED = {"return_token_ids": True}


def tokens_of(url: str, body: dict[str, Any], stream: bool) -> list[int]:
    """The token ids of an answer, whole or as a stream, which may have no error in it."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        answer = http.post("/v1/completions", json=body | RETURNED | {"stream": stream})
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["choices"][0]["token_ids"]
        events = events_of(answer.text)
        assert not [event for event in events if "error" in event], answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def ask_while(url: str, seconds: float, harm: Callable[[], None]) -> int:
    """How many answers as many clients got in so many seconds; each is one engine's, and `harm` goes on meanwhile.

    It is called every one to four seconds, but no longer once the time is over: what it breaks may be slow to return.
    """
    wanted = [list(library_answer(body).outputs[0].token_ids) for body in BODIES]
    end_s = time.monotonic() + seconds
    over, chance = threading.Event(), random.Random(1)

    def ask(client: int) -> int:
        num_asked, turn = 0, random.Random(client)
        while time.monotonic() < end_s:
            number = turn.randrange(len(BODIES))
            assert tokens_of(url, BODIES[number], stream=turn.random() < 0.5) == wanted[number]
            num_asked += 1
        return num_asked

    def go_on() -> None:
        while not over.wait(chance.uniform(1.0, 4.0)) and time.monotonic() < end_s:
            harm()

    harming = threading.Thread(target=go_on)
    harming.start()
    try:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            return sum(pool.map(ask, range(NUM_CLIENTS)))
    finally:
        over.set()
        harming.join()


def replicas_among(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of the processes that are replicas."""
    found = []
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            if "ServeReplica" in "".join(each.cmdline()[:1]):
                found.append(each)
    return found


def counted(url: str, name: str) -> int:
    """A number of the server's own metrics."""
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    return int(float(metrics.split(f"\nforerun:{name} ")[1].split()[0]))


def num_taken_over(url: str) -> int:
    """How many requests went to another replica."""
    return counted(url, "requests_taken_over_total")


def num_running(url: str) -> int:
    """How many replicas take requests."""
    return counted(url, "num_replicas")
