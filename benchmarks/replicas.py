"""What a replica by Ray adds to a request: python benchmarks/replicas.py (needs forerun[serve,ray] and httpx).

A plain server and one with a single replica are asked by turns, one request at a time, for the bundled model's answers,
whole and as streams. Both have the same one engine, so the difference is the way through Ray.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_TURNS = 40
PROMPT = "class Stack:\n    def push(self, "
LENGTHS = (1, 16, 64)  # tokens of an answer
START_S = 120.0


@contextmanager
def server(*options: str) -> Iterator[httpx.Client]:
    """A client of a server with these options."""
    words = [sys.executable, "-m", "forerun", "serve", "--model", "stdlib", "--threads", "1", "--port", "0", *options]
    process = subprocess.Popen(words, env=os.environ | {"NO_COLOR": "1"}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if "/v1" in line)
    threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
    try:
        url = line.split(" at ")[1].split("/v1")[0]
        with httpx.Client(base_url=url, timeout=START_S, trust_env=False) as http:
            yield http
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_S)


def timed_ms(http: httpx.Client, num_tokens: int, stream: bool) -> float:
    """Milliseconds of one request."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    began_s = time.perf_counter()
    http.post("/v1/completions", json=body | {"stream": stream}).raise_for_status()
    return (time.perf_counter() - began_s) * 1000


def main() -> None:
    """Print a row for each length and form."""
    with ExitStack() as stack:
        plain, replica = (stack.enter_context(server(*options)) for options in ((), ("--replicas", "1")))
        print("| tokens | form | plain, ms | replica, ms | difference, ms (quartiles) |\n|---|---|---|---|---|")
        for stream in (False, True):
            for num_tokens in LENGTHS:
                pairs = [[timed_ms(http, num_tokens, stream) for http in (plain, replica)] for _ in range(NUM_TURNS)]
                one, other = (statistics.median(times) for times in zip(*pairs[5:], strict=True))
                low, middle, high = statistics.quantiles([b - a for a, b in pairs[5:]], n=4)
                form = "stream" if stream else "whole"
                print(f"| {num_tokens} | {form} | {one:.1f} | {other:.1f} | {middle:.1f} ({low:.1f} to {high:.1f}) |")


if __name__ == "__main__":
    main()
