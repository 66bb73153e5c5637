"""Races: a prompt answered by plain and by speculative decoding with the same weights, each with a separate clock.

The next step is always that of the side whose steps have taken less time in total. So the sides never compute at the
same time, and on the screen they advance as if each had the machine to itself. Decoding speeds are compared, without
prefill. A comparison runs several races within a time limit, by limiting the length of answers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from forerun.annotations import ProgressCallback
from forerun.bench.figures import over
from forerun.bench.run import Clock, RoundTotals, TimedEngine, TimedRound
from forerun.cache.plan import size
from forerun.demo.material import DemoPrompt
from forerun.draft.base import Drafter
from forerun.engine.engine import Engine
from forerun.llm import LLM
from forerun.machine import peak_rss_bytes, processor
from forerun.report import counted
from forerun.request import Request
from forerun.sampling.params import SamplingParams

LEAST_TOKENS = 8  # minimum length of an answer
WARMUP_PROMPT, WARMUP_TOKENS = 32, 8  # tokens of the prompt and of the answer


class Side(StrEnum):
    """The two sides of a race."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"


class RaceSetup:
    """An LLM with two engines on its weights: the LLM's engine, which drafts, and a plain one."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.plain = second_engine(llm, None)
        self.tenants = itertools.count()

    def race(
        self, prompt: str | Sequence[int], params: SamplingParams, clock: Clock = time.perf_counter
    ) -> Iterator[tuple[Side, TimedRound]]:
        """Run a race; yields each round with its side. Closing the generator cancels both sides.

        Each race has a different tenant, so that drafters cannot use earlier answers.
        """
        engines = {Side.PLAIN: (self.plain, False), Side.SPECULATIVE: (self.llm.engine, None)}
        tenant = str(next(self.tenants))
        engines_by_side = {
            side: TimedEngine(engine, self.llm.requests.sequences(Request.of(prompt, params, speculation, tenant)))
            for side, (engine, speculation) in engines.items()
        }
        try:
            while running := [side for side, timed in engines_by_side.items() if timed.engine.has_work]:
                side = min(running, key=lambda side: engines_by_side[side].clock_s)
                yield side, engines_by_side[side].step(clock)
        finally:
            for timed in engines_by_side.values():
                timed.clear()


def second_engine(llm: LLM, drafter: Drafter | None) -> Engine:
    """Another engine on an LLM's weights, with a separate cache."""
    engine = llm.engine
    runner = type(engine.runner).of(engine.runner.decoder, llm.plan.cache_tokens)
    return Engine(runner, drafter, options=engine.options, num_ids=engine.num_ids, kernels=engine.kernels)


@dataclass(slots=True)
class Tally(RoundTotals):
    """The totals of one side's rounds, in one race or many, and its tokens."""

    token_ids: list[int] = field(default_factory=list)

    def as_object(self) -> dict[str, Any]:
        """The totals as a JSON object."""
        return {
            "num_tokens": len(self.token_ids),
            "token_ids": self.token_ids,
            "tokens_per_s": self.tokens_per_s,
            "decode_s": self.decode_s,
            "read_s": self.read_s,
            "num_rounds": self.stats.num_rounds,
            "draft_s": self.stats.draft_s,
            "pass_s": self.stats.pass_s,
        }


@dataclass(slots=True)
class Score:
    """Both sides' totals of one race or many."""

    plain: Tally = field(default_factory=Tally)
    speculative: Tally = field(default_factory=Tally)

    def add(self, side: Side, step: TimedRound) -> None:
        """Add a round of one side."""
        tally = self.of(side)
        tally.token_ids += (token for delta in step.deltas for token in delta.token_ids)
        tally.count(step.outcome, step.step_s)

    def of(self, side: Side) -> Tally:
        """The totals of one side."""
        return self.plain if side is Side.PLAIN else self.speculative

    @property
    def speed_up(self) -> float:
        """The ratio of decoding speeds; 0 if unknown."""
        return over(self.speculative.tokens_per_s, self.plain.tokens_per_s) or 0.0

    @property
    def pays(self) -> bool:
        """Whether speculation is faster."""
        return self.speed_up > 1

    @property
    def same_tokens(self) -> bool:
        """Whether both sides gave the same tokens."""
        return self.plain.token_ids == self.speculative.token_ids

    @property
    def verdict(self) -> str:
        """A sentence: whether speculation is faster on this machine."""
        if not self.speed_up:
            return "The answers are too short to compare speeds."
        plain, speculative = self.plain.tokens_per_s, self.speculative.tokens_per_s
        speeds = f"×{self.speed_up:.2f}, {speculative:.1f} instead of {plain:.1f} tokens/s"
        return f"Speculation is {'' if self.pays else 'not '}faster than plain decoding on this machine: {speeds}."

    @property
    def costs(self) -> str:
        """The cost of a drafted round and its tokens, as a phrase."""
        stats, drafted = self.speculative.stats, self.speculative
        tokens = 1 + (over(stats.num_drafted, stats.num_rounds) or 0.0)
        times, share = over(drafted.pass_s, self.plain.pass_s) or 0.0, over(stats.draft_s, drafted.decode_s) or 0.0
        return (
            f"a pass over {tokens:.1f} tokens takes {times:.2f} times as long as over one, "
            f"drafting takes {share:.0%} of the time; "
            f"a round yields {stats.tokens_per_round or 0:.2f} tokens"
        )

    def as_object(self) -> dict[str, Any]:
        """The score as a JSON object."""
        stats = self.speculative.stats
        return {
            "plain": self.plain.as_object(),
            "speculative": self.speculative.as_object(),
            "speed_up": self.speed_up,
            "pays": self.pays,
            "same_tokens": self.same_tokens,
            "tokens_per_round": stats.tokens_per_round,
            "acceptance_rate": stats.acceptance_rate,
            "acceptance_at_depth": list(stats.acceptance_at_depth),
            "costs": self.costs,
        }


