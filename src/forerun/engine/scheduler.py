"""Scheduler: which sequences are read in the next round, and how many tokens of each.

It decides admission, prompt chunks and preemption, and counts only the slots that the target itself needs: one for each
token that is certain to be read. Draft tokens get the slots that are left, so drafting never delays or preempts a
sequence.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from forerun.accept.outcome import Outcome
from forerun.config import EngineOptions
from forerun.engine.prefixes import Prefixes
from forerun.engine.sequence import Sequence, Status
from forerun.models.runner import Read, Runner

SHORT_PROMPT_TOKENS = 32  # length of a short prompt, and the least chunk size
MAX_CHUNK_TOKENS = 512  # the greatest chunk size with "auto"
CHUNK_TIME_FACTOR = 1.5  # time of a pass's prompt part, as a multiple of a short prompt's pass
MIN_CHUNK_S = 0.005  # the least time limit: less is not noticed beside the time of HTTP
NUM_TIMED_PASSES = 3  # the shortest counts
MIN_CHANGE, MAX_CHANGE = 0.5, 1.25  # bounds of one change of the size, as factors


class RowPlan(NamedTuple):
    """One sequence's part of a round: its first `num_chunk` unread tokens, and its root if it samples (`draws`)."""

    sequence: Sequence
    num_chunk: int
    draws: bool

    @property
    def num_certain(self) -> int:
        """Number of tokens that are certain to be read: the chunk and the root, without draft tokens."""
        return self.num_chunk + self.draws


@dataclass(slots=True)
class ChunkSize:
    """Prompt tokens per pass (`tokens`); with a time limit `limit_s` the size adapts to the measured times.

    A short prompt that arrives waits for the current pass, so a pass over a long prompt should be short. With "auto"
    the prompt part of a pass may take CHUNK_TIME_FACTOR times as long as a short prompt on an idle engine.
    """

    tokens: int
    limit_s: float | None = None

    @classmethod
    def of(cls, options: EngineOptions, runner: Runner) -> ChunkSize:
        """The size from the options; "auto" times a short prompt on the idle runner, which is cleared afterwards."""
        if isinstance(options.chunk_tokens, int):
            return cls(options.chunk_tokens)
        num_tokens, taken_s = min(SHORT_PROMPT_TOKENS, runner.window), []
        for _ in range(NUM_TIMED_PASSES):
            started_s = time.perf_counter()
            states = runner.read([Read(-1, [0] * num_tokens, judged=(num_tokens - 1,))])
            states.logits.argmax().item()  # waits for a GPU
            taken_s.append(time.perf_counter() - started_s)
            runner.release([-1])
        return cls(2 * SHORT_PROMPT_TOKENS, max(MIN_CHUNK_S, CHUNK_TIME_FACTOR * min(taken_s)))

    def record(self, outcome: Outcome) -> None:
        """Adapt the size after a round that read prompts. A round below the size can only make the size smaller."""
        if self.limit_s is None or not outcome.num_prompt_tokens or outcome.captured:
            return
        share = outcome.num_prompt_tokens / (outcome.num_prompt_tokens + outcome.num_tokens)
        taken_s = share * (outcome.pass_s + outcome.verdict_s)
        change = min(max(MIN_CHANGE, self.limit_s / taken_s), MAX_CHANGE)
        if outcome.num_prompt_tokens >= self.tokens or change < 1:
            self.tokens = min(max(SHORT_PROMPT_TOKENS, round(self.tokens * change)), MAX_CHUNK_TOKENS)


