"""A meet: races over several prompts that end by a deadline.

This file decides what is warmed up, how long answers may be on this machine, and which races count: the warm-up does
not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.bench.lane import Clock
from forerun.demo.material import DemoPrompt
from forerun.demo.race import RaceStep, Track
from forerun.demo.score import Score, affordable_tokens
from forerun.request import Request
from forerun.sampling.params import SamplingParams

WARMUP_READ, WARMUP_TOKENS = 32, 8  # tokens of the prompt, tokens of the answer


@dataclass(frozen=True, slots=True)
class Heat:
    """One race that is over."""

    source: str
    drafter: str
    num_tokens: int  # the most the answer might have had
    score: Score

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {"source": self.source, "drafter": self.drafter, "max_tokens": self.num_tokens} | self.score.as_object()


@dataclass(slots=True)
class Meet:
    """Races on one track with one set of parameters. `deadline_s` is on `clock`, which also times the steps."""

    track: Track
    params: SamplingParams
    max_tokens: int  # of an answer, where time allows; that of `params` is not used
    deadline_s: float
    clock: Clock = time.perf_counter
    seen: Score = field(default_factory=Score)  # all that ran, the warm-up too
    total: Score = field(default_factory=Score)  # what counts
    heats: list[Heat] = field(default_factory=list)

    def warm_up(self, prompt: DemoPrompt, progress: ProgressCallback | None = None) -> None:
        """A few rounds of every engine, which compile kernels and show how fast this machine is."""
        tokens = self.encode(prompt)[:WARMUP_READ]
        params = replace(self.params, max_tokens=WARMUP_TOKENS)
        for i, drafter in enumerate(self.track.drafted):
            if progress is not None:
                progress("warming up", i / len(self.track.drafted))
            for step in self.track.race(tokens, params, drafter, self.clock):
                self.seen.add(step)

    def race(self, prompt: DemoPrompt, num_left: int, show: Callable[[RaceStep, Score], None]) -> Heat:
        """One race, with its share of the time that is left for `num_left` of them; `show` is told each step."""
        tokens = self.encode(prompt)
        share_s = (self.deadline_s - self.clock()) / num_left
        most = affordable_tokens(self.seen, len(tokens), share_s, self.max_tokens)
        score = Score()
        for step in self.track.race(tokens, replace(self.params, max_tokens=most), prompt.drafter, self.clock):
            for each in (score, self.seen, self.total):
                each.add(step)
            show(step, score)
        self.heats.append(Heat(prompt.path, self.track.shown[prompt.drafter], most, score))
        return self.heats[-1]

    @property
    def late(self) -> bool:
        """Whether there is no time for another race; there always is for one."""
        return bool(self.heats) and self.clock() >= self.deadline_s

    @property
    def shortened(self) -> bool:
        """Whether answers were kept shorter than asked for, to be over in time."""
        return any(heat.num_tokens < self.max_tokens for heat in self.heats)

    def encode(self, prompt: DemoPrompt) -> list[int]:
        """A prompt as tokens."""
        return self.track.llm.requests.prompt_tokens(Request.of(prompt.text))
