"""Measures the time of the host's code in the rounds of a GPU, on a machine without one.

    python -m benchmarks.gpu.host [ROUNDS]

The bundled target and its drafters run in passes of fixed shape on a CPU. A function that a GPU captures as a graph is
computed once for each shape, outside the measured time, and its numbers are returned in later rounds. So answers mean
nothing, and every round of a shape accepts as many draft tokens as the first one. Printed are the minimum of a round's
milliseconds, since other programs can only lengthen a round, and the 10th percentile. Copies to a GPU and launches
count with the time that torch needs for them on a CPU, which may be less than on a GPU.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from benchmarks.gpu.family import BATCHES, PROMPTS

from forerun import LLM, SamplingParams
from forerun.device import Placement
from forerun.models.backends.gpu.capture import Graphs
from forerun.request import requests_of

DRAFTS, DEPTH = (None, "model:stdlib-draft", "eagle:stdlib-eagle"), 4
REPEATS, WARM_UP, LENGTH = 3, 4, 512


class Replays:
    """Replaces `Graphs.run`: it computes each key once, and sums the seconds that its calls take."""

    def __init__(self) -> None:
        self.results: dict[Hashable, Any] = {}
        self.taken_s = 0.0

    def run(self, graphs: Graphs, key: Hashable, body: Callable[[], Any]) -> Any:
        """The result of `body` that is saved for this key; computed if there is none, or if the key is None."""
        started_s = time.perf_counter()
        if key is None or (id(graphs), key) not in self.results:
            self.results[id(graphs), key] = body()
        self.taken_s += time.perf_counter() - started_s
        return self.results[id(graphs), key]


def rounds_of(llm: LLM, batch: int, num_rounds: int, replays: Replays) -> list[float]:
    """Milliseconds of each round, after a few rounds that compute the results to replay."""
    params = [SamplingParams(seed=seed, max_tokens=LENGTH - 32, ignore_eos=True) for seed in range(batch)]
    requests = requests_of([PROMPTS[i % len(PROMPTS)] for i in range(batch)], params)
    sequences = [sequence for request in requests for sequence in llm.requests.sequences(request)]
    for sequence in sequences:
        llm.engine.submit(sequence)
    while any(sequence.num_output < WARM_UP for sequence in sequences):
        llm.engine.step()
    round_ms = []
    for _ in range(num_rounds):
        started_s, before_s = time.perf_counter(), replays.taken_s
        llm.engine.step()
        round_ms.append((time.perf_counter() - started_s - (replays.taken_s - before_s)) * 1e3)
    for sequence in sequences:
        llm.engine.cancel(sequence.request_id)
    return round_ms


def main(num_rounds: int) -> None:
    """Print a row for each drafter and batch size."""
    torch.set_num_threads(1)
    replays = Replays()
    setattr(Graphs, "run", lambda graphs, key, body: replays.run(graphs, key, body))  # noqa: B010 (mypy knows its type)
    print("| drafter | batch | minimum, ms | 10th percentile, ms |\n|---|---|---|---|")
    for draft, batch in itertools.product(DRAFTS, BATCHES):
        llm = LLM("stdlib", draft, device=Placement(torch.device("cpu"), fixed=True), dtype="float32",
                  speculation=DEPTH if draft else False, max_model_len=LENGTH, max_num_seqs=max(BATCHES))  # fmt: skip
        runners: list[Any] = [llm.engine.runner, getattr(llm.drafter, "runner", llm.engine.runner)]
        for runner in runners:
            runner.graphs.enabled = True  # so that passes have the shapes that they have on a GPU
        round_ms = sorted(ms for _ in range(REPEATS) for ms in rounds_of(llm, batch, num_rounds, replays))
        print(f"| {draft or 'plain'} | {batch} | {round_ms[0]:.3f} | {round_ms[len(round_ms) // 10]:.3f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
