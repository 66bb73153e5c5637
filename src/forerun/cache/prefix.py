"""PrefixStore: the prefix cache: full blocks of earlier texts, found by their tokens, in the cache's free blocks.

This file decides which blocks of a released row stay cached, their keys, and which are evicted first. A cached block is
identified by its own tokens and all tokens before it, so blocks form a tree. A lookup compares tokens and not only
their hash, so texts are never confused. Each salt has its own tree, so a text is found with its own salt only.

Cached blocks are copied into the row of a new text with this prefix; rows do not share blocks. Attention reads a row as
one run of slots, on CPUs and GPUs and in every format; a row in two runs would need a second start in every kernel. The
copy takes little time compared with the prefill that it saves: benchmarks/RESULTS.md has both times.

The store owns no memory. Its blocks count as free, and rows take them whenever they need them: a cached block in the
way is moved to another free block or, if there is none, the least recently used block is evicted. So cached blocks
never make a sequence wait, and the memory plan does not count them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from forerun.cache.blocks import BlockRange, Blocks, Move


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A cached block of keys and values. `key` is its tokens; the root of a tree has no block, and the salt as key."""

    parent: CachedBlock | None
    key: Hashable
    block: int = -1
    used: int = 0  # the store's clock when it was last used
    children: dict[Hashable, CachedBlock] = field(default_factory=dict)


class PrefixStore:
    """The prefix cache in the free blocks of `blocks`; `move` carries out moves of entire blocks, in order."""

    def __init__(self, blocks: Blocks, move: Callable[[Sequence[Move]], None]) -> None:
        self.blocks = blocks
        self.move = move
        self.roots: dict[Hashable, CachedBlock] = {}
        self.by_block: dict[int, CachedBlock] = {}
        self.order: OrderedDict[CachedBlock, None] = OrderedDict()  # the least recently used first
        self.clock = 0

    def __len__(self) -> int:
        return len(self.by_block)

    def __contains__(self, cached: CachedBlock) -> bool:
        return cached in self.order

    def find(self, tokens: Sequence[int], salt: Hashable) -> list[CachedBlock]:
        """The cached blocks of this text's longest cached prefix, in order."""
        chain: list[CachedBlock] = []
        node = self.roots.get(salt)
        if node is None:
            return chain
        for key in self.keys(tokens):
            node = node.children.get(key)
            if node is None:
                break
            chain.append(node)
        return chain

    def touch(self, chain: Sequence[CachedBlock]) -> None:
        """Mark the blocks of a prefix as used now; the later ones count as used earlier, and are evicted first."""
        for cached in reversed(chain):
            self.clock += 1
            cached.used = self.clock
            self.order[cached] = None
            self.order.move_to_end(cached)

    def add(self, tokens: Sequence[int], salt: Hashable, first: int) -> None:
        """Cache the full blocks of a text, which lie in consecutive free blocks from `first` on."""
        node = self.roots.get(salt) or CachedBlock(None, salt)
        chain: list[CachedBlock] = []
        for i, key in enumerate(self.keys(tokens)):
            child = node.children.get(key)
            if child is None:
                assert first + i not in self.by_block, f"block {first + i} holds a cached block of another text"
                child = node.children[key] = self.by_block[first + i] = CachedBlock(node, key, first + i)
                if node.parent is None:
                    self.roots[salt] = node  # only now, so that an interrupt cannot leave a root without blocks
            node = child
            chain.append(child)
        self.touch(chain)

    def clear_blocks(self, taken: Sequence[BlockRange], moves: Sequence[Move]) -> None:
        """Empty the blocks that rows have `taken`; must be called before the rows' `moves` are carried out.

        Cached blocks move to other free blocks, except to sources of `moves`, which still hold data of rows. If there
        are none, the least recently used blocks are evicted.
        """
        inside = (self.by_block.get(block) for run in taken for block in range(run.start, run.end))
        displaced = {cached: None for cached in inside if cached is not None}
        if not displaced:
            return
        sources = {block for move in moves for block in range(move.source, move.source + move.count)}
        targets, made = self.empty_blocks(sources, len(displaced)), []
        for cached in sorted(displaced, key=lambda each: -each.used):  # the least recently used last: they are evicted
            target = next(targets, None)
            while target is None and cached in self.order:
                oldest = next(iter(self.order))
                self.evict(oldest)
                target = None if oldest in displaced else oldest.block
            if target is not None:
                made.append(Move(cached.block, target, 1))
                del self.by_block[cached.block]
                cached.block = target
                self.by_block[target] = cached
        self.move(made)

    def empty_blocks(self, excluded: set[int], num_displaced: int) -> Iterator[int]:
        """Free blocks that hold nothing, in falling order, since a growing row reaches the end of a gap last."""
        if self.blocks.num_free <= len(self.by_block) - num_displaced:
            return
        for gap in reversed(self.blocks.gaps()):
            for block in reversed(range(gap.start, gap.end)):
                if block not in self.by_block and block not in excluded:
                    yield block

    def evict(self, cached: CachedBlock) -> None:
        """Evict a block that has no cached continuation, and the root of its tree if that holds no other block."""
        parent = cached.parent
        assert parent is not None, "a root is evicted"
        assert not cached.children, "a block is evicted before a later block of its text"
        del self.order[cached], self.by_block[cached.block], parent.children[cached.key]
        if parent.parent is None and not parent.children:
            del self.roots[parent.key]

    def clear(self) -> None:
        """Evict all cached blocks."""
        self.roots.clear()
        self.by_block.clear()
        self.order.clear()

    def keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The keys of a text's full blocks, as bytes."""
        size = self.blocks.block_size
        for end in range(size, len(tokens) + 1, size):
            yield array("i", tokens[end - size : end]).tobytes()

    def check(self) -> None:
        """Assert that cached blocks are outside all rows, and that no block was used later than the one before it."""
        free = {block for gap in self.blocks.gaps() for block in range(gap.start, gap.end)}
        assert set(self.by_block) <= free, f"cached blocks inside rows: {sorted(set(self.by_block) - free)}"
        by_use = sorted(self.by_block.values(), key=lambda cached: cached.used)
        assert [*self.order] == by_use, "the order of eviction is not the order of use"
        for block, cached in self.by_block.items():
            assert cached.block == block, f"block {cached.block} is registered as {block}"
            assert cached.parent is not None, "a root has a block"
            assert cached.parent.children[cached.key] is cached, "a block is not where a lookup finds it"
            before = cached.parent
            assert before.parent is None or before.used > cached.used, "a block was used later than the one before it"
        assert all(root.children for root in self.roots.values()), "a root has no blocks"
