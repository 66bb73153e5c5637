"""Roster: the sequences of one engine, by id and by request, and what the round under way has decided of them.

The roster is what survives a round that is torn apart: the texts and their readers. Everything else an engine holds
follows from the texts. Its changes are such that doing one again, from the beginning, does no harm.
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
    """Unfinished sequences, and who hears of them.

    `decided` is what the round under way gives, with each delta the number of tokens before it: None until all of it
    is computed. It is set by one assignment, which makes the round final; `settle` does the rest.
    """

    sequences: dict[int, Sequence] = field(default_factory=dict)
    samples: dict[int, dict[int, Sequence]] = field(default_factory=dict)  # the same by request
    readers: dict[int, Hear] = field(default_factory=dict)
    decided: Seq[tuple[int, Delta]] | None = None

    def add(self, sequence: Sequence, hear: Hear | None = None) -> None:
        """Enter a sequence, and who is given its deltas."""
        self.sequences[sequence.id] = sequence
        self.samples.setdefault(sequence.request_id, {})[sequence.id] = sequence
        if hear is not None:
            self.readers[sequence.id] = hear

    def samples_of(self, request_id: int) -> list[Sequence]:
        """The sequences of a request; one that is unknown or finished has none."""
        return list(self.samples.get(request_id, {}).values())

    def remove(self, sequence: Sequence) -> None:
        """Strike a sequence out; one that is not there stays away."""
        self.sequences.pop(sequence.id, None)
        self.readers.pop(sequence.id, None)
        samples = self.samples.get(sequence.request_id, {})
        samples.pop(sequence.id, None)
        if not samples:
            self.samples.pop(sequence.request_id, None)

    def settle(self) -> None:
        """Give what was decided: tokens to their sequences, deltas to their readers. Who has left has been given it."""
        for place, delta in self.decided or ():
            sequence = self.sequences.get(delta.seq_id)
            if sequence is None:
                continue
            sequence.extend(place, delta.token_ids, delta.origins)
            if (hear := self.readers.get(sequence.id)) is not None:
                hear(delta)
            if delta.finish_reason is not None:
                sequence.status = Status.FINISHED

    def restart(self) -> list[Sequence]:
        """Let those who are finished leave; the others wait to be read anew."""
        for sequence in list(self.sequences.values()):
            if sequence.status is Status.FINISHED:
                self.remove(sequence)
        self.samples.clear()
        for sequence in self.sequences.values():
            self.samples.setdefault(sequence.request_id, {})[sequence.id] = sequence
            sequence.restart()
        return list(self.sequences.values())
