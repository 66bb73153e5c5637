"""A comparison: races over several prompts that end by a deadline, and the report of them.

This file decides what is warmed up, how long answers may be on this machine, which races count (the warm-up does not),
and what is told beside their figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from forerun.annotations import ProgressCallback
from forerun.bench.lane import Clock
from forerun.cache.plan import size
from forerun.demo.material import DemoPrompt
from forerun.demo.race import RaceSetup, RaceStep, Score
from forerun.figure_table import counted
from forerun.machine import peak_rss_bytes, processor
from forerun.sampling.params import SamplingParams

LEAST_TOKENS = 8  # an answer shorter than this shows nothing
WARMUP_READ, WARMUP_TOKENS = 32, 8  # tokens of the prompt, tokens of the answer


@dataclass(frozen=True, slots=True)
class PromptScore:
    """One race that is over."""

    name: str
    temperature: float
    num_tokens: int  # the most the answer might have had
    score: Score

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        about = {"name": self.name, "temperature": self.temperature, "max_tokens": self.num_tokens}
        return about | self.score.as_object()


@dataclass(slots=True)
class Comparison:
    """Races in one setup with one seed. `deadline_s` is on `clock`, which also times the steps."""

    setup: RaceSetup
    seed: int
    max_tokens: int  # of an answer, where time allows
    deadline_s: float
    clock: Clock = time.perf_counter
    seen: Score = field(default_factory=Score)  # all that ran, the warm-up too
    total: Score = field(default_factory=Score)  # what counts
    races: list[PromptScore] = field(default_factory=list)

    def warm_up(self, prompt: DemoPrompt, progress: ProgressCallback = lambda _what, _done: None) -> None:
        """A few rounds of both engines, which compile kernels and show how fast this machine is."""
        progress("warming up", 0.0)
        tokens = prompt.tokens(self.setup.llm)[:WARMUP_READ]
        params = SamplingParams(temperature=0.0, max_tokens=WARMUP_TOKENS, ignore_eos=True)
        for step in self.setup.race(tokens, params, self.clock):
            self.seen.add(step)

    def race(
        self, prompt: DemoPrompt, temperature: float, num_left: int, show: Callable[[RaceStep, Score], None]
    ) -> PromptScore:
        """One race, with its share of the time that is left for `num_left` of them; `show` is told each step."""
        tokens = prompt.tokens(self.setup.llm)
        share_s = (self.deadline_s - self.clock()) / num_left
        most = affordable_tokens(self.seen, len(tokens), share_s, self.max_tokens)
        score = Score()
        params = SamplingParams(temperature=temperature, seed=self.seed, max_tokens=most)
        for step in self.setup.race(tokens, params, self.clock):
            for each in (score, self.seen, self.total):
                each.add(step)
            show(step, score)
        self.races.append(PromptScore(prompt.name, temperature, most, score))
        return self.races[-1]

    @property
    def late(self) -> bool:
        """Whether there is no time for another race; there always is for one."""
        return bool(self.races) and self.clock() >= self.deadline_s

    @property
    def shortened(self) -> bool:
        """Whether answers were kept shorter than asked for, to be over in time."""
        return any(race.num_tokens < self.max_tokens for race in self.races)

    def facts(self, num_races: int) -> list[tuple[str, str]]:
        """What is worth knowing beside the figures, by name."""
        llm, num_threads = self.setup.llm, torch.get_num_threads()
        machine = f"{counted(num_threads, 'thread')}, {llm.kernels}, {llm.format}"
        lines = [("processor", processor()), ("machine", machine), ("seed", str(self.seed))]
        if llm.measured:
            lines.append(("computed by", llm.measured))
        if peak := peak_rss_bytes():
            lines.append(("peak memory", size(peak)))
        if self.shortened:
            lengths = ", ".join(str(race.num_tokens) for race in self.races)
            lines.append(("to be over in time", f"answers of at most {lengths} tokens instead of {self.max_tokens}"))
        if num_left := num_races - len(self.races):
            lines.append(("left out", f"{num_left} of {num_races} answers: this machine is too slow, or busy"))
        return lines

    def as_object(self, title: str) -> dict[str, object]:
        """The comparison as JSON."""
        return {
            "models": title,
            "drafter": self.setup.llm.draft_name,
            "depth": self.setup.llm.requests.default.shown_depth,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "shortened": self.shortened,
            "prompts": [race.as_object() for race in self.races],
            "total": self.total.as_object(),
            "verdict": self.total.verdict,
            "num_threads": torch.get_num_threads(),
            "peak_rss_bytes": peak_rss_bytes(),
            "fingerprint": self.setup.llm.fingerprint,
        }


def affordable_tokens(seen: Score, num_prompt_tokens: int, left_s: float, most: int) -> int:
    """How long an answer may be, at most `most`, if reading and both sides' decoding are to end in `left_s` seconds.

    Judged by the speeds of `seen`; never less than LEAST_TOKENS, unless `most` is.
    """
    sides = (seen.plain, seen.speculative)
    per_token_s = sum(side.decode_s / max(1, side.num_decoded) for side in sides)
    left_s -= num_prompt_tokens * sum(side.read_s / max(1, side.num_read) for side in sides)
    affordable = int(left_s / per_token_s) if per_token_s else most
    return min(most, max(LEAST_TOKENS, affordable))