class Waiting:
    """Sequences that are not in the batch yet, in one queue per tenant.

    Tenants take turns, so nobody waits behind all requests of another tenant. Within a tenant the order is kept.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.queues: dict[str | None, OrderedDict[int, Sequence]] = {}  # by tenant, none of them empty

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.by_id.values())

    def add(self, sequence: Sequence, first: bool = False) -> None:
        """Append a sequence to its tenant's queue, or put it first."""
        queue = self.queues.setdefault(sequence.tenant, OrderedDict())
        self.by_id[sequence.id] = queue[sequence.id] = sequence
        if first:
            queue.move_to_end(sequence.id, last=False)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence; returns whether it was there."""
        if self.by_id.pop(sequence.id, None) is None:
            return False
        queue = self.queues[sequence.tenant]
        del queue[sequence.id]
        if not queue:
            del self.queues[sequence.tenant]
        return True

    def clear(self) -> None:
        """Remove all waiting sequences."""
        self.by_id.clear()
        self.queues.clear()

    def next(self, running: Iterable[Sequence]) -> Sequence | None:
        """The sequence to admit next: preempted ones first, then by fewest `running` of the tenant, then by id."""
        firsts = [next(iter(queue.values())) for queue in self.queues.values()]
        if len(firsts) < 2:
            return firsts[0] if firsts else None
        held = Counter(sequence.tenant for sequence in running)
        return min(firsts, key=lambda sequence: (not sequence.num_preempted, held[sequence.tenant], sequence.id))


class Scheduler:
    """Fair between tenants; first come, first served within one.

    Of the prompts being read, the shortest goes first; after a pass that leaves out the oldest one, the oldest goes
    first. When the cache is full, the youngest sequence is preempted and later recomputed.
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
        """Replace all queues by these sequences, in order of arrival."""
        self.running.clear()
        self.waiting.clear()
        for sequence in sorted(sequences, key=lambda s: s.id):
            self.waiting.add(sequence)

    def plan(self, alone: Sequence | None = None) -> tuple[list[RowPlan], list[Sequence]]:
        """The rows of the next round, by arrival, all certain to fit the cache; and the sequences preempted for them.

        With `alone`, a waiting or running sequence, the round has this sequence only.
        """
        if alone is None:
            self.admit()
            all_begun = all(sequence.num_read for sequence in self.running)
            held_back = set() if all_begun else self.prefixes.begin(self.running)
        else:
            self.start(alone)
            held_back = set()
        preempted: list[Sequence] = []
        rows = self.rows(alone, held_back)
        while not self.fits(rows):
            assert len(self.running) > 1, "one sequence alone does not fit the cache that was planned for it"
            preempted.append(self.preempt(next(s for s in reversed(self.running) if s is not alone)))
            rows = self.rows(alone, held_back)
        self.oldest_first = self.left_out(rows, held_back)
        return rows, preempted

    def admit(self) -> None:
        """Move waiting sequences into the batch while `max_num_seqs` and the cache's free blocks allow."""
        if not self.waiting.by_id:
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
        """Move a waiting sequence into the batch; no effect on a running one."""
        if self.waiting.remove(sequence):
            sequence.status = Status.RUNNING
            sequence.started_s = sequence.started_s or time.perf_counter()
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.id)

    def blocks_needed(self, sequence: Sequence) -> int:
        """Cache blocks for all tokens of a waiting sequence and one more block to grow, at most its final length."""
        size = self.cache.blocks.block_size
        known = len(sequence.tokens)
        return -(-min(known + size, known + sequence.room) // size)

    def rows(self, alone: Sequence | None, held_back: Set[int]) -> list[RowPlan]:
        """The plans of all running sequences except those `held_back`, or of `alone` only."""
        sequences = [s for s in self.running if s.id not in held_back] if alone is None else [alone]
        unread = [len(sequence.tokens) - 1 - sequence.num_read for sequence in sequences]
        each = zip(sequences, unread, chunk_sizes(unread, self.chunk.tokens, self.oldest_first), strict=True)
        rows = [RowPlan(sequence, num, draws=num == num_unread) for sequence, num_unread, num in each]
        return [row for row in rows if row.num_certain]

    def left_out(self, rows: Seq[RowPlan], held_back: Set[int]) -> bool:
        """Whether the oldest sequence with an unread prompt gets no tokens in these rows."""
        unread = (s for s in self.running if s.id not in held_back and s.num_read < len(s.tokens) - 1)
        oldest = next(unread, None)
        return oldest is not None and not any(row.sequence is oldest for row in rows)

    def fits(self, rows: list[RowPlan]) -> bool:
        """Whether the cache has slots for all tokens that these rows are certain to read."""
        return self.cache.can_reserve([r.sequence.id for r in rows], [r.num_certain for r in rows])

    def preempt(self, sequence: Sequence) -> Sequence:
        """Move a sequence back to the queue. Later it is recomputed (the same bits) or found in the prefix cache."""
        self.prefixes.retire(sequence)
        self.running.remove(sequence)
        sequence.status, sequence.num_read = Status.WAITING, 0
        sequence.num_preempted += 1
        self.waiting.add(sequence, first=True)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue or the batch."""
        if not self.waiting.remove(sequence) and sequence in self.running:
            self.running.remove(sequence)
        sequence.status = Status.FINISHED


def chunk_sizes(unread: Seq[int], most: int, oldest_first: bool) -> list[int]:
    """How many of its `unread` tokens each row reads, at most `most` in all: shortest first, or oldest first."""
    sizes = [0] * len(unread)
    order = range(len(unread)) if any(unread) else ()
    for row in order if oldest_first else sorted(order, key=unread.__getitem__):
        sizes[row] = min(unread[row], most)
        most -= sizes[row]
    return sizes
