"""An estimate of how long a proof takes, made by running a short piece of the same work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.config import Speculation
from forerun.llm import LLM
from forerun.prove.workload import ProofWorkload
from forerun.sampling.params import SamplingParams

READ_TOKENS, TRIED_TOKENS, TEXT_TOKENS = 24, 8, 4
TENANT = "estimate"  # drafters that remember answers shall not draft the proof from these
DRAFTED_SHARE = 0.7  # of a plain run's time, about, that a drafted one takes


@dataclass(frozen=True, slots=True)
class ProofPace:
    """Seconds for a token of a request that runs alone, and for one short text among as many as run at once."""

    token_s: float
    text_s: float

    @classmethod
    def of(
        cls, llm: LLM, prompt: Sequence[int], shape: Speculation, clock: Callable[[], float] = time.perf_counter
    ) -> ProofPace:
        """Measured on the beginning of a prompt, after a round that is not timed: the first one is slow."""
        start, num_texts = list(prompt[:READ_TOKENS]), llm.engine.scheduler.max_num_seqs
        times = []
        for params, wish in (
            (SamplingParams(seed=0, max_tokens=2, ignore_eos=True), shape),
            (SamplingParams(seed=0, max_tokens=TRIED_TOKENS, ignore_eos=True), False),
            (SamplingParams(seed=0, max_tokens=TEXT_TOKENS, ignore_eos=True, n=num_texts), shape),
        ):
            started_s = clock()
            llm.generate([start], params, speculation=wish, tenant=TENANT, use_tqdm=False)
            times.append(clock() - started_s)
        return cls(times[1] / TRIED_TOKENS, times[2] / num_texts)

    def total_s(self, workload: ProofWorkload) -> float:
        """Seconds for the whole workload, roughly."""
        tokens = len(workload.temperatures) * workload.num_prompts * workload.max_tokens
        runs = 1 + DRAFTED_SHARE * len(workload.shapes) * sum(1 / batch for batch in workload.batches)
        texts = len(workload.laws) * workload.num_openings * workload.num_texts
        return self.token_s * tokens * runs + self.text_s * texts


def spoken(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} seconds"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 90 else f"{seconds / 3600:.1f} hours"
