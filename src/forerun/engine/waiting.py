"""Waiting: the sequences that have no place in the batch yet, and which of them is next.

Tenants take turns, so that nobody waits behind all that another has asked for; those of one tenant keep their order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from forerun.engine.sequence import Sequence


class Waiting:
    """Sequences in one queue for each tenant."""

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
