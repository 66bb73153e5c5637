"""Runs: executes and times one repetition of a cell.

This file decides how requests are grouped into waves, and what is timed. Every depth gets the same prompts and seeds.
The decoding speed is the number of tokens divided by the time of the rounds without prefill. A drafter's prefill counts
as decoding time, which is to its disadvantage.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from forerun.accept.delta import Delta
from forerun.accept.outcome import Outcome, Stats
from forerun.bench.material import Workload, hash_of
from forerun.bench.plan import CHOSEN, Group, Turn, depth_name
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
from forerun.sampling.recorded import Recorded
from forerun.stored import of_json

NGRAM = 8
WARMUP_TOKENS = 16
COUNTS = ("num_passes", "pass_s", "draft_pass_s", "num_rounds", "num_drafted", "num_accepted")  # of Stats and BenchRun
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class TimedRound:
    """One timed round: its deltas (none for pure prefill), its outcome, and its duration.

    `num_experts`: experts read, summed over all layers; 0 for dense targets.
    """

    deltas: Sequence[Delta]
    outcome: Outcome
    step_s: float
    num_experts: int = 0

    @property
    def depth(self) -> int:
        """The maximum number of draft tokens of a sequence."""
        return max((row.num_drafted for row in self.outcome.rows), default=0)


class StatsWithLast(Stats):
    """Engine counters that also store the last round's outcome."""

    last: Outcome

    def record(self, outcome: Outcome) -> None:
        """Count a round and store its outcome."""
        super().record(outcome)
        self.last = outcome


@dataclass(slots=True)
class TimedEngine:
    """An engine with its sequences, new counters, and the total time of its steps."""

    engine: Engine
    sequences: Sequence[EngineSequence]
    clock_s: float = 0.0
    counters: StatsWithLast = field(default_factory=StatsWithLast)

    def __post_init__(self) -> None:
        assert not self.engine.has_work, "the engine must have no other sequences, since they would be timed too"
        self.engine.stats = self.counters
        for sequence in self.sequences:
            self.engine.submit(sequence)

    def step(self, clock: Clock) -> TimedRound:
        """Run and time one round."""
        decoder = self.engine.runner.decoder
        num_before, started_s = decoder.num_experts_read, clock()
        deltas = self.engine.step()
        step_s = clock() - started_s
        self.clock_s += step_s
        return TimedRound(deltas, self.counters.last, step_s, decoder.num_experts_read - num_before)

    def clear(self) -> None:
        """Cancel unfinished requests."""
        for request_id in {sequence.request_id for sequence in self.sequences}:
            self.engine.cancel(request_id)


