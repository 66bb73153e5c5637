"""Scheduler: the sequences of the next round, and how many tokens the target reads of each.

It decides admission, prompt chunks and preemption. It reserves cache slots only for tokens that are certain to be read,
not for draft tokens, which get the slots that are left: drafting never delays or preempts a sequence.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from forerun.accept.outcome import Outcome
from forerun.config import EngineOptions
from forerun.engine.prefixes import Prefixes
from forerun.engine.sequence import Sequence, Status
from forerun.models.runner import Read, Runner

SHORT_PROMPT_TOKENS = 32  # length of a short prompt, and the smallest chunk size
MAX_CHUNK_TOKENS = 512  # the largest chunk size with "auto"
CHUNK_TIME_FACTOR = 1.5  # time limit of a pass's prompt part, as a multiple of the time of a short prompt's pass
MIN_CHUNK_S = 0.005  # the smallest time limit: a shorter pass would not be noticed, given the time of HTTP
NUM_TIMED_PASSES = 3  # the fastest counts
MIN_CHANGE, MAX_CHANGE = 0.5, 1.25  # bounds of the factor by which the chunk size changes at once


class RowPlan(NamedTuple):
    """One sequence's part of a round: its first `num_chunk` unread tokens, and its root if it samples (`draws`)."""

    sequence: Sequence
    num_chunk: int
    draws: bool

    @property
    def num_certain(self) -> int:
        """Number of tokens that are certain to be read: the chunk and the root, without draft tokens."""
        return self.num_chunk + self.draws

    def max_draft_depth(self, forced: Seq[int]) -> int:
        """The largest useful draft depth: one less than the remaining tokens, since a round adds one token more.

        0 during prefill, with forced tokens, and if the grammar's masks take too long to verify draft tokens.
        """
        constraint = self.sequence.constraint
        slow = constraint is not None and constraint.slow
        return 0 if self.num_chunk or forced or slow else self.sequence.room - 1


@dataclass(slots=True)
class ChunkSize:
    """The chunk size of prefill: at most `tokens` prompt tokens per pass. With a time limit `limit_s` it adapts.

    A new short prompt waits for the current pass, so passes over a long prompt should be short. With "auto" the prompt
    part of a pass may take CHUNK_TIME_FACTOR times as long as a short prompt on an idle engine.
    """

    tokens: int
    limit_s: float | None = None

    @classmethod
    def of(cls, options: EngineOptions, runner: Runner) -> ChunkSize:
        """The size from the options. For "auto", a short prompt is timed on the idle runner and released again."""
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
        """Adapt the size after a round with prefill. A round with fewer tokens than the size can only reduce it."""
        if self.limit_s is None or not outcome.num_prompt_tokens or outcome.captured:
            return
        share = outcome.num_prompt_tokens / (outcome.num_prompt_tokens + outcome.num_tokens)
        taken_s = share * (outcome.pass_s + outcome.verdict_s)
        change = min(max(MIN_CHANGE, self.limit_s / taken_s), MAX_CHANGE)
        if outcome.num_prompt_tokens >= self.tokens or change < 1:
            self.tokens = min(max(SHORT_PROMPT_TOKENS, round(self.tokens * change)), MAX_CHUNK_TOKENS)


class Waiting:
    """Sequences that are not in the batch, in one queue per tenant.

    Tenants take turns, so no request waits for all requests of another tenant. Within a tenant the queue is first in,
    first out.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.queues: dict[str | None, OrderedDict[int, Sequence]] = {}  # by tenant, none of them empty

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, sequence: Sequence, first: bool = False) -> None:
        """Append a sequence to its tenant's queue, or put it at the front."""
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
        """The sequence to admit next: preempted ones first, then by fewest `running` of its tenant, then by id."""
        firsts = [next(iter(queue.values())) for queue in self.queues.values()]
        if len(firsts) < 2:
            return firsts[0] if firsts else None
        held = Counter(sequence.tenant for sequence in running)
        return min(firsts, key=lambda sequence: (not sequence.num_preempted, held[sequence.tenant], sequence.id))


