"""Blocks: which blocks of the cache belong to which row. Accounting only: no tensors, no tokens.

A row's blocks are one contiguous run, so that attention reads a row as a view and needs no block table. The price is
that a run may have to move when it grows; the moves are returned as an ordered list for the owner of the tensors. To
make moves rare, runs are placed with free blocks after them; when only fragments are free, all runs are moved apart at
once, with an equal share of the free blocks after each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


class OutOfBlocks(Exception):
    """More blocks were requested than are free; nothing has changed. Callers handle it: users never see it."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """The blocks `start` to `end - 1` of a row."""

    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


EMPTY = BlockRange(0, 0)  # of a row without blocks


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `count` blocks from `source` to `target`; the two ranges may overlap."""

    source: int
    target: int
    count: int

    def pieces(self) -> Iterator[Move]:
        """The move in parts without overlap, in an order in which no part overwrites the source of a later one."""
        step = min(abs(self.source - self.target), self.count)
        firsts = range(0, self.count, step)
        for first in firsts if self.target < self.source else reversed(firsts):
            yield Move(self.source + first, self.target + first, min(step, self.count - first))


class Blocks:
    """`num_blocks` blocks of `block_size` slots, assigned to rows as contiguous runs. Deterministic.

    Rows are integers; only rows with blocks are stored.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert min(num_blocks + 1, block_size) > 0, f"{num_blocks} blocks of {block_size} slots"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self.runs: dict[int, BlockRange] = {}

    def __contains__(self, row: int) -> bool:
        return row in self.runs

    def run(self, row: int) -> BlockRange:
        """The blocks of a row; a row without blocks has the empty run at 0."""
        return self.runs.get(row, EMPTY)

    def grow(self, num_blocks_of: Mapping[int, int]) -> list[Move]:
        """Give each row at least `num_blocks_of[row]` blocks; new rows are placed.

        Returns the moves that the caller must carry out, in order, before it writes anything. Succeeds whenever enough
        blocks are free, however scattered; otherwise raises OutOfBlocks and changes nothing.
        """
        self._count_free()
        grown = {row: count for row, count in num_blocks_of.items() if count > self.run(row).count}
        num_new = sum(count - self.run(row).count for row, count in grown.items())
        if num_new > self.num_free:
            raise OutOfBlocks(f"{num_new} more blocks are needed, but only {self.num_free} are free")
        moves = self._place(grown)
        self._count_free()
        return moves

    def _place(self, grown: Mapping[int, int]) -> list[Move]:
        """Give these rows their new numbers of blocks; there are enough free blocks in total."""
        moves: list[Move] = []
        for row, count in grown.items():
            if self._extend(row, count):
                continue
            start = self._room(row, count)
            if start is None:
                return moves + self._respace(grown)
            moves += self._put(row, BlockRange(start, count))
        return moves

    def _count_free(self) -> None:
        """Count the free blocks again, since an interrupt may have left the number wrong."""
        self.num_free = self.num_blocks - sum(run.count for run in self.runs.values())

    def gaps(self) -> list[BlockRange]:
        """The runs of free blocks between those of rows, in order."""
        gaps, end = [], 0
        for run in sorted(self.runs.values(), key=lambda run: run.start):
            if run.start > end:
                gaps.append(BlockRange(end, run.start - end))
            end = run.end
        return [*gaps, BlockRange(end, self.num_blocks - end)] if end < self.num_blocks else gaps

    def shrink(self, row: int, count: int) -> None:
        """Keep the first `count` blocks of a row and free the rest; with 0 the row is removed."""
        run = self.run(row)
        assert 0 <= count <= run.count, f"row {row} has {run.count} blocks, not {count} to keep"
        if count:
            self.runs[row] = BlockRange(run.start, count)
        else:
            self.runs.pop(row, None)
        self._count_free()

    def free(self, row: int) -> None:
        """Free all blocks of a row, if it has any."""
        self.shrink(row, 0)

    def clear(self) -> None:
        """Free all blocks of all rows; works in any state."""
        self.runs.clear()
        self._count_free()

    def check(self) -> None:
        """Assert that runs are not empty, are within the cache, do not overlap, and that `num_free` is right."""
        end = 0
        for row, run in sorted(self.runs.items(), key=lambda item: item[1].start):
            assert run.count > 0, f"row {row} is stored without blocks"
            assert run.start >= end, f"row {row} starts at {run.start}, within a run that ends at {end}"
            end = run.end
        assert end <= self.num_blocks, f"a run ends at {end} of {self.num_blocks} blocks"
        used = sum(run.count for run in self.runs.values())
        assert self.num_free == self.num_blocks - used, f"{self.num_free} free, {used} of {self.num_blocks} used"

    def _extend(self, row: int, count: int) -> bool:
        """Grow a row in place, if the blocks after it are free."""
        run = self.runs.get(row)
        if run is None:
            return False
        end = min((r.start for r in self.runs.values() if r.start >= run.end), default=self.num_blocks)
        if run.start + count > end:
            return False
        self.runs[row] = BlockRange(run.start, count)
        return True

    def _room(self, row: int, count: int) -> int | None:
        """Where to put `count` blocks of a row: in the largest gap, its own run counted as free. None if none fits.

        The run before the gap will grow too, so half of the remaining blocks are left free for it.
        """
        best, best_size = None, count - 1
        end = 0
        others = [run for other, run in self.runs.items() if other != row]
        for run in [*sorted(others, key=lambda run: run.start), BlockRange(self.num_blocks, 0)]:
            size = run.start - end
            if size > best_size:
                best, best_size = end + (size - count) // 2 if end else 0, size
            end = run.end
        return best

    def _put(self, row: int, run: BlockRange) -> list[Move]:
        """Set a row's new run; returns the move of its blocks, if they have to be copied."""
        old = self.run(row)
        self.runs[row] = run
        return [Move(old.start, run.start, old.count)] if old.count and old.start != run.start else []

    def _respace(self, grown: Mapping[int, int]) -> list[Move]:
        """Lay out all runs again in their order, new rows last, with an equal share of the free blocks after each.

        Runs that move left are moved first, leftmost first; then those that move right, rightmost first. As the order
        of runs does not change, no move overwrites blocks that a later one reads.
        """
        new = [row for row in grown if row not in self.runs]
        rows = [*sorted(self.runs, key=lambda row: self.runs[row].start), *new]
        counts = [max(self.run(row).count, grown.get(row, 0)) for row in rows]
        num_free = self.num_blocks - sum(counts)
        moves: list[Move] = []
        start = 0
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            moves += self._put(row, BlockRange(start, count))
            start += count + num_free * (i + 1) // len(rows) - num_free * i // len(rows)
        return [m for m in moves if m.target < m.source] + [m for m in reversed(moves) if m.target > m.source]
