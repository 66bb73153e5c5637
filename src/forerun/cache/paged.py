"""PagedCache: the KV cache of one model, for many sequences of different lengths.

The first `length` tokens of a row are committed; the tokens after them, its *tail*, are being read and may be draft
tokens. `keep` commits tokens of the tail. A rejected draft token needs no rollback: it is just not kept. `blocks.py`
decides where rows are placed, `prefix.py` which blocks of removed rows stay cached, and the runner how draft tokens
form trees.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import proxy

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.cache.blocks import EMPTY, BlockRange, Blocks, Move, OutOfBlocks
from forerun.cache.prefix import PrefixStore
from forerun.device import upload


@dataclass(slots=True)
class Row:
    """One sequence: its committed tokens, the reserved tail after them, and the capacity of its blocks in tokens."""

    length: int = 0
    tail: int = 0
    room: int = 0


@dataclass(frozen=True, slots=True)
class Spare:
    """Free slots: per row in its last block, and free blocks of `block_size` slots for any row."""

    own: Mapping[int, int]
    num_blocks: int
    block_size: int

    def blocks_for(self, seq_id: int, num_tokens: int) -> int:
        """Number of free blocks that a row needs for `num_tokens` more tokens."""
        return -(-max(0, num_tokens - self.own[seq_id]) // self.block_size)


class PagedCache:
    """Keys and values by slot; a sequence's token t is in slot `start(seq_id) + t`, in every layer.

    All memory is allocated at construction and zeroed, since masked padding must be finite; on CPUs the system provides
    a page when it is first written, so a large cache takes no memory until it is used. `key_pad` slots at the end are
    never assigned, so that a row's view may be rounded up to a multiple of `key_pad`. Free slots hold stale but finite
    numbers.
    """

    keys: Float[Tensor, "layers kv_heads slots head_dim"]
    values: Float[Tensor, "layers kv_heads slots head_dim"]

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block_size: int = 64,
        key_pad: int = 512,
    ) -> None:
        self.blocks = Blocks(-(-num_tokens // block_size), block_size)
        shape = (layers, kv_heads, self.blocks.num_blocks * block_size + key_pad, head_dim)
        self.keys = zeroed(shape, dtype, torch.device(device))
        self.values = zeroed(shape, dtype, torch.device(device))
        weak = proxy(self)  # without a reference cycle the memory is freed with the last reference to the cache
        self.prefix_store = PrefixStore(self.blocks, lambda moves: weak._move(moves))
        self._rows: dict[int, Row] = {}

    @staticmethod
    def bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Size of one slot: a key and a value in every layer."""
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    @property
    def num_free_tokens(self) -> int:
        """Slots in free blocks. Rows may have more free slots in their last blocks."""
        return self.blocks.num_free * self.blocks.block_size

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def start(self, seq_id: int) -> int:
        """The first slot of a row; may change with every `reserve`. 0 for a row without tokens."""
        assert seq_id in self._rows, f"sequence {seq_id} has no row"
        return self.blocks.runs.get(seq_id, EMPTY).start * self.blocks.block_size

    def length(self, seq_id: int) -> int:
        """Number of committed tokens of a row."""
        return self._row(seq_id).length

    def tail(self, seq_id: int) -> int:
        """Number of tokens reserved after the committed ones; 0 for an unknown sequence."""
        row = self._rows.get(seq_id)
        return 0 if row is None else row.tail

    def reserve(self, seq_ids: Sequence[int], counts: Sequence[int]) -> None:
        """Reserve slots for `counts[i]` more tokens after the tail of each row; new ids get a row.

        Any row may be moved with all its tokens, so call `start` afterwards. Raises OutOfBlocks without any change.
        """
        num_blocks_of = self._num_blocks_of(seq_ids, counts)
        if num_blocks_of:
            moves = self.blocks.grow(num_blocks_of)
            taken = [self.blocks.run(seq_id) for seq_id in num_blocks_of]
            self.prefix_store.clear_blocks([*taken, *(BlockRange(move.target, move.count) for move in moves)], moves)
            self._move(moves)
        for seq_id, count in zip(seq_ids, counts, strict=True):
            self._rows.setdefault(seq_id, Row()).tail += count
        for seq_id, num_blocks in num_blocks_of.items():
            self._rows[seq_id].room = num_blocks * self.blocks.block_size

    def can_reserve(self, seq_ids: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether `reserve` would find enough blocks."""
        return self._num_added(self._num_blocks_of(seq_ids, counts)) <= self.blocks.num_free

    def spare(self, seq_ids: Sequence[int], counts: Sequence[int]) -> Spare:
        """The free slots after `reserve` with these arguments; `num_blocks` is negative if it would fail."""
        num_blocks_of, size = self._num_blocks_of(seq_ids, counts), self.blocks.block_size
        slots = {}
        for seq_id, count in zip(seq_ids, counts, strict=True):
            row = self._rows.get(seq_id, Row())
            room = num_blocks_of[seq_id] * size if seq_id in num_blocks_of else row.room
            slots[seq_id] = room - row.length - row.tail - count
        return Spare(slots, self.blocks.num_free - self._num_added(num_blocks_of), size)

    def keep(self, seq_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Commit a path of each row's tail and drop the rest of the tail.

        The tokens of row `seq_ids[i]` at the tail indices `paths[i]` become its next tokens, in this order. Tokens that
        are in place already (chains, prompt chunks) are not copied. Unused blocks are freed.
        """
        sources: list[int] = []
        targets: list[int] = []
        for seq_id, path in zip(seq_ids, paths, strict=True):
            row = self._row(seq_id)
            assert len(path) <= row.tail, f"{len(path)} tokens kept of a tail of {row.tail}"
            assert not path or 0 <= min(path) <= max(path) < row.tail, f"{path} leaves a tail of {row.tail}"
            first = self.start(seq_id) + row.length
            misplaced = [(node, j) for j, node in enumerate(path) if node != j]
            sources += [first + node for node, _ in misplaced]
            targets += [first + j for _, j in misplaced]
            self._settle(seq_id, row.length + len(path))
        if sources:
            self.gather_slots(sources, targets)

    def cut(self, seq_ids: Sequence[int], tails: Sequence[int]) -> None:
        """Drop all but the first `tails[i]` tokens of each row's tail."""
        for seq_id, tail in zip(seq_ids, tails, strict=True):
            row = self._row(seq_id)
            assert 0 <= tail <= row.tail, f"sequence {seq_id} has a tail of {row.tail}, not {tail} to keep"
            self._settle(seq_id, row.length, tail)

    def truncate(self, seq_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Drop each row's tail and its tokens from `lengths[i]` on."""
        for seq_id, length in zip(seq_ids, lengths, strict=True):
            current = self._row(seq_id).length
            assert 0 <= length <= current, f"sequence {seq_id} has {current} tokens, not {length} to keep"
            self._settle(seq_id, length)

    def adopt(self, seq_id: int, tokens: Sequence[int], salt: Hashable) -> int:
        """Start a row with the cached blocks of the longest cached prefix of `tokens`; returns its number of tokens.

        The row is as `reserve` and `keep` would have left it; without a cached prefix no row is made. Raises
        OutOfBlocks if there are not enough free blocks.
        """
        assert seq_id not in self._rows, f"sequence {seq_id} has a row already"
        chain, size = self.prefix_store.find(tokens, salt), self.blocks.block_size
        if not chain:
            return 0
        self.prefix_store.touch(chain)
        self.reserve([seq_id], [len(chain) * size])
        chain = [cached for cached in chain if cached in self.prefix_store]  # `reserve` may have evicted the last ones
        start = self.blocks.run(seq_id).start
        self._move(joined([Move(cached.block, start + i, 1) for i, cached in enumerate(chain)]))
        self._settle(seq_id, len(chain) * size)
        if not chain:
            self.release([seq_id])
        return len(chain) * size

    @torch.inference_mode()
    def fork(self, seq_id: int, source_id: int, num_tokens: int) -> None:
        """Start a row with a copy of another row's first committed tokens. Raises OutOfBlocks if too few are free."""
        assert seq_id not in self._rows, f"sequence {seq_id} has a row already"
        assert num_tokens <= self._row(source_id).length, f"sequence {source_id} has fewer tokens than {num_tokens}"
        self.reserve([seq_id], [num_tokens])
        self.copy_slots(self.start(source_id), self.start(seq_id), num_tokens)
        self._settle(seq_id, num_tokens)

    def retire(self, seq_id: int, tokens: Sequence[int], salt: Hashable) -> None:
        """Remove a row but keep its full blocks in the prefix cache, for texts with the same prefix and salt.

        An id without a row is ignored.
        """
        if (row := self._rows.get(seq_id)) is None:
            return
        assert row.length <= len(tokens), f"sequence {seq_id} has {row.length} tokens, its text {len(tokens)}"
        first, text = self.blocks.run(seq_id).start, tokens[: row.length]
        self.release([seq_id])
        self.prefix_store.add(text, salt, first)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Remove these rows; ids without a row are ignored."""
        for seq_id in seq_ids:
            self.blocks.free(seq_id)  # even without a row, which an interrupt inside `reserve` may have prevented
            self._rows.pop(seq_id, None)

    def clear(self) -> None:
        """Remove all rows and cached blocks, in any state, and zero their memory.

        It may hold NaN, which would spread even from masked padding.
        """
        self.wipe(self._rows)
        size = self.blocks.block_size
        for block in self.prefix_store.by_block:
            self.zero_slots(block * size, (block + 1) * size)
        self._rows.clear()
        self.blocks.clear()
        self.prefix_store.clear()

    @torch.inference_mode()
    def wipe(self, seq_ids: Iterable[int]) -> None:
        """Zero the keys and values of these rows, draft tokens included; ids without a row are ignored."""
        size = self.blocks.block_size
        for seq_id in seq_ids:
            run = self.blocks.run(seq_id)
            self.zero_slots(run.start * size, run.end * size)

    def check(self) -> None:
        """Assert that rows and blocks are consistent."""
        self.blocks.check()
        self.prefix_store.check()
        size = self.blocks.block_size
        for seq_id, row in self._rows.items():
            held = self.blocks.run(seq_id).count * size
            assert row.room == held, f"sequence {seq_id} has room for {row.room} tokens, its blocks hold {held}"
            assert min(row.length, row.tail) >= 0, f"sequence {seq_id}: {row}"
            assert held - size < row.length + row.tail <= held, f"sequence {seq_id}: {row} in {held} slots"
        free = self.blocks.num_blocks * size - sum(row.room for row in self._rows.values())
        assert free == self.num_free_tokens, f"{self.num_free_tokens} slots count as free, rows leave {free}"

    def _row(self, seq_id: int) -> Row:
        assert seq_id in self._rows, f"sequence {seq_id} has no row"
        return self._rows[seq_id]

    def _num_blocks_of(self, seq_ids: Sequence[int], counts: Sequence[int]) -> dict[int, int]:
        """The new numbers of blocks of those rows whose blocks have no room for `counts[i]` more tokens."""
        assert len(set(seq_ids)) == len(seq_ids) == len(counts), "sequences must be distinct, with one count for each"
        num_blocks_of: dict[int, int] = {}
        for seq_id, count in zip(seq_ids, counts, strict=True):
            row = self._rows.get(seq_id)
            used, room = (row.length + row.tail, row.room) if row else (0, 0)
            assert count >= 0, f"sequence {seq_id}: {count} tokens to reserve"
            if used + count > room:
                num_blocks_of[seq_id] = -(-(used + count) // self.blocks.block_size)
        return num_blocks_of

    def _num_added(self, num_blocks_of: Mapping[int, int]) -> int:
        """Number of free blocks that these rows need to get their new numbers of blocks."""
        return sum(n - self.blocks.run(seq_id).count for seq_id, n in num_blocks_of.items())

    def _settle(self, seq_id: int, length: int, tail: int = 0) -> None:
        """Set a row's numbers of committed tokens and of tail tokens; unused blocks are freed."""
        row, size = self._rows[seq_id], self.blocks.block_size
        row.length, row.tail = length, tail
        if row.room - length - tail >= size:
            num_blocks = -(-(length + tail) // size)
            self.blocks.shrink(seq_id, num_blocks)
            row.room = num_blocks * size

    @torch.inference_mode()
    def _move(self, moves: Sequence[Move]) -> None:
        """Carry out moves of entire blocks, in order, without temporaries."""
        size = self.blocks.block_size
        for move in moves:
            for piece in move.pieces():
                self.copy_slots(piece.source * size, piece.target * size, piece.count * size)

    def copy_slots(self, source: int, target: int, count: int) -> None:
        """Copy `count` slots from `source` to `target`; they do not overlap."""
        for tensor in (self.keys, self.values):
            tensor[:, :, target : target + count] = tensor[:, :, source : source + count]

    def zero_slots(self, first: int, end: int) -> None:
        """Zero keys and values of the slots from `first` to before `end`."""
        for tensor in (self.keys, self.values):
            tensor[:, :, first:end] = 0

    @torch.inference_mode()
    def gather_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots one by one. All are read before any is written, so sources and targets may overlap."""
        source, target = (upload(slots, torch.long, self.keys.device) for slots in (sources, targets))
        for tensor in (self.keys, self.values):
            tensor.index_copy_(2, target, tensor.index_select(2, source))


__all__ = ["OutOfBlocks", "PagedCache", "Spare"]


def joined(moves: Sequence[Move]) -> list[Move]:
    """These moves with adjacent ones merged."""
    fewer: list[Move] = []
    for move in moves:
        last = fewer[-1] if fewer else Move(-1, -1, 0)
        follows = (last.source + last.count, last.target + last.count) == (move.source, move.target)
        fewer[-1:] = [Move(last.source, last.target, last.count + move.count)] if follows else [*fewer[-1:], move]
    return fewer


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A page-aligned tensor of zeros; on CPUs the system zeroes its pages when they are first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = fresh_pages(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def fresh_pages(num_bytes: int) -> mmap.mmap:
    """Memory in small pages, which the system zeroes when they are first written. Raises MemoryError if there is none.

    A row writes to every layer and head, which are megabytes apart. With huge pages (2 MiB) the first tokens of a row
    would make the system zero hundreds of megabytes within one pass, which took 0.9 s.
    """
    if os.name != "posix":
        return mmap.mmap(-1, num_bytes)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a cache of {num_bytes} bytes") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        with suppress(OSError):  # a system without huge pages does not know the advice
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