@dataclass(slots=True)
class RoundTotals:
    """Totals of rounds. `stats` and `num_decoded` exclude rounds with prefill."""

    stats: Stats = field(default_factory=Stats)
    num_decoded: int = 0
    decode_s: float = 0.0
    num_read: int = 0
    read_s: float = 0.0

    def count(self, outcome: Outcome, round_s: float) -> None:
        """Add a round and its duration."""
        if outcome.num_prompt_tokens:
            self.num_read += outcome.num_prompt_tokens
            self.read_s += round_s
        else:
            self.stats.record(outcome)
            self.num_decoded += sum(row.num_emitted for row in outcome.rows)
            self.decode_s += round_s

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed; 0 before any decoding round."""
        return self.num_decoded / self.decode_s if self.decode_s else 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all rounds."""
        return self.read_s + self.decode_s

    @property
    def pass_s(self) -> float:
        """Mean seconds of the target's pass in decoding rounds."""
        return self.stats.pass_s / self.stats.num_passes if self.stats.num_passes else 0.0


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The measurements of one repetition of a cell.

    `decode_s` and the counts up to `accepted_at_depth` exclude rounds with prefill; `num_tokens` and `total_s` include
    all rounds. `full_pass_s` and `full_draft_s` are medians over full rounds, in which the batch is full and every
    sequence is drafted to the full depth; None if there are none. `answers`: hashes of each request's tokens;
    `num_distinct` of their `num_ngrams` 8-grams are distinct within their answer.
    """

    depth: Annotated[int, CHOSEN]
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
    num_rounds_by_arm: tuple[tuple[str, int], ...] = ()  # rounds of sequences by drafter of a mix
    full_experts: float | None = None  # mean number per layer in a full round
    expected_experts: float | None = None  # this number for uniform, independent choices
    num_busy: float | None = None  # cores that other programs used during the run; None if unknown

    @classmethod
    def from_json(cls, entry: Any, turn: Turn, num_answers: int) -> BenchRun:
        """The inverse of JSON encoding for a run at this turn. Raises ValueError for anything else."""
        run: BenchRun = of_json(cls, entry)
        if (run.depth, run.repetition, len(run.answers)) != (turn.depth, turn.repetition, num_answers):
            raise ValueError("it is of another run")
        return run


@dataclass(slots=True)
class RunLog:
    """Collects the rounds of a run; in a full round every sequence has `num_drafted` draft tokens."""

    batch: int
    num_drafted: int
    drafters: Sequence[str] = ()
    totals: RoundTotals = field(default_factory=RoundTotals)
    first_s: dict[int, float] = field(default_factory=dict)  # by sequence: from its wave's start to its first token
    full: list[TimedRound] = field(default_factory=list)
    experts: ExpertsConfig | None = None

    def add(self, timed: TimedRound, clock_s: float) -> None:
        """Add a round; `clock_s`: the time since its wave started."""
        self.totals.count(timed.outcome, timed.step_s)
        for delta in timed.deltas:
            self.first_s.setdefault(delta.seq_id, clock_s)
        drafted = [row.num_drafted for row in timed.outcome.rows]
        if not timed.outcome.num_prompt_tokens and drafted == [self.num_drafted] * self.batch:
            self.full.append(timed)

    def run(self, turn: Turn, answers: Sequence[Sequence[int]], peak_bytes: int | None) -> BenchRun:
        """The measurements of the entire run."""
        totals, stats, experts = self.totals, self.totals.stats, self.experts if self.full else None
        full = [each.outcome for each in self.full]
        grams = [[tuple(a[i : i + NGRAM]) for i in range(len(a) - NGRAM + 1)] for a in answers]
        return BenchRun(
            depth=turn.depth,
            repetition=turn.repetition,
            first_s=statistics.median(self.first_s.values()),
            num_tokens=sum(map(len, answers)),
            total_s=totals.total_s,
            num_decoded=totals.num_decoded,
            decode_s=totals.decode_s,
            **{name: getattr(stats, name) for name in COUNTS},
            offered_at_depth=tuple(stats.offered_at_depth),
            accepted_at_depth=tuple(stats.accepted_at_depth),
            num_rounds_by_arm=tuple(
                (self.drafters[i], counts.num_rounds) for i, counts in sorted(stats.drafters.items())
            ),
            full_pass_s=statistics.median(each.pass_s for each in full) if full else None,
            full_draft_s=statistics.median(each.draft_s for each in full) if full else None,
            full_experts=None
            if experts is None
            else statistics.fmean(each.num_experts for each in self.full) / len(experts.layers),
            expected_experts=None
            if experts is None
            else expected_distinct(experts.count, experts.active, self.batch * (1 + self.num_drafted)),
            num_ngrams=sum(map(len, grams)),
            num_distinct=sum(len(set(each)) for each in grams),
            answers=tuple(hash_of(answer) for answer in answers),
            peak_bytes=peak_bytes,
        )


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """An idle LLM, the workloads to run on it, and the speculation of requests by depth.

    With `refills`, a prompt starts as soon as another one ends, instead of wave by wave. `drafter` replaces the LLM's
    drafter; engines start with a copy of `controller`, or of the LLM's controller. Requests may generate `num_spare`
    tokens more than an answer has.
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
        """Run one repetition: every prompt of the workload at least once, `group.batch` at a time."""
        own_peak, neighbours = forget_peak_rss(), Neighbours()
        run_log, sequences = self.new_log(group, turn.depth), list[EngineSequence]()
        turns = list(waves(len(self.workloads[group.workload].items), group.batch))
        for numbers in [range(turns[-1].stop)] if self.refills else turns:
            sequences += self.wave(group, turn.depth, numbers, run_log, tenant=repr((group, turn)))
        answers = [sequence.tokens[sequence.num_prompt :] for sequence in sequences]
        run = run_log.run(turn, answers, peak_rss_bytes() if own_peak else None)
        return replace(run, num_busy=neighbours.num_busy())

    def warm_up(self, group: Group, depths: Sequence[int]) -> None:
        """Run a few untimed rounds at every depth, so that kernels are compiled."""
        for depth in depths:
            self.wave(group, depth, range(group.batch), self.new_log(group, depth), WARMUP_TOKENS)

    def new_log(self, group: Group, depth: int) -> RunLog:
        """An empty log for a run at this depth."""
        experts = self.llm.engine.runner.decoder.config.experts
        return RunLog(group.batch, Budget.of(self.speculation(depth)).nodes, self.llm.drafter_names, experts=experts)

    def wave(
        self, group: Group, depth: int, numbers: Sequence[int], log: RunLog, most: int | None = None, tenant: str = ""
    ) -> Sequence[EngineSequence]:
        """Run the requests with these numbers to their ends, with at most `most` tokens each."""
        timed_engine = self.new_engine(group, depth, numbers, most, tenant)
        try:
            while timed_engine.engine.has_work:
                timed = timed_engine.step(self.clock)
                log.add(timed, timed_engine.clock_s)
        finally:
            timed_engine.clear()
        return timed_engine.sequences

    def new_engine(
        self, group: Group, depth: int, numbers: Sequence[int], most: int | None = None, tenant: str = ""
    ) -> TimedEngine:
        """Requests with these numbers in a new engine on the LLM's weights and cache.

        Plain decoding (depth 0) has no drafter. Each repetition has a different `tenant`, so that drafters cannot use
        earlier answers to the same prompts. All engines of a cell share one controller.
        """
        items = self.workloads[group.workload].items
        recorded, sequences, speculation = dict[int, list[int]](), list[EngineSequence](), self.speculation(depth)
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
                recorded[sequences[-1].id] = [*item.prompt, *item.answer]
        if (group, depth) not in self.controllers:
            self.controllers[group, depth] = deepcopy(self.controller or self.llm.engine.controller)
        engine = Engine(
            self.llm.engine.runner,
            (self.drafter or self.llm.drafter) if depth else None,
            controller=self.controllers[group, depth],
            options=EngineOptions(group.batch, self.llm.engine.options.chunk_tokens, prefix_cache=False),
            num_ids=self.llm.requests.num_ids,
            draws=partial(Recorded, texts=recorded) if recorded else Draws,
            kernels=self.llm.engine.kernels,
        )
        return TimedEngine(engine, sequences)


def run_name(group: Group, turn: Turn) -> str:
    """The name under which a run is stored."""
    return f"run, {group.name}, depth {depth_name(turn.depth)}, repetition {turn.repetition}"


def waves(num_items: int, batch: int) -> Iterator[range]:
    """Request numbers, a full batch at a time, until every item has had one."""
    for first in range(0, max(num_items, batch), batch):
        yield range(first, first + batch)
