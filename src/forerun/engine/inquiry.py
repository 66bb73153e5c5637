"""Inquiry: the search for the sequence that makes rounds raise.

A round that raises without naming a request may have failed on a guess, on the data of one sequence, or for lack of
memory. This file decides what the next rounds read: first the same sequences without guesses and, if that raises too,
one sequence at a time; the sequence with which a round raises again is at fault. A sequence that gains a token is
cleared. None of this runs unless a round has raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from forerun.cache.paged import OutOfBlocks
from forerun.engine.sequence import Sequence, Status
from forerun.errors import OutOfMemory, RequestFailed, RoundFailed

MEMORY = (MemoryError, torch.OutOfMemoryError, OutOfBlocks)
CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch's, whose error is a RuntimeError


@dataclass(slots=True)
class Inquiry:
    """One search, from the first round that raised until every suspect is cleared or gone.

    `error` is the first error. `suspects` maps the sequences of the last round that raised to the number of tokens that
    they had; `cleared` says whether any of them has gained one since. `alone`: suspects are read one at a time.
    """

    error: BaseException
    suspects: dict[int, int] = field(default_factory=dict)
    alone: bool = False
    cleared: bool = False

    def suspect(self, sequences: Iterable[Sequence]) -> None:
        """Suspect the sequences of a round that raised."""
        self.suspects = {sequence.id: len(sequence.tokens) for sequence in sequences}

    def clear(self, sequences: Mapping[int, Sequence]) -> bool:
        """Clear suspects that have gained a token or are not in `sequences`; True if none is left."""
        left = {seq_id: count for seq_id, count in self.suspects.items() if seq_id in sequences}
        self.suspects = {seq_id: count for seq_id, count in left.items() if len(sequences[seq_id].tokens) == count}
        self.cleared |= len(self.suspects) < len(left)
        return not self.suspects

    def next(self, sequences: Mapping[int, Sequence]) -> Sequence | None:
        """The suspect to read alone in the next round; None where all sequences are read."""
        return sequences[next(iter(self.suspects))] if self.alone else None


def failure_of(culprit: Sequence, error: BaseException) -> RequestFailed:
    """The error to end a request with that was read alone when a round raised."""
    if isinstance(error, RequestFailed):
        return error
    lacking = isinstance(error, MEMORY) or CPU_ALLOCATOR in str(error)
    return (OutOfMemory if lacking else RoundFailed)(culprit.id, error)


def to_be_ended(sequences: Iterable[Sequence], inquiry: Inquiry | None) -> Sequence | None:
    """The unfinished sequence to end where the engine cannot recover; None if there is none.

    It is the suspect that was read alone, or else the longest one, which needs most memory to be read again.
    """
    suspect = next(iter(inquiry.suspects), None) if inquiry is not None and inquiry.alone else None
    left = [sequence for sequence in sequences if sequence.status is not Status.FINISHED]
    return max(left, key=lambda sequence: (sequence.id == suspect, len(sequence.tokens)), default=None)
