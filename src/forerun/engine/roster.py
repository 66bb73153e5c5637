"""Roster: the unfinished sequences of one engine, by id and by request, and the readers of their deltas.

This file decides what survives an interrupted round: the tokens of the sequences, and the deltas that were decided.
Everything else that an engine holds can be computed from the tokens. Every method here can be repeated from its
beginning after an interrupt, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.engine.delta import Delta
from forerun.engine.sequence import Sequence, Status

Hear = Callable[[Delta], None]


@dataclass(slots=True)
class Roster:
    """Unfinished sequences and their readers.

    `decided` holds the deltas of the current round, each with the number of tokens before it; it is None until all of
    them are computed. One assignment sets it and makes the round final; `settle` then applies it.
    """

    sequences: dict[int, Sequence] = field(default_factory=dict)
    samples: dict[int, dict[int, Sequence]] = field(default_factory=dict)  # the same by request
    readers: dict[int, Hear] = field(default_factory=dict)
    decided: Seq[tuple[int, Delta]] | None = None

    def add(self, sequence: Sequence, hear: Hear | None = None) -> None:
        """Add a sequence; `hear` is called with each of its deltas."""
        self.sequences[sequence.id] = sequence
        self.samples.setdefault(sequence.request_id, {})[sequence.id] = sequence
        if hear is not None:
            self.readers[sequence.id] = hear

    def samples_of(self, request_id: int) -> list[Sequence]:
        """The unfinished sequences of a request; none for an unknown request."""
        return list(self.samples.get(request_id, {}).values())

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is there. Whatever interrupts that, what is left is found by its id and removed."""
        self.readers.pop(sequence.id, None)
        samples = self.samples.get(sequence.request_id, {})
        samples.pop(sequence.id, None)
        if not samples:
            self.samples.pop(sequence.request_id, None)
        self.sequences.pop(sequence.id, None)

    def settle(self) -> None:
        """Apply `decided`: tokens to sequences, deltas to readers. Sequences that are gone already have theirs."""
        for place, delta in self.decided or ():
            sequence = self.sequences.get(delta.seq_id)
            if sequence is None:
                continue
            sequence.extend(place, delta.token_ids, delta.origins)
            if (hear := self.readers.get(sequence.id)) is not None:
                hear(delta)
            if delta.finish_reason is not None:
                sequence.status = Status.FINISHED

    def fail(self, sequence: Sequence, error: Exception) -> Delta:
        """Finish a sequence with an error, which its reader is told; it stays here until `restart`."""
        delta = Delta.failure(sequence, error)
        if (hear := self.readers.pop(sequence.id, None)) is not None:
            hear(delta)
        sequence.status = Status.FINISHED
        return delta

    def restart(self) -> list[Sequence]:
        """Remove finished sequences and prepare the others to be read again from their first token."""
        for sequence in list(self.sequences.values()):
            if sequence.status is Status.FINISHED:
                self.remove(sequence)
        self.samples.clear()
        for sequence in self.sequences.values():
            self.samples.setdefault(sequence.request_id, {})[sequence.id] = sequence
            sequence.restart()
        return list(self.sequences.values())
