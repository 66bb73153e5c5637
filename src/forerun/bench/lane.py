"""A lane: one engine that works on some sequences, with a clock that runs only during its own steps, and its pace.

This file decides what the clock covers, and defines speed: tokens divided by the time of the rounds that read no
prompt. What a drafter spends on reading a prompt counts as decoding time, which is to its disadvantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.accept.delta import Delta
from forerun.accept.outcome import Outcome, Stats
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence as EngineSequence

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
