"""Scheduler: which sequences are read in the next round, and how many tokens of each.

The scheduler decides admission, prompt chunks and preemption. It counts only what the target itself needs: one slot per
token that is certain to be read. Guesses get the slots that are left, so drafting never delays or preempts a sequence.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass

from forerun.engine.prefixes import Prefixes
from forerun.engine.sequence import Sequence, Status


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
    """First come, first served. When memory runs out the youngest is preempted and later read again."""

    def __init__(self, prefixes: Prefixes, max_num_seqs: int, chunk_tokens: int) -> None:
        self.prefixes = prefixes
        self.cache = prefixes.cache
        self.max_num_seqs = max_num_seqs
        self.chunk_tokens = chunk_tokens
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()  # by id, so that anyone can leave at once
        self.running: list[Sequence] = []  # by arrival

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting[sequence.id] = sequence

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Queue these sequences, by arrival, and no others."""
        self.running.clear()
        self.waiting = OrderedDict((sequence.id, sequence) for sequence in sorted(sequences, key=lambda s: s.id))

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
        return rows, preempted

    def admit(self) -> None:
        """Move waiting sequences into the batch while there is a place, and room for all they have to read."""
        if not self.waiting:
            return
        running = [s.id for s in self.running]
        num_blocks = self.cache.spare(running, [len(s.unread) + 1 for s in self.running]).num_blocks
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = next(iter(self.waiting.values()))
            need = self.blocks_needed(sequence)
            if self.running and need > num_blocks:
                return
            num_blocks -= need
            self.start(sequence)

    def start(self, sequence: Sequence) -> None:
        """Move a waiting sequence into the batch; one that is there stays."""
        if self.waiting.pop(sequence.id, None) is not None:
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
        """Each running sequence's part, prompt tokens shared out by arrival; or the whole round for one.

        Those that are `waiting` have none.
        """
        chunk_left, rows = self.chunk_tokens, []
        for sequence in self.running if alone is None else [alone]:
            if sequence.id in waiting:
                continue
            num_unread = len(sequence.tokens) - 1 - sequence.num_read
            num_chunk = min(num_unread, chunk_left)
            chunk_left -= num_chunk
            row = RowPlan(sequence, num_chunk, draws=num_chunk == num_unread)
            if row.num_certain:
                rows.append(row)
        return rows

    def fits(self, rows: list[RowPlan]) -> bool:
        """Whether the cache has room for what these rows are certain to read."""
        return self.cache.can_reserve([r.sequence.id for r in rows], [r.num_certain for r in rows])

    def preempt(self, sequence: Sequence) -> Sequence:
        """Send a sequence back to the queue; it will be read again, with the same bits, if it is not known any more."""
        self.prefixes.retire(sequence)
        self.running.remove(sequence)
        sequence.status, sequence.num_read = Status.WAITING, 0
        sequence.num_preempted += 1
        self.waiting[sequence.id] = sequence
        self.waiting.move_to_end(sequence.id, last=False)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if self.waiting.pop(sequence.id, None) is None and sequence in self.running:
            self.running.remove(sequence)
        sequence.status = Status.FINISHED