class Scheduler:
    """Plans rounds: fair between tenants, and first come, first served within a tenant.

    Among prompts being prefilled the shortest goes first; after a pass without tokens of the oldest one, the oldest
    goes first. When the cache is full, the youngest sequence is preempted and later recomputed.
    """

    def __init__(self, prefixes: Prefixes, max_num_seqs: int, chunk: ChunkSize) -> None:
        self.prefixes = prefixes
        self.cache = prefixes.cache
        self.max_num_seqs = max_num_seqs
        self.chunk = chunk
        self.oldest_first = False  # whether the last pass read no token of the oldest prompt
        self.waiting = Waiting()
        self.running: list[Sequence] = []  # in order of arrival

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.add(sequence)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Put all of these sequences, and no others, in the queue, in order of arrival."""
        self.running.clear()
        self.waiting.clear()
        for sequence in sorted(sequences, key=lambda s: s.id):
            self.waiting.add(sequence)

    def plan(self, alone: Sequence | None = None) -> tuple[list[RowPlan], list[Sequence]]:
        """The rows of the next round, in order of arrival, and the sequences preempted to fit them in the cache.

        With `alone`, a waiting or running sequence, the round has this sequence only.
        """
        held_back = set[int]()
        if alone is not None:
            self.start(alone)
        else:
            self.admit()
            if not all(sequence.num_read for sequence in self.running):
                held_back = self.prefixes.start_new(self.running)
        preempted: list[Sequence] = []
        rows = self.rows(alone, held_back)
        while not self.fits(rows):
            assert len(self.running) > 1, "a single sequence does not fit the cache, against the memory plan"
            preempted.append(self.preempt(next(s for s in reversed(self.running) if s is not alone)))
            rows = self.rows(alone, held_back)
        self.oldest_first = self.skips_oldest(rows, held_back)
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
        """Cache blocks for all tokens of a waiting sequence plus one block to grow, up to its final length."""
        size = self.cache.blocks.block_size
        known = len(sequence.tokens)
        return -(-min(known + size, known + sequence.room) // size)

    def rows(self, alone: Sequence | None, held_back: Set[int]) -> list[RowPlan]:
        """The plans of all running sequences except those in `held_back`, or of `alone` only."""
        sequences = [s for s in self.running if s.id not in held_back] if alone is None else [alone]
        unread = [len(sequence.tokens) - 1 - sequence.num_read for sequence in sequences]
        sizes = chunk_sizes(unread, self.chunk.tokens, self.oldest_first)
        rows = [
            RowPlan(sequence, size, draws=size == num_unread)
            for sequence, num_unread, size in zip(sequences, unread, sizes, strict=True)
        ]
        return [row for row in rows if row.num_certain]

    def skips_oldest(self, rows: Seq[RowPlan], held_back: Set[int]) -> bool:
        """Whether these rows have no token of the oldest sequence whose prompt is not read yet."""
        unread = (s for s in self.running if s.id not in held_back and s.num_read < len(s.tokens) - 1)
        oldest = next(unread, None)
        return oldest is not None and not any(row.sequence is oldest for row in rows)

    def fits(self, rows: list[RowPlan]) -> bool:
        """Whether the cache has slots for all tokens of these rows, draft tokens excluded."""
        return self.cache.can_reserve([r.sequence.id for r in rows], [r.num_certain for r in rows])

    def preempt(self, sequence: Sequence) -> Sequence:
        """Move a sequence back to the queue. Its KV cache is recomputed later, or found in the prefix cache."""
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


def chunk_sizes(unread: Seq[int], max_tokens: int, oldest_first: bool) -> list[int]:
    """How many of its `unread` tokens each row reads: shortest first or oldest first, `max_tokens` in all."""
    sizes = [0] * len(unread)
    order = range(len(unread)) if any(unread) else ()
    for row in order if oldest_first else sorted(order, key=unread.__getitem__):
        sizes[row] = min(unread[row], max_tokens)
        max_tokens -= sizes[row]
    return sizes
