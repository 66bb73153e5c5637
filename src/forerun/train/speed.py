"""How much faster decoding will be: what held-out drafts give, and what rounds with this drafter take on this machine.

The untrained student is written to a folder and drafts for the target in an engine of its own, over the target's own
runner, for some rounds at batch 1: what they take depends on the network's shape and not on its weights. Raises nothing
where it cannot be measured; then nothing is predicted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.config import EngineOptions, Speculation
from forerun.draft.build import DraftContext, plan_drafter
from forerun.economy import Kind
from forerun.engine.calibration import measure
from forerun.engine.engine import Engine
from forerun.engine.measured import MeasuredDepth
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.sampling.params import SamplingParams
from forerun.train.base import Student

CACHE_TOKENS = 1024  # of the drafter while it is measured
NO_TIME_S = 1e-9


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round of one sequence, plain and at each depth from 1."""

    plain_s: float
    drafted_s: Sequence[float]

    def best(self, tokens_per_round: Sequence[float]) -> tuple[int, float]:
        """The depth that pays most where rounds give so many tokens, and times as fast as plain decoding that is."""
        rates = [t * self.plain_s / max(NO_TIME_S, s) for t, s in zip(tokens_per_round, self.drafted_s, strict=False)]
        depth = max(range(len(rates)), key=rates.__getitem__)
        return depth + 1, rates[depth]

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {"plain_s": self.plain_s, "drafted_s": list(self.drafted_s)}


def round_times(
    llm: LLM, target: Blueprint, student: Student, params: SamplingParams, depth: int, progress: ProgressCallback
) -> RoundTimes | None:
    """What rounds take with this student; None where the context is too short to find out."""
    progress("measuring what rounds take", 0.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "untrained"
        folder.mkdir()
        student.write(student.weights, folder)
        plan = plan_drafter(student.spec(folder), DraftContext(target, llm.tokenizer))
        drafter = plan.build(dict.fromkeys(plan.models, CACHE_TOKENS), None, llm.engine.runner)
        own = llm.engine
        options = EngineOptions(1, own.options.chunk_tokens, speculation=Speculation(depth))
        engine = Engine(own.runner, drafter, options=options, num_ids=own.num_ids, kernels=own.kernels)
        controller = MeasuredDepth()
        measure(engine, llm.requests, params, controller, None, {1: 1})
    if not controller.costs.kinds or not controller.arms.arms:
        return None
    passes, arm = controller.costs.of(Kind.of(1, 0)), controller.arms.arms[0]
    drafted = [passes.expect(1 + d) + arm.cost_s(d, 1, 0) for d in range(1, depth + 1)]
    return RoundTimes(passes.expect(1), drafted)
