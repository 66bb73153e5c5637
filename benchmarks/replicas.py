"""The latency that a Ray replica adds to a request: python -m benchmarks.replicas (needs forerun[serve,ray] and httpx).

Requests go alternately to a plain server and to one with a single replica, one at a time, for complete answers and
streams of the bundled model. Both servers have one equal engine, so the difference is the time in Ray.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
from benchmarks.markdown import show, show_header
from benchmarks.processes import serving

NUM_TURNS = 40
PROMPT = "class Stack:\n    def push(self, "
LENGTHS = (1, 16, 64)  # tokens of an answer
ANSWER_S = 120.0


@contextmanager
def client(*options: str) -> Iterator[httpx.Client]:
    """A client of a server with these options."""
    with (
        serving("--model", "stdlib", "--threads", "1", *options) as url,
        httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as http,
    ):
        yield http


def timed_ms(http: httpx.Client, num_tokens: int, stream: bool) -> float:
    """Milliseconds of one request."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    began_s = time.perf_counter()
    http.post("/v1/completions", json=body | {"stream": stream}).raise_for_status()
    return (time.perf_counter() - began_s) * 1000


def main() -> None:
    """Print a row for each length and form."""
    with ExitStack() as stack:
        plain, replica = (stack.enter_context(client(*options)) for options in ((), ("--replicas", "1")))
        show_header("tokens", "form", "plain, ms", "replica, ms", "difference, ms (quartiles)")
        for stream in (False, True):
            for num_tokens in LENGTHS:
                pairs = [[timed_ms(http, num_tokens, stream) for http in (plain, replica)] for _ in range(NUM_TURNS)]
                one, other = (statistics.median(times) for times in zip(*pairs[5:], strict=True))
                low, middle, high = statistics.quantiles([b - a for a, b in pairs[5:]], n=4)
                form = "stream" if stream else "complete"
                show(num_tokens, form, f"{one:.1f}", f"{other:.1f}", f"{middle:.1f} ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
