"""A lane: one engine that works on some sequences, with a clock that runs only during its own steps.

This file decides what the clock covers: the engine's steps and nothing else. `pace.py` sums up the rounds.
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


class Ledger(Stats):
    """Counters that keep what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []

    def record(self, outcome: Outcome) -> None:
        """Add one round."""
        super().record(outcome)
        self.outcomes.append(outcome)


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
        return Timed(deltas, self.ledger.outcomes[-1], step_s, decoder.num_experts_read - num_before)

    def clear(self) -> None:
        """Take out what is not finished."""
        for request_id in {sequence.request_id for sequence in self.sequences}:
            self.engine.cancel(request_id)