@dataclass(frozen=True, slots=True)
class PromptScore:
    """The score of one prompt."""

    name: str
    temperature: float
    num_tokens: int  # maximum length of the answer
    score: Score

    def as_object(self) -> dict[str, Any]:
        """The score with the prompt's name, as a JSON object."""
        about = {"name": self.name, "temperature": self.temperature, "max_tokens": self.num_tokens}
        return about | self.score.as_object()


@dataclass(slots=True)
class Comparison:
    """Several races with one seed. `deadline_s` is a time of `clock`, which also times the rounds."""

    setup: RaceSetup
    seed: int
    max_tokens: int  # of an answer, if time allows
    deadline_s: float
    clock: Clock = time.perf_counter
    seen: Score = field(default_factory=Score)  # all rounds, including the warm-up
    total: Score = field(default_factory=Score)  # all races
    totals: dict[float, Score] = field(default_factory=dict)  # by temperature
    races: list[PromptScore] = field(default_factory=list)
    answer: str = ""  # the plain side's last answer

    def warm_up(self, prompt: DemoPrompt, progress: ProgressCallback = lambda _what, _done: None) -> None:
        """Run a few rounds of both engines, which compile kernels and measure the machine's speed."""
        progress("warming up", 0.0)
        tokens = prompt.tokens(self.setup.llm)[:WARMUP_PROMPT]
        params = SamplingParams(temperature=0.0, max_tokens=WARMUP_TOKENS, ignore_eos=True)
        for step in self.setup.race(tokens, params, self.clock):
            self.seen.add(*step)

    def race(
        self, prompt: DemoPrompt, temperature: float, num_left: int, show: Callable[[Side, TimedRound, Score], None]
    ) -> PromptScore:
        """Run one race with an equal share of the time for `num_left` races; `show` is called with each round.

        A later turn of a chat is added to the score of the earlier turns.
        """
        tokens = prompt.tokens(self.setup.llm)
        share_s = (self.deadline_s - self.clock()) / num_left
        most = affordable_tokens(self.seen, len(tokens), share_s, self.max_tokens)
        score, self.answer = Score(), ""
        if prompt.before:
            earlier = self.races.pop()
            self.races.append(replace(earlier, num_tokens=min(most, earlier.num_tokens)))
        else:
            self.races.append(PromptScore(prompt.name, temperature, most, Score()))
        counted_in = (score, self.races[-1].score, self.totals.setdefault(temperature, Score()), self.seen, self.total)
        params = SamplingParams(temperature=temperature, seed=self.seed, max_tokens=most)
        for side, step in self.setup.race(tokens, params, self.clock):
            for each in counted_in:
                each.add(side, step)
            if side is Side.PLAIN:
                self.answer += "".join(delta.text for delta in step.deltas)
            show(side, step, score)
        return self.races[-1]

    @property
    def late(self) -> bool:
        """Whether the time is over; the first race always runs."""
        return bool(self.races) and self.clock() >= self.deadline_s

    @property
    def shortened(self) -> bool:
        """Whether answers were shortened because of the time limit."""
        return any(race.num_tokens < self.max_tokens for race in self.races)

    def facts(self, num_races: int) -> list[tuple[str, str]]:
        """(name, value) facts for the card."""
        llm, num_threads = self.setup.llm, torch.get_num_threads()
        machine = f"{counted(num_threads, 'thread')}, {llm.kernels}, {llm.format}"
        lines = [("processor", processor()), ("machine", machine), ("seed", str(self.seed))]
        if llm.measured:
            lines.append(("kernels", llm.measured))
        if peak := peak_rss_bytes():
            lines.append(("peak memory", size(peak)))
        if self.shortened:
            lengths = ", ".join(str(race.num_tokens) for race in self.races)
            lines.append(("time limit", f"answers have at most {lengths} tokens instead of {self.max_tokens}"))
        if num_left := num_races - len(self.races):
            lines.append(("omitted", f"{num_left} of {num_races} answers: this machine is too slow, or busy"))
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
            "totals": {f"{temperature:g}": score.as_object() for temperature, score in self.totals.items()},
            "total": self.total.as_object(),
            "verdict": self.total.verdict,
            "num_threads": torch.get_num_threads(),
            "peak_rss_bytes": peak_rss_bytes(),
            "fingerprint": self.setup.llm.fingerprint,
        }


def affordable_tokens(seen: Score, num_prompt_tokens: int, left_s: float, most: int) -> int:
    """The answer length, at most `most`, for which prefill and both sides' decoding fit into `left_s` seconds.

    Estimated from the speeds of `seen`; at least min(LEAST_TOKENS, `most`).
    """
    sides = (seen.plain, seen.speculative)
    per_token_s = sum(side.decode_s / max(1, side.num_decoded) for side in sides)
    left_s -= num_prompt_tokens * sum(side.read_s / max(1, side.num_read) for side in sides)
    affordable = int(left_s / per_token_s) if per_token_s else most
    return min(most, max(LEAST_TOKENS, affordable))
