"""Scheduler: which sequences are read in the next round, and how many tokens of each.

The scheduler decides admission, prompt chunks and preemption. It counts only what the target itself needs: one slot per
token that is certain to be read. Guesses get the slots that are left, so drafting never delays or preempts a sequence.
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

SHORT = 32  # tokens of a short prompt, and the least that a pass reads
MOST = 512  # prompt tokens that a pass reads, where passes decide the size
ROOM = 1.5  # times a short prompt's pass that the part of a pass over prompts may take
LEAST_S = 0.005  # that a pass may take: less is not felt beside what HTTP takes
TRIES = 3  # of the measurement, of which the shortest counts
SLOWEST, FASTEST = 0.5, 1.25  # how fast the size follows


class RowPlan(NamedTuple):
    """One sequence's part of a round: the first `num_chunk` unread tokens, and its root if it draws a token."""

    sequence: Sequence
    num_chunk: int
    draws: bool

    @property
    def num_certain(self) -> int:
        """Tokens it is certain to read."""
        return self.num_chunk + self.draws


@dataclass(slots=True)
class ChunkSize:
    """Prompt tokens of a pass: `tokens`, which follow what passes take where `limit_s` says how long they may.

    A short prompt that arrives waits for the pass under way, so a pass over a long prompt should not take long. With
    "auto" the part of a pass that is over prompts may take ROOM times as long as one over a short prompt takes on the
    idle engine, and the short prompt's own pass comes next. Rows that are decoded beside take their part in any case.
    """

    tokens: int
    limit_s: float | None = None

    @classmethod
    def of(cls, options: EngineOptions, runner: Runner) -> ChunkSize:
        """As the options say; "auto" by what a short prompt takes an idle runner, in which nothing of it is left."""
        if isinstance(options.chunk_tokens, int):
            return cls(options.chunk_tokens)
        num_tokens, taken_s = min(SHORT, runner.window), []
        for _ in range(TRIES):
            started_s = time.perf_counter()
            states = runner.read([Read(-1, [0] * num_tokens, judged=(num_tokens - 1,))])
            states.logits.argmax().item()  # a GPU is waited for
            taken_s.append(time.perf_counter() - started_s)
            runner.release([-1])
        return cls(2 * SHORT, max(LEAST_S, ROOM * min(taken_s)))

    def record(self, outcome: Outcome) -> None:
        """Learn from a round that read prompts; of less than this size it shows at most that the size is too large."""
        if self.limit_s is None or not outcome.num_prompt_tokens or outcome.captured:
            return
        share = outcome.num_prompt_tokens / (outcome.num_prompt_tokens + outcome.num_tokens)
        taken_s = share * (outcome.pass_s + outcome.verdict_s)
        change = min(max(SLOWEST, self.limit_s / taken_s), FASTEST)
        if outcome.num_prompt_tokens >= self.tokens or change < 1:
            self.tokens = min(max(SHORT, round(self.tokens * change)), MOST)


class Waiting:
    """Sequences that have no place in the batch yet, in one queue for each tenant.

    Tenants take turns, so that nobody waits behind all that another has asked for; those of one keep their order.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.queues: dict[str | None, OrderedDict[int, Sequence]] = {}  # those that are not empty

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.by_id.values())

    def add(self, sequence: Sequence, first: bool = False) -> None:
        """Add a sequence as the last one of its tenant, or as the first."""
        queue = self.queues.setdefault(sequence.tenant, OrderedDict())
        self.by_id[sequence.id] = queue[sequence.id] = sequence
        if first:
            queue.move_to_end(sequence.id, last=False)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; whether it was there."""
        if self.by_id.pop(sequence.id, None) is None:
            return False
        queue = self.queues[sequence.tenant]
        del queue[sequence.id]
        if not queue:
            del self.queues[sequence.tenant]
        return True

    def clear(self) -> None:
        """Take all of them out."""
        self.by_id.clear()
        self.queues.clear()

    def next(self, running: Iterable[Sequence]) -> Sequence | None:
        """Whose turn it is: that of the tenant with the fewest `running`, and among those of the one that came first.

        Who was running before and lost its place goes before all others.
        """
        firsts = [next(iter(queue.values())) for queue in self.queues.values()]
        if len(firsts) < 2:
            return firsts[0] if firsts else None
        held = Counter(sequence.tenant for sequence in running)
        return min(firsts, key=lambda sequence: (not sequence.num_preempted, held[sequence.tenant], sequence.id))


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
        """Move waiting sequences into the batch while there is a place, and room for all they have to read."""
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

    def rows(self, alone: Sequence | None, held_back: Set[int]) -> list[RowPlan]:
        """Each running sequence's part; or the whole round for one. Those `held_back` have none."""
        sequences = [s for s in self.running if s.id not in held_back] if alone is None else [alone]
        unread = [len(sequence.tokens) - 1 - sequence.num_read for sequence in sequences]
        each = zip(sequences, unread, chunk_sizes(unread, self.chunk.tokens, self.oldest_first), strict=True)
        rows = [RowPlan(sequence, num, draws=num == num_unread) for sequence, num_unread, num in each]
        return [row for row in rows if row.num_certain]

    def left_out(self, rows: Seq[RowPlan], held_back: Set[int]) -> bool:
        """Whether the oldest sequence that has a prompt to read has no part in a pass of these rows."""
        unread = (s for s in self.running if s.id not in held_back and s.num_read < len(s.tokens) - 1)
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


def chunk_sizes(unread: Seq[int], most: int, oldest_first: bool) -> list[int]:
    """How many tokens of each text a pass reads, of its `unread` ones: short texts first, or those that came first."""
    sizes = [0] * len(unread)
    order = range(len(unread)) if any(unread) else ()
    for row in order if oldest_first else sorted(order, key=unread.__getitem__):
        sizes[row] = min(unread[row], most)
        most -= sizes[row]
    return sizes
