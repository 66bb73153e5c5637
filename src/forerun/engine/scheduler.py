"""Scheduler: which sequences are read in the next round, and how many tokens of each.

The scheduler decides admission, prompt chunks and preemption. It counts only what the target itself needs: one slot per
token that is certain to be read. Guesses get the slots that are left, so drafting never delays or preempts a sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.engine.chunk import ChunkSize
from forerun.engine.prefixes import Prefixes
from forerun.engine.sequence import Sequence, Status
from forerun.engine.waiting import Waiting


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One sequence's part of a round: the first `num_chunk` unread tokens, and its root if it draws a token."""

    sequence: Sequence
    num_chunk: int
    draws: bool

    @property
    def num_certain(self) -> int:
        """Tokens it is certain to read."""
        return self.num_chunk + self.draws


class Scheduler:
    """Tenants take turns; of one, first come, first served.

    Of the prompts that are being read the shortest goes first, so that it does not wait until long ones are read; a
    pass that leaves the oldest out is followed by one that it is first in. When memory runs out the youngest sequence
    is preempted and later read again.
    """

    def __init__(self, prefixes: Prefixes, max_num_seqs: int, chunk: ChunkSize) -> None:
        self.prefixes = prefixes
        self.cache = prefixes.cache
        self.max_num_seqs = max_num_seqs
        self.chunk = chunk
        self.oldest_first = False  # whether the last pass left out the oldest prompt
        self.waiting = Waiting()
        self.running: list[Sequence] = []  # by arrival

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.add(sequence)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Queue these sequences, by arrival, and no others."""
        self.running.clear()
        self.waiting.clear()
        for sequence in sorted(sequences, key=lambda s: s.id):
            self.waiting.add(sequence)

    def plan(self, alone: Sequence | None = None) -> tuple[list[RowPlan], list[Sequence]]:
        """The rows of the next round, by arrival, all certain to fit the cache; and who was preempted for them.

        With `alone`, a waiting or running sequence, the round is that sequence's only.
        """
        if alone is None:
            self.admit()
            waiting = self.prefixes.begin(self.running)
        else:
            self.start(alone)
            waiting = set()
        preempted: list[Sequence] = []
        rows = self.rows(alone, waiting)
        while not self.fits(rows):
            assert len(self.running) > 1, "one sequence alone does not fit the cache that was planned for it"
            preempted.append(self.preempt(next(s for s in reversed(self.running) if s is not alone)))
            rows = self.rows(alone, waiting)
        self.oldest_first = self.left_out(rows, waiting)
        return rows, preempted

    def admit(self) -> None:
        """Move waiting sequences into the batch while there is a place, and room for all they have to read."""
        if not self.waiting:
            return
        running = [s.id for s in self.running]
        num_blocks = self.cache.spare(running, [len(s.unread) + 1 for s in self.running]).num_blocks
        while len(self.running) < self.max_num_seqs and (sequence := self.waiting.next(self.running)) is not None:
            need = self.blocks_needed(sequence)
            if self.running and need > num_blocks:
                return
            num_blocks -= need
            self.start(sequence)

    def start(self, sequence: Sequence) -> None:
        """Move a waiting sequence into the batch; one that is there stays."""
        if self.waiting.remove(sequence):
            sequence.status = Status.RUNNING
            sequence.started_s = sequence.started_s or time.perf_counter()
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.id)

    def blocks_needed(self, sequence: Sequence) -> int:
        """Cache blocks for all that a waiting sequence has to read, and one more if it can ever grow into that."""
        size = self.cache.blocks.block_size
        known = len(sequence.tokens)
        return -(-min(known + size, known + sequence.room) // size)

    def rows(self, alone: Sequence | None, waiting: Set[int]) -> list[RowPlan]:
        """Each running sequence's part; or the whole round for one. Those that are `waiting` have none."""
        sequences = [s for s in self.running if s.id not in waiting] if alone is None else [alone]
        unread = [len(sequence.tokens) - 1 - sequence.num_read for sequence in sequences]
        each = zip(sequences, unread, self.chunks(unread), strict=True)
        rows = [RowPlan(sequence, num, draws=num == num_unread) for sequence, num_unread, num in each]
        return [row for row in rows if row.num_certain]

    def chunks(self, unread: Seq[int]) -> list[int]:
        """How many of so many unread tokens each sequence is read, which are given by arrival."""
        found, left = [0] * len(unread), self.chunk.tokens
        order = range(len(unread))
        for row in order if self.oldest_first else sorted(order, key=lambda row: unread[row]):
            found[row] = min(unread[row], left)
            left -= found[row]
        return found

    def left_out(self, rows: Seq[RowPlan], waiting: Set[int]) -> bool:
        """Whether the oldest sequence that has a prompt to read has no part in a pass of these rows."""
        unread = (s for s in self.running if s.id not in waiting and s.num_read < len(s.tokens) - 1)
        oldest = next(unread, None)
        return oldest is not None and not any(row.sequence is oldest for row in rows)

    def fits(self, rows: list[RowPlan]) -> bool:
        """Whether the cache has room for what these rows are certain to read."""
        return self.cache.can_reserve([r.sequence.id for r in rows], [r.num_certain for r in rows])

    def preempt(self, sequence: Sequence) -> Sequence:
        """Send a sequence back to the queue; it will be read again, with the same bits, if it is not known any more."""
        self.prefixes.retire(sequence)
        self.running.remove(sequence)
        sequence.status, sequence.num_read = Status.WAITING, 0
        sequence.num_preempted += 1
        self.waiting.add(sequence, first=True)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if not self.waiting.remove(sequence) and sequence in self.running:
            self.running.remove(sequence)
        sequence.status = Status.FINISHED
