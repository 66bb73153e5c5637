"""ProofWorkload: the size of a proof, and an estimate of its duration.

It defines temperatures, batch sizes, draft shapes and sample sizes; `engine_as` changes the engine's verification and
batch size during a run. The duration is estimated from a short run of the same kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from forerun.config import DEFAULT_DEPTH, Speculation, Verification, require_whole
from forerun.engine.engine import Engine
from forerun.limits import INT64
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams

PROMPT_TOKENS, ANSWER_TOKENS, TEXT_TOKENS = 24, 8, 4  # of the runs for the estimate of the duration
TENANT = "estimate"  # a separate tenant, so that drafters do not use the estimate's answers later
DRAFTED_SHARE = 0.7  # assumed duration of a drafted run, relative to a plain one


@dataclass(frozen=True, slots=True)
class ProofWorkload:
    """The requests that `prove` runs.

    Equality: `num_prompts` requests of `max_tokens` tokens (prompts are repeated if there are fewer), at every
    temperature, batch size and draft shape. Law: `num_texts` short texts per rule and shape, after each of
    `num_openings` prompts.
    """

    num_prompts: int = 8
    max_tokens: int = 48
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    batches: tuple[int, ...] = (1, 8)
    shapes: tuple[Speculation, ...] = (Speculation(DEFAULT_DEPTH), Speculation(DEFAULT_DEPTH, 2))
    num_texts: int = 1500
    num_openings: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "num_texts", "num_openings"):
            require_whole(name, getattr(self, name), 1)
        require_whole("seed", self.seed, 0, INT64)

    def thorough(self) -> ProofWorkload:
        """A workload with about ten times the work of this one."""
        return replace(
            self,
            num_prompts=4 * self.num_prompts,
            max_tokens=2 * self.max_tokens,
            num_texts=4 * self.num_texts,
            num_openings=3 * self.num_openings,
        )

    @property
    def laws(self) -> list[tuple[Verification, Speculation]]:
        """The (rule, shape) pairs whose law is tested; `block` supports chains only."""
        chains = [shape for shape in self.shapes if shape.width == 1]
        return [("token", shape) for shape in self.shapes] + [("block", shape) for shape in chains]


@contextmanager
def engine_as(engine: Engine, verification: Verification, max_num_seqs: int) -> Iterator[None]:
    """Context in which an idle engine uses this verification and batch size."""
    assert not engine.has_work, "the verification rule must not change while a sequence is generated"
    options, before = engine.options, engine.scheduler.max_num_seqs
    engine.options, engine.scheduler.max_num_seqs = replace(options, verification=verification), max_num_seqs
    try:
        yield
    finally:
        engine.options, engine.scheduler.max_num_seqs = options, before


def shape_name(shape: Speculation) -> str:
    """A draft shape as a phrase."""
    return f"chain of {shape.depth}" if shape.width == 1 else f"tree of depth {shape.depth}, width {shape.width}"


@dataclass(frozen=True, slots=True)
class ProofPace:
    """Seconds per token of a single request, and per short text in a full batch."""

    token_s: float
    text_s: float

    @classmethod
    def of(
        cls, llm: LLM, prompt: Sequence[int], shape: Speculation, clock: Callable[[], float] = time.perf_counter
    ) -> ProofPace:
        """Measure on the start of a prompt, after an untimed first round."""
        start, num_texts = list(prompt[:PROMPT_TOKENS]), llm.engine.scheduler.max_num_seqs
        times = []
        for params, speculation in (
            (SamplingParams(seed=0, max_tokens=2, ignore_eos=True), shape),
            (SamplingParams(seed=0, max_tokens=ANSWER_TOKENS, ignore_eos=True), False),
            (SamplingParams(seed=0, max_tokens=TEXT_TOKENS, ignore_eos=True, n=num_texts), shape),
        ):
            started_s = clock()
            llm.generate([start], params, speculation=speculation, tenant=TENANT, use_tqdm=False)
            times.append(clock() - started_s)
        return cls(times[1] / ANSWER_TOKENS, times[2] / num_texts)

    def total_s(self, workload: ProofWorkload) -> float:
        """An estimate of the seconds for a workload."""
        tokens = len(workload.temperatures) * workload.num_prompts * workload.max_tokens
        runs = 1 + DRAFTED_SHARE * len(workload.shapes) * sum(1 / batch for batch in workload.batches)
        texts = len(workload.laws) * workload.num_openings * workload.num_texts
        return self.token_s * tokens * runs + self.text_s * texts
