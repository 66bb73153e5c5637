"""PrefixStore: the prefix cache: full blocks of texts that were read, found by their tokens, in blocks of no row.

This module decides which blocks of a released row stay cached, their keys, and which are evicted first. A cached block
is identified by its own tokens and all tokens before it: blocks form a tree. A lookup compares tokens, not only their
hash, so texts are never confused; and each salt has a tree of its own, so nobody finds the texts of another salt.

Cached blocks are copied into the row of a text with this prefix, and not shared by rows. Attention reads a row as one
run of slots, on CPUs and GPUs alike, in every format; a row in two runs would need a second start in every kernel. The
copy takes little time compared with the prefill that it saves: benchmarks/RESULTS.md has both times.

The store owns no memory. Its blocks count as free, and rows take them whenever they need them: a cached block in the
way is moved to another free one or, if there is none, the least recently used block is evicted. So cached blocks never
make a sequence wait, and the memory plan does not count them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from forerun.cache.blocks import BlockRange, Blocks, Move


@dataclass(slots=True, eq=False)
class KeptBlock:
    """A cached block of keys and values. `key` are its tokens; the root of a tree has the salt instead."""

    parent: KeptBlock | None
    key: Hashable
    block: int = -1
    used: int = 0  # the larger, the later
    children: dict[Hashable, KeptBlock] = field(default_factory=dict)


class PrefixStore:
    """The blocks cached in the free blocks of `blocks`; `move` carries out moves of whole blocks, in order."""

    def __init__(self, blocks: Blocks, move: Callable[[Sequence[Move]], None]) -> None:
        self.blocks = blocks
        self.move = move
        self.roots: dict[Hashable, KeptBlock] = {}
        self.at: dict[int, KeptBlock] = {}  # by where they lie
        self.order: OrderedDict[KeptBlock, None] = OrderedDict()  # the least recently used first
        self.clock = 0

    def __len__(self) -> int:
        return len(self.at)

    def __contains__(self, kept: KeptBlock) -> bool:
        return kept in self.order

    def find(self, tokens: Sequence[int], salt: Hashable) -> list[KeptBlock]:
        """The longest chain of cached blocks with which this text begins."""
        chain: list[KeptBlock] = []
        place = self.roots.get(salt)
        for key in self.keys(tokens) if place is not None else ():
            assert place is not None, "a chain goes on from a block"
            place = place.children.get(key)
            if place is None:
                break
            chain.append(place)
        return chain

    def touch(self, chain: Sequence[KeptBlock]) -> None:
        """Mark a chain from its root as used now: deeper blocks are evicted sooner."""
        for kept in reversed(chain):
            self.clock += 1
            kept.used = self.clock
            self.order[kept] = None
            self.order.move_to_end(kept)

    def add(self, tokens: Sequence[int], salt: Hashable, first: int) -> None:
        """Cache the full blocks of a text, which lie in consecutive free blocks from `first` on."""
        place = self.roots.get(salt) or KeptBlock(None, salt)
        chain: list[KeptBlock] = []
        for i, key in enumerate(self.keys(tokens)):
            child = place.children.get(key)
            if child is None:
                assert first + i not in self.at, f"block {first + i} is kept for another text"
                child = place.children[key] = self.at[first + i] = KeptBlock(place, key, first + i)
                if place.parent is None:
                    self.roots[salt] = place  # with its first block, so that an interrupt leaves no root without any
            place = child
            chain.append(child)
        self.touch(chain)

    def make_way(self, taken: Sequence[BlockRange], moves: Sequence[Move]) -> None:
        """Clear the blocks that rows have `taken`; call it before `moves` of rows, whose sources are not used either.

        Their contents move to free blocks; if there are none the least recently used blocks are evicted.
        """
        inside = (self.at.get(block) for run in taken for block in range(run.start, run.end))
        displaced = {kept: None for kept in inside if kept is not None}
        if not displaced:
            return
        sources = {block for move in moves for block in range(move.source, move.source + move.count)}
        holes, moves_made = self.holes(sources, len(displaced)), []
        for kept in sorted(displaced, key=lambda kept: -kept.used):  # the oldest are given up, and are the last here
            hole = next(holes, None)
            while hole is None and kept in self.order:
                oldest = next(iter(self.order))
                self.give_up(oldest)
                hole = None if oldest in displaced else oldest.block
            if hole is not None:
                moves_made.append(Move(kept.block, hole, 1))
                del self.at[kept.block]
                kept.block = hole
                self.at[hole] = kept
        self.move(moves_made)

    def holes(self, apart: set[int], num_displaced: int) -> Iterator[int]:
        """Free blocks without contents, outside `apart`, the last ones first: rows grow towards those later."""
        if self.blocks.num_free <= len(self.at) - num_displaced:
            return
        for gap in reversed(self.blocks.gaps()):
            for block in reversed(range(gap.start, gap.end)):
                if block not in self.at and block not in apart:
                    yield block

    def give_up(self, kept: KeptBlock) -> None:
        """Evict a block that no cached block follows."""
        assert not kept.children, "what is behind a block is used no later than the block"
        del self.order[kept], self.at[kept.block]
        if kept.parent is not None:
            del kept.parent.children[kept.key]
            self.prune(kept.parent)

    def prune(self, place: KeptBlock) -> None:
        """Remove the root of a tree without blocks."""
        if place.parent is None and not place.children:
            self.roots.pop(place.key, None)

    def clear(self) -> None:
        """Evict all cached blocks."""
        self.roots.clear()
        self.at.clear()
        self.order.clear()

    def keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The keys of a text's full blocks, as bytes."""
        size = self.blocks.block_size
        for end in range(size, len(tokens) + 1, size):
            yield array("i", tokens[end - size : end]).tobytes()

    def check(self) -> None:
        """Assert that blocks lie outside all rows, and that no block is used later than the one before it."""
        free = {block for gap in self.blocks.gaps() for block in range(gap.start, gap.end)}
        assert set(self.at) <= free, f"kept within rows: {sorted(set(self.at) - free)}"
        assert [*self.order] == sorted(self.at.values(), key=lambda kept: kept.used), "the order is not that of use"
        for block, kept in self.at.items():
            assert kept.block == block, f"block {kept.block} is said to lie in {block}"
            assert kept.parent is not None, "a root has no block"
            assert kept.parent.children[kept.key] is kept, "a block hangs where it is not found"
            assert kept.parent.parent is None or kept.parent.used > kept.used, "a block outlives the one before it"
        assert all(root.children for root in self.roots.values()), "a tree without blocks"
