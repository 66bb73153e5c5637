"""Inquiry: which sequence it is that breaks rounds, found out by reading less and less at a time.

A round that raised without naming anybody may have failed on a guess, on one sequence's data, or on the machine. The
inquiry decides what the next rounds read: first the same sequences without guesses; if that raises too, one sequence at
a time, and the one with which a round raises again is the culprit. Whoever gains a token meanwhile is cleared. Nothing
of this is paid for before a round has raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forerun.engine.sequence import Sequence


@dataclass(slots=True)
class Inquiry:
    """One search, from the first round that raised until every suspect is cleared or gone.

    `error` is what was raised first. `suspects` are the sequences of the last round that raised, with the number of
    tokens that each of them had; `cleared` says whether any such has gained one since.
    """

    error: BaseException
    suspects: dict[int, int] = field(default_factory=dict)
    alone: bool = False
    cleared: bool = False

    def suspect(self, sequences: Iterable[Sequence]) -> None:
        """A round of these raised."""
        self.suspects = {sequence.id: len(sequence.tokens) for sequence in sequences}

    def clear(self, sequences: Mapping[int, Sequence]) -> bool:
        """Clear who has gained a token since, or is not among `sequences` any more; whether nobody is left."""
        left = {seq_id: count for seq_id, count in self.suspects.items() if seq_id in sequences}
        self.suspects = {seq_id: count for seq_id, count in left.items() if len(sequences[seq_id].tokens) == count}
        self.cleared |= len(self.suspects) < len(left)
        return not self.suspects

    def next(self, sequences: Mapping[int, Sequence]) -> Sequence | None:
        """The one to be read alone now; None where all are read."""
        return sequences[next(iter(self.suspects))] if self.alone else None
