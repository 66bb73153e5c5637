"""What the host's own code of a GPU's rounds takes, measured without one.

    python -m benchmarks.gpu.host [ROUNDS]

The bundled target and its drafters run in passes of fixed shape on a CPU. What a GPU captures as a graph is computed
once for each shape and gives the same numbers from then on, outside the time that is measured: so answers mean
nothing, and all rounds of a shape accept as many guesses as its first one. Milliseconds of a round: the least of all,
since other programs can only add to it, and the value that a tenth of them are below. Copies to a card and launches
are not in it, as far as a card takes longer for them than torch does on a CPU.
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
    """Stands for `Graphs.run`: computes once by key, and counts the seconds that it takes."""

    def __init__(self) -> None:
        self.kept: dict[Hashable, Any] = {}
        self.taken_s = 0.0

    def run(self, graphs: Graphs, key: Hashable, body: Callable[[], Any]) -> Any:
        """What `body` gave under this key, or gives now."""
        started_s = time.perf_counter()
        if key is None or (id(graphs), key) not in self.kept:
            self.kept[id(graphs), key] = body()
        self.taken_s += time.perf_counter() - started_s
        return self.kept[id(graphs), key]


def rounds_of(llm: LLM, batch: int, num_rounds: int, replays: Replays) -> list[float]:
    """Milliseconds of each round, behind a few that compute what is replayed."""
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
    """Print a row for each drafter and batch."""
    torch.set_num_threads(1)
    replays = Replays()
    setattr(Graphs, "run", lambda graphs, key, body: replays.run(graphs, key, body))  # noqa: B010 (mypy knows its type)
    print("| drafter | batch | least | tenth |\n|---|---|---|---|")
    for draft, batch in itertools.product(DRAFTS, BATCHES):
        llm = LLM("stdlib", draft, device=Placement(torch.device("cpu"), fixed=True), dtype="float32",
                  speculation=DEPTH if draft else False, max_model_len=LENGTH, max_num_seqs=max(BATCHES))  # fmt: skip
        runners: list[Any] = [llm.engine.runner, getattr(llm.drafter, "runner", llm.engine.runner)]
        for runner in runners:
            runner.graphs.enabled = True  # so that shapes are those of a GPU
        round_ms = sorted(ms for _ in range(REPEATS) for ms in rounds_of(llm, batch, num_rounds, replays))
        print(f"| {draft or 'plain'} | {batch} | {round_ms[0]:.3f} | {round_ms[len(round_ms) // 10]:.3f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
