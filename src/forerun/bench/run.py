"""Runs: one repetition of a cell, executed by the engine and recorded.

This file decides how requests are grouped into waves, what is timed, and what is kept of it. Every depth gets the same
prompts and seeds.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from forerun.bench.lane import Clock, Lane, Timed
from forerun.bench.material import Item, Workload
from forerun.bench.pace import Pace
from forerun.bench.plan import Group, Turn
from forerun.config import EngineOptions, Speculation
from forerun.control.controller import Controller
from forerun.draft.base import Budget, Drafter
from forerun.engine.engine import Engine
from forerun.llm import LLM
from forerun.machine import forget_peak_rss, peak_rss_bytes
from forerun.models.config import ExpertsConfig, expected_distinct
from forerun.request import Request
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.sampling.recorded import Recording

NGRAM = 8
WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One repetition of one cell.

    `decode_s` and what is counted up to `accepted_at_depth` are of rounds that read no prompt, `num_tokens` and
    `total_s` of all rounds. `full_pass_s` and `full_draft_s` are medians over the full rounds: every sequence of the
    batch there and drafted as far as can be; None without any. `answers` are hashes of each request's tokens;
    `num_distinct` of their `num_ngrams` 8-grams were new to their answer.
    """

    workload: str
    batch: int
    temperature: float
    depth: int
    repetition: int
    first_s: float
    num_tokens: int
    total_s: float
    num_decoded: int
    decode_s: float
    num_passes: int
    pass_s: float
    draft_s: float
    draft_pass_s: float
    num_rounds: int
    num_drafted: int
    num_accepted: int
    offered_at_depth: tuple[int, ...]
    accepted_at_depth: tuple[int, ...]
    full_pass_s: float | None
    full_draft_s: float | None
    num_ngrams: int
    num_distinct: int
    answers: tuple[str, ...]
    peak_bytes: int | None
    num_rounds_by_arm: tuple[tuple[str, int], ...] = ()  # of a mix, in which it drafted a sequence
    full_experts: float | None = None  # that a layer with experts reads in a full round, on average
    expected_experts: float | None = None  # the same if tokens chose theirs evenly and each for itself

    @property
    def group(self) -> Group:
        """What it is compared within."""
        return Group(self.workload, self.batch, self.temperature)

    @property
    def turn(self) -> Turn:
        """Its place in the group."""
        return Turn(self.repetition, self.depth)


@dataclass(slots=True)
class Tape:
    """What a run's rounds give, added up; where all is drafted, a sequence has `num_guesses` in a round."""

    batch: int
    num_guesses: int
    arms: Sequence[str] = ()
    pace: Pace = field(default_factory=Pace)
    first_s: dict[int, float] = field(default_factory=dict)  # by sequence, from when its wave began
    full: list[Timed] = field(default_factory=list)
    experts: ExpertsConfig | None = None

    def add(self, timed: Timed, clock_s: float) -> None:
        """One more round; `clock_s` is the time its wave has taken so far."""
        self.pace.count(timed.outcome, timed.step_s)
        for delta in timed.deltas:
            self.first_s.setdefault(delta.seq_id, clock_s)
        drafted = [row.num_drafted for row in timed.outcome.rows]
        if not timed.outcome.num_prompt_tokens and drafted == [self.num_guesses] * self.batch:
            self.full.append(timed)

    def experts_read(self) -> float | None:
        """By a layer with experts in a full round."""
        if self.experts is None or not self.full:
            return None
        return statistics.fmean(each.num_experts for each in self.full) / len(self.experts.layers)

    def experts_expected(self) -> float | None:
        """The same of independent tokens."""
        if self.experts is None or not self.full:
            return None
        num_tokens = self.batch * (1 + self.num_guesses)
        return expected_distinct(self.experts.count, self.experts.active, num_tokens)

    def run(self, group: Group, turn: Turn, answers: Sequence[Sequence[int]], peak_bytes: int | None) -> BenchRun:
        """All of it, to be written down."""
        pace, stats = self.pace, self.pace.stats
        grams = [[tuple(a[i : i + NGRAM]) for i in range(len(a) - NGRAM + 1)] for a in answers]
        return BenchRun(
            workload=group.workload,
            batch=group.batch,
            temperature=group.temperature,
            depth=turn.depth,
            repetition=turn.repetition,
            first_s=statistics.median(self.first_s.values()),
            num_tokens=sum(map(len, answers)),
            total_s=pace.total_s,
            num_decoded=pace.num_decoded,
            decode_s=pace.decode_s,
            num_passes=stats.num_passes,
            pass_s=stats.pass_s,
            draft_s=stats.draft_s,
            draft_pass_s=stats.draft_pass_s,
            num_rounds=stats.num_rounds,
            num_drafted=stats.num_drafted,
            num_accepted=stats.num_accepted,
            offered_at_depth=tuple(stats.offered_at_depth),
            accepted_at_depth=tuple(stats.accepted_at_depth),
            num_rounds_by_arm=tuple((self.arms[arm], own.num_rounds) for arm, own in sorted(stats.drafters.items())),
            full_pass_s=statistics.median(each.outcome.pass_s for each in self.full) if self.full else None,
            full_draft_s=statistics.median(each.outcome.draft_s for each in self.full) if self.full else None,
            full_experts=self.experts_read(),
            expected_experts=self.experts_expected(),
            num_ngrams=sum(map(len, grams)),
            num_distinct=sum(len(set(each)) for each in grams),
            answers=tuple(hash_of(answer) for answer in answers),
            peak_bytes=peak_bytes,
        )


