"""Decoding speed while other programs keep cores busy: `python -m benchmarks.neighbours MODEL [DRAFT] [--busy 0 1 2]`.

Each busy program is a Python process that runs an endless loop with this process's priority. The numbers of busy
programs alternate, `--repeats` times. Printed are the median tokens per second of a greedy answer, its share of the
undisturbed speed, and the fair share: the threads' share of the cores if every busy program got as much as one thread.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

os.environ.setdefault("GOMP_SPINCOUNT", "4000")  # the forerun command sets it too

import torch
from benchmarks.options import option, options_of

from forerun import LLM, SamplingParams

PROMPT = "Write a long story about a dog and a cat who travel around the world."
SETTLE_S = 1.0


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Context in which `count` processes run endless loops."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tokens_per_s(llm: LLM, params: SamplingParams) -> float:
    """The speed of one answer."""
    started_s = time.perf_counter()
    (output,) = llm.chat([{"role": "user", "content": PROMPT}], params)
    return len(output.outputs[0].token_ids) / (time.perf_counter() - started_s)


@dataclass(slots=True)
class Options:
    """The models and the numbers of busy programs."""

    model: str = option(what="the target")
    draft: str | None = option(what="a drafter (default: none)", nargs="?")
    busy: Sequence[int] = option((0, 1, 2), "alternating numbers of busy programs (default: 0 1 2)", nargs="+")
    tokens: int = option(256, "tokens of an answer (default %(default)s)")
    repeats: int = option(3, "repetitions (default %(default)s)")


def main() -> None:
    args = options_of(Options)
    llm, params = LLM(args.model, args.draft), SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    tokens_per_s(llm, params)
    speeds: dict[int, list[float]] = {count: [] for count in args.busy}
    for _ in range(args.repeats):
        for count, times in speeds.items():
            with busy(count):
                times.append(tokens_per_s(llm, params))
    num_threads, num_cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    alone = statistics.median(speeds[args.busy[0]])
    for count, times in speeds.items():
        fair = min(1.0, num_cores / (num_threads + count))
        median = statistics.median(times)
        share = f"{median / alone:.2f} of the undisturbed speed (fair share: {fair:.2f})"
        print(f"{count} busy programs: {median:6.1f} tokens/s, {share}")


if __name__ == "__main__":
    main()
