"""Runs: one repetition of a cell, executed by the engine and recorded; and a lane, the engine of every measurement.

This file decides how requests are grouped into waves, what is timed, and what is kept of it. Every depth gets the same
prompts and seeds. It defines speed: tokens divided by the time of the rounds that read no prompt. What a drafter spends
on reading a prompt counts as decoding time, which is to its disadvantage.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.accept.delta import Delta
from forerun.accept.outcome import Outcome, Stats
from forerun.bench.material import Workload, hash_of
from forerun.bench.plan import Group, Turn, depth_name
from forerun.config import EngineOptions, Speculation
from forerun.control.controller import Controller
from forerun.draft.base import Budget, Drafter
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence as EngineSequence
from forerun.llm import LLM
from forerun.machine import Neighbours, forget_peak_rss, peak_rss_bytes
from forerun.models.experts_config import ExpertsConfig, expected_distinct
from forerun.request import Request
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.sampling.recorded import Recording

NGRAM = 8
WARMUP_TOKENS = 16
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Timed:
    """One round: what each sequence gained (nothing while only prompts are read), what it counted, what it took.

    `num_experts` are those that it read, of all layers together; 0 of dense targets.
    """

    deltas: Sequence[Delta]
    outcome: Outcome
    step_s: float
    num_experts: int = 0

    @property
    def depth(self) -> int:
        """Guesses of the sequence that has most."""
        return max((row.num_drafted for row in self.outcome.rows), default=0)

    @property
    def others_s(self) -> float:
        """Seconds of all but the drafting."""
        return self.step_s - self.outcome.draft_s


class Ledger(Stats):
    """Counters of an engine that also keep its last round."""

    last: Outcome

    def record(self, outcome: Outcome) -> None:
        """Add one round."""
        super().record(outcome)
        self.last = outcome


@dataclass(slots=True)
class Lane:
    """An engine, the sequences that it works for, and how long its steps have taken. Its counters start anew."""

    engine: Engine
    sequences: Sequence[EngineSequence]
    clock_s: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        assert not self.engine.has_work, "a lane's engine works for it alone, or its clock would hold others' time"
        self.engine.stats = self.ledger
        for sequence in self.sequences:
            self.engine.submit(sequence)

    def step(self, clock: Clock) -> Timed:
        """One timed round."""
        decoder = self.engine.runner.decoder
        num_before, started_s = decoder.num_experts_read, clock()
        deltas = self.engine.step()
        step_s = clock() - started_s
        self.clock_s += step_s
        return Timed(deltas, self.ledger.last, step_s, decoder.num_experts_read - num_before)

    def clear(self) -> None:
        """Take out what is not finished."""
        for request_id in {sequence.request_id for sequence in self.sequences}:
            self.engine.cancel(request_id)


@dataclass(slots=True)
class Pace:
    """Rounds added up. `stats` and `num_decoded` count the rounds of decoding only."""

    stats: Stats = field(default_factory=Stats)
    num_decoded: int = 0
    decode_s: float = 0.0
    num_read: int = 0
    read_s: float = 0.0

    def count(self, outcome: Outcome, round_s: float) -> None:
        """One more round, and the time it took in all."""
        if outcome.num_prompt_tokens:
            self.num_read += outcome.num_prompt_tokens
            self.read_s += round_s
        else:
            self.stats.record(outcome)
            self.num_decoded += sum(row.num_emitted for row in outcome.rows)
            self.decode_s += round_s

    @property
    def tokens_per_s(self) -> float:
        """Speed of decoding; 0 before any."""
        return self.num_decoded / self.decode_s if self.decode_s else 0.0

    @property
    def total_s(self) -> float:
        """All the time the rounds took."""
        return self.read_s + self.decode_s

    @property
    def pass_s(self) -> float:
        """The target's pass in a round of decoding, on average."""
        return self.stats.pass_s / self.stats.num_passes if self.stats.num_passes else 0.0


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One repetition of one cell.

    `decode_s` and what is counted up to `accepted_at_depth` are of rounds that read no prompt, `num_tokens` and
    `total_s` of all rounds. `full_pass_s` and `full_draft_s` are medians over the full rounds: every sequence of the
    batch there and drafted as far as can be; None without any. `answers` are hashes of each request's tokens;
    `num_distinct` of their `num_ngrams` 8-grams were new to their answer.
    """

    depth: int
    repetition: int
    first_s: float
    num_tokens: int
    total_s: float
    num_decoded: int
    decode_s: float
    num_passes: int
    pass_s: float
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
    num_busy: float | None = None  # cores that other programs kept busy meanwhile, as far as that is known

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> BenchRun:
        """The run that JSON was made of; it knows lists alone."""
        return cls(**{name: as_tuple(value) for name, value in entry.items()})


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

    def run(self, turn: Turn, answers: Sequence[Sequence[int]], peak_bytes: int | None) -> BenchRun:
        """All of it, to be written down."""
        pace, stats, experts = self.pace, self.pace.stats, self.experts if self.full else None
        full = [each.outcome for each in self.full]
        grams = [[tuple(a[i : i + NGRAM]) for i in range(len(a) - NGRAM + 1)] for a in answers]
        return BenchRun(
            depth=turn.depth,
            repetition=turn.repetition,
            first_s=statistics.median(self.first_s.values()),
            num_tokens=sum(map(len, answers)),
            total_s=pace.total_s,
            num_decoded=pace.num_decoded,
            decode_s=pace.decode_s,
            num_passes=stats.num_passes,
            pass_s=stats.pass_s,
            draft_pass_s=stats.draft_pass_s,
            num_rounds=stats.num_rounds,
            num_drafted=stats.num_drafted,
            num_accepted=stats.num_accepted,
            offered_at_depth=tuple(stats.offered_at_depth),
            accepted_at_depth=tuple(stats.accepted_at_depth),
            num_rounds_by_arm=tuple(
                (self.arms[arm], counts.num_rounds) for arm, counts in sorted(stats.drafters.items())
            ),
            full_pass_s=statistics.median(each.pass_s for each in full) if full else None,
            full_draft_s=statistics.median(each.draft_s for each in full) if full else None,
            full_experts=None
            if experts is None
            else statistics.fmean(each.num_experts for each in self.full) / len(experts.layers),
            expected_experts=None
            if experts is None
            else expected_distinct(experts.count, experts.active, self.batch * (1 + self.num_guesses)),
            num_ngrams=sum(map(len, grams)),
            num_distinct=sum(len(set(each)) for each in grams),
            answers=tuple(hash_of(answer) for answer in answers),
            peak_bytes=peak_bytes,
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """An LLM with a drafter, nothing under way, the texts to run on it, and what `speculation` asks of it at a depth.

    Where `refills` is set, a prompt begins as soon as another one ends, instead of wave by wave. `drafter`, if there is
    one, drafts in the place of the LLM's; engines begin with a copy of `controller`, or of the LLM's. Requests may go
    on for `num_spare` tokens more than an answer has.
    """

    llm: LLM
    workloads: Mapping[str, Workload]
    num_tokens: int
    seed: int = 0
    clock: Clock = time.perf_counter
    speculation: Callable[[int], Speculation] = Speculation
    controllers: dict[tuple[Group, int], Controller] = field(default_factory=dict)
    refills: bool = False
    drafter: Drafter | None = None
    controller: Controller | None = None
    num_spare: int = 0

    def run(self, group: Group, turn: Turn) -> BenchRun:
        """One repetition: every prompt of the workload at least once, `group.batch` of them at a time."""
        own_peak, neighbours = forget_peak_rss(), Neighbours()
        tape, sequences = self.tape(group, turn.depth), list[EngineSequence]()
        turns = list(waves(len(self.workloads[group.workload].items), group.batch))
        for numbers in [range(turns[-1].stop)] if self.refills else turns:
            sequences += self.wave(group, turn.depth, numbers, tape, tenant=repr((group, turn)))
        answers = [sequence.tokens[sequence.num_prompt :] for sequence in sequences]
        run = tape.run(turn, answers, peak_rss_bytes() if own_peak else None)
        return replace(run, num_busy=neighbours.num_busy())

    def warm_up(self, group: Group, depths: Sequence[int]) -> None:
        """A few rounds at every depth, which compile kernels and are not counted."""
        for depth in depths:
            self.wave(group, depth, range(group.batch), self.tape(group, depth), WARMUP_TOKENS)

    def tape(self, group: Group, depth: int) -> Tape:
        """A tape for a run at this depth."""
        experts = self.llm.engine.runner.decoder.config.experts
        return Tape(group.batch, Budget.of(self.speculation(depth)).nodes, self.llm.drafter_names, experts=experts)

    def wave(
        self, group: Group, depth: int, numbers: Sequence[int], tape: Tape, most: int | None = None, tenant: str = ""
    ) -> Sequence[EngineSequence]:
        """Requests of these numbers, all at once, to their ends, at `most` tokens of each answer."""
        lane = self.lane(group, depth, numbers, most, tenant)
        try:
            while lane.engine.has_work:
                timed = lane.step(self.clock)
                tape.add(timed, lane.clock_s)
        finally:
            lane.clear()
        return lane.sequences

    def lane(self, group: Group, depth: int, numbers: Sequence[int], most: int | None = None, tenant: str = "") -> Lane:
        """Requests of these numbers in an engine over the LLM's weights and cache.

        Plain decoding has no drafter that could cost anything. Each repetition is a `tenant` of its own: no drafter
        shall remember what an earlier one answered to the same. A controller goes on from lane to lane: it begins as
        the stage's, or as the LLM's own, which runs nothing.
        """
        items = self.workloads[group.workload].items
        recording, sequences, speculation = Recording(), list[EngineSequence](), self.speculation(depth)
        for number in numbers:
            item = items[number % len(items)]
            length = self.num_spare + (self.num_tokens if item.answer is None else len(item.answer))
            params = SamplingParams(
                temperature=group.temperature,
                seed=self.seed + number,
                max_tokens=length if most is None else min(length, most),
                ignore_eos=True,
            )
            sequences += self.llm.requests.sequences(Request.of(item.prompt, params, speculation, tenant))
            if item.answer is not None:
                recording.texts[sequences[-1].id] = [*item.prompt, *item.answer]
        if (group, depth) not in self.controllers:
            self.controllers[group, depth] = deepcopy(self.controller or self.llm.engine.controller)
        engine = Engine(
            self.llm.engine.runner,
            (self.drafter or self.llm.drafter) if depth else None,
            controller=self.controllers[group, depth],
            options=EngineOptions(group.batch, self.llm.engine.options.chunk_tokens, prefix_cache=False),
            num_ids=self.llm.requests.num_ids,
            draws=recording if recording.texts else Draws,
            kernels=self.llm.engine.kernels,
        )
        return Lane(engine, sequences)


def as_tuple(value: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def run_name(group: Group, turn: Turn) -> str:
    """What a run is called where it is kept."""
    return f"run, {group.name}, depth {depth_name(turn.depth)}, repetition {turn.repetition}"


def waves(num_items: int, batch: int) -> Iterator[range]:
    """Numbers of requests, a batch at a time, until every item has had one; the last wave is as full as the others."""
    for first in range(0, max(num_items, batch), batch):
        yield range(first, first + batch)