def hash_of(answer: Sequence[int]) -> str:
    """What tells answers apart."""
    return hashlib.sha256(",".join(map(str, answer)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Stage:
    """An LLM with a drafter, nothing under way, the texts to run on it, and what `wish` asks of it at a depth.

    Where `refills` is set, a prompt begins as soon as another one ends, instead of wave by wave. `drafter`, if there is
    one, drafts in the place of the LLM's; engines begin with a copy of `controller`, or of the LLM's.
    """

    llm: LLM
    workloads: Mapping[str, Workload]
    num_tokens: int
    seed: int = 0
    clock: Clock = time.perf_counter
    wish: Callable[[int], Speculation] = Speculation
    controllers: dict[tuple[Group, int], Controller] = field(default_factory=dict)
    refills: bool = False
    drafter: Drafter | None = None
    controller: Controller | None = None

    def run(self, group: Group, turn: Turn) -> BenchRun:
        """One repetition: every prompt of the workload at least once, `group.batch` of them at a time."""
        own_peak = forget_peak_rss()
        tape, answers = self.tape(group, turn.depth), []
        turns = list(waves(len(self.workloads[group.workload].items), group.batch))
        for numbers in [range(turns[-1].stop)] if self.refills else turns:
            answers += self.wave(group, turn.depth, numbers, tape, tenant=repr((group, turn)))
        return tape.run(group, turn, answers, peak_rss_bytes() if own_peak else None)

    def warm_up(self, group: Group, depths: Sequence[int]) -> None:
        """A few rounds at every depth, which compile kernels and are not counted."""
        for depth in depths:
            self.wave(group, depth, range(group.batch), self.tape(group, depth), WARMUP_TOKENS)

    def tape(self, group: Group, depth: int) -> Tape:
        """A tape for a run at this depth."""
        experts = self.llm.engine.runner.decoder.config.experts
        return Tape(group.batch, Budget.of(self.wish(depth)).nodes, self.llm.drafter_names, experts=experts)

    def wave(
        self, group: Group, depth: int, numbers: Sequence[int], tape: Tape, most: int | None = None, tenant: str = ""
    ) -> list[list[int]]:
        """Requests of these numbers, all at once, to their ends; their answers, of at most `most` tokens.

        Each repetition is a `tenant` of its own: no drafter shall remember what an earlier one answered to the same.
        """
        items = self.workloads[group.workload].items
        recording, sequences, wish = Recording(), [], self.wish(depth)
        for number in numbers:
            item = items[number % len(items)]
            params = self.params(item, group, number, most)
            (sequence,) = self.llm.requests.sequences(Request.of(item.prompt, params, wish, tenant))
            if item.answer is not None:
                recording.texts[sequence.id] = [*item.prompt, *item.answer]
            sequences.append(sequence)
        lane = Lane(self.engine(group, depth, recording), sequences)
        try:
            while lane.engine.has_work:
                timed = lane.step(self.clock)
                tape.add(timed, lane.clock_s)
        finally:
            lane.clear()
        return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]

    def params(self, item: Item, group: Group, number: int, most: int | None) -> SamplingParams:
        """How a request is answered."""
        length = self.num_tokens if item.answer is None else len(item.answer)
        return SamplingParams(
            temperature=group.temperature,
            seed=self.seed + number,
            max_tokens=length if most is None else min(length, most),
            ignore_eos=True,
        )

    def engine(self, group: Group, depth: int, recording: Recording) -> Engine:
        """An engine over the LLM's weights and cache; plain decoding has no drafter that could cost anything.

        Its controller goes on from wave to wave: it begins as the stage's, or as the LLM's own, which runs nothing.
        """
        if (group, depth) not in self.controllers:
            self.controllers[group, depth] = deepcopy(self.controller or self.llm.engine.controller)
        return Engine(
            self.llm.engine.runner,
            (self.drafter or self.llm.drafter) if depth else None,
            controller=self.controllers[group, depth],
            options=EngineOptions(group.batch, self.llm.engine.options.chunk_tokens, prefix_cache=False),
            num_ids=self.llm.requests.num_ids,
            draws=recording if recording.texts else Draws,
            kernels=self.llm.engine.kernels,
        )


def waves(num_items: int, batch: int) -> Iterator[range]:
    """Numbers of requests, a batch at a time, until every item has had one; the last wave is as full as the others."""
    for first in range(0, max(num_items, batch), batch):
        yield range(first, first + batch)
