"""Chunk size: how many tokens of prompts one pass reads.

A short prompt that arrives waits for the pass under way, so a pass over a long prompt should not take long. What a pass
takes depends on the model, the machine and the length of the text, so with "auto" the size follows the times of passes:
the part of a pass that is over prompts may take ROOM times as long as one over a short prompt takes on the idle engine,
and the short prompt's own pass comes next. Rows that are decoded in the same pass take their part of it in any case.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from forerun.accept.outcome import Outcome
from forerun.config import EngineOptions
from forerun.models.runner import Read, Runner

SHORT = 32  # tokens of a short prompt, and the least that a pass reads
MOST = 512
ROOM = 1.5
LEAST_S = 0.005  # that a pass may take: less is not felt beside what HTTP takes
TRIES = 3  # of the measurement, of which the shortest counts
SLOWEST, FASTEST = 0.5, 1.25  # how fast the size follows


@dataclass(slots=True)
class ChunkSize:
    """Prompt tokens of a pass: `tokens`, which follow what passes take where `limit_s` says how long they may."""

    tokens: int
    limit_s: float | None = None

    @classmethod
    def of(cls, options: EngineOptions, runner: Runner) -> ChunkSize:
        """As the options say; "auto" by what a short prompt takes an idle runner, in which nothing of it is left."""
        if isinstance(options.chunk_tokens, int):
            return cls(options.chunk_tokens)
        num_tokens, taken_s = min(SHORT, runner.window), []
        for _ in range(TRIES):
            started_s = time.perf_counter()
            states = runner.read([Read(-1, [0] * num_tokens, judged=(num_tokens - 1,))])
            states.logits.argmax().item()  # a GPU is waited for
            taken_s.append(time.perf_counter() - started_s)
            runner.release([-1])
        return cls(2 * SHORT, max(LEAST_S, ROOM * min(taken_s)))

    def record(self, outcome: Outcome) -> None:
        """Learn from a round that read prompts; of less than this size it shows at most that the size is too large."""
        if self.limit_s is None or not outcome.num_prompt_tokens or outcome.captured:
            return
        share = outcome.num_prompt_tokens / (outcome.num_prompt_tokens + outcome.num_tokens)
        taken_s = share * (outcome.pass_s + outcome.verdict_s)
        change = min(max(SLOWEST, self.limit_s / taken_s), FASTEST)
        if outcome.num_prompt_tokens >= self.tokens or change < 1:
            self.tokens = min(max(SHORT, round(self.tokens * change)), MOST)
