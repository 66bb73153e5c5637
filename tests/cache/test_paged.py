"""The cache compared with a plain-Python oracle: every committed token is where `start` and `length` say."""

import mmap
from array import array
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forerun.cache.blocks import OutOfBlocks
from forerun.cache.paged import PagedCache, fresh_pages
from forerun.cache.prefix import CachedBlock

LAYERS, KV_HEADS, HEAD_DIM, BLOCK, KEY_PAD = 2, 2, 3, 4, 8
IDS, SALTS = st.integers(0, 4), st.sampled_from("ab")


def make_cache(num_tokens: int, block_size: int = BLOCK) -> PagedCache:
    return PagedCache(
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_tokens=num_tokens,
        dtype=torch.float64,
        block_size=block_size,
        key_pad=KEY_PAD,
    )


def marks(tokens: Sequence[int]) -> torch.Tensor:
    """Distinct numbers for every element of every token: [layers, kv_heads, tokens, head_dim]."""
    element = torch.arange(LAYERS * KV_HEADS * HEAD_DIM, dtype=torch.float64).view(LAYERS, KV_HEADS, 1, HEAD_DIM)
    return torch.tensor(tokens, dtype=torch.float64)[:, None] * 100 + element


def check_slots(cache: PagedCache, first: int, tokens: Sequence[int]) -> None:
    """Assert that the slots from `first` on hold the keys and values of these tokens."""
    view = slice(first, first + len(tokens))
    assert torch.equal(cache.keys[:, :, view], marks(tokens))
    assert torch.equal(cache.values[:, :, view], -marks(tokens))


def tokens_up_to(kept: CachedBlock) -> list[int]:
    """The text that ends with a cached block."""
    before = [] if kept.parent is None else tokens_up_to(kept.parent)
    if kept.parent is None:
        return before
    assert isinstance(kept.key, bytes)
    return [*before, *array("i", kept.key)]


class Oracle:
    """A cache, and for each row a plain list of its expected tokens.

    All tokens are different numbers, so texts share a prefix only if one was begun from another.
    """

    def __init__(self, num_tokens: int) -> None:
        self.cache = make_cache(num_tokens)
        self.committed: dict[int, list[int]] = {}
        self.tails: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.past: list[tuple[str, list[int]]] = []  # salts and texts of retired rows
        self.written = 0

    def reserve(self, counts: dict[int, int]) -> None:
        """Reserve and write a fresh number into every new slot."""
        self.cache.reserve(list(counts), list(counts.values()))
        for seq_id, count in counts.items():
            self.committed.setdefault(seq_id, [])
            tail = self.tails.setdefault(seq_id, [])
            tokens = list(range(self.written + 1, self.written + 1 + count))
            self.written += count
            first = self.cache.start(seq_id) + self.cache.length(seq_id) + len(tail)
            self.cache.keys[:, :, first : first + count] = marks(tokens)
            self.cache.values[:, :, first : first + count] = -marks(tokens)
            tail += tokens

    def forget(self, seq_id: int) -> None:
        self.committed.pop(seq_id, None)
        self.tails.pop(seq_id, None)
        self.salts.pop(seq_id, None)
        assert seq_id not in self.cache

    def keep(self, paths: dict[int, list[int]]) -> None:
        self.cache.keep(list(paths), list(paths.values()))
        for seq_id, path in paths.items():
            self.committed[seq_id] += [self.tails[seq_id][node] for node in path]
            self.tails[seq_id] = []

    def blocks_used(self, more: dict[int, int]) -> int:
        """Blocks needed if `more` tokens were reserved."""
        rows = self.committed.keys() | more.keys()
        sizes = (len(self.committed.get(r, [])) + len(self.tails.get(r, [])) + more.get(r, 0) for r in rows)
        return sum(-(-size // BLOCK) for size in sizes)

    def check(self) -> None:
        cache = self.cache
        cache.check()
        assert cache.num_rows == len(self.committed)
        assert cache.num_free_tokens == (cache.blocks.num_blocks - self.blocks_used({})) * BLOCK
        for seq_id, committed in self.committed.items():
            assert seq_id in cache
            tokens = committed + self.tails[seq_id]
            assert (cache.length(seq_id), cache.tail(seq_id)) == (len(committed), len(self.tails[seq_id]))
            start = cache.start(seq_id)
            check_slots(cache, start, tokens)
            padded = -(-len(tokens) // KEY_PAD) * KEY_PAD
            assert cache.keys[:, :, start : start + padded].shape[2] == padded
        for kept in cache.prefix_store.order:
            check_slots(cache, kept.block * BLOCK, tokens_up_to(kept)[-BLOCK:])


class CacheMachine(RuleBasedStateMachine):
    """Any interleaving of calls, rows of all lengths, in a cache that is nearly always too small."""

    @initialize(num_tokens=st.integers(1, 60))
    def build(self, num_tokens):
        self.oracle = Oracle(num_tokens)
        self.places = self.oracle.cache.keys.data_ptr(), self.oracle.cache.values.data_ptr()

    @rule(counts=st.dictionaries(IDS, st.integers(0, 13), min_size=1, max_size=4))
    def reserve(self, counts):
        cache = self.oracle.cache
        fits = self.oracle.blocks_used(counts) <= cache.blocks.num_blocks
        assert cache.can_reserve(list(counts), list(counts.values())) == fits
        if fits:
            self.oracle.reserve(counts)
            return
        before = cache.keys.clone(), cache.values.clone(), [cache.start(s) for s in self.oracle.committed]
        with pytest.raises(OutOfBlocks):
            self.oracle.reserve(counts)
        assert torch.equal(before[0], cache.keys)
        assert torch.equal(before[1], cache.values)
        assert before[2] == [cache.start(s) for s in self.oracle.committed]

    @rule(seq_id=IDS, count=st.integers(1, 24))
    def read(self, seq_id, count):
        """A chunk of a prompt, after any draft tokens."""
        if self.oracle.cache.can_reserve([seq_id], [count]):
            self.oracle.reserve({seq_id: count})
            self.oracle.keep({seq_id: [*range(len(self.oracle.tails[seq_id]))]})

    @rule(counts=st.dictionaries(IDS, st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
    def spare(self, counts):
        """The spare blocks after some tokens are exactly those that would be free with them."""
        spare = self.oracle.cache.spare(list(counts), [certain for certain, _ in counts.values()])
        more = {seq_id: certain + num_drafted for seq_id, (certain, num_drafted) in counts.items()}
        needed = sum(spare.blocks_for(seq_id, num_drafted) for seq_id, (_, num_drafted) in counts.items())
        left = self.oracle.cache.blocks.num_blocks - self.oracle.blocks_used(more)
        assert spare.num_blocks - needed == left

    @precondition(lambda self: self.oracle.committed)
    @rule(data=st.data(), share=st.sampled_from(["some", "none", "all"]))
    def keep(self, data, share):
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.oracle.committed)), min_size=1))
        paths = {}
        for seq_id in sorted(chosen):
            nodes = list(range(len(self.oracle.tails[seq_id])))
            if share == "some":
                nodes = data.draw(st.permutations(nodes))[: data.draw(st.integers(0, len(nodes)))]
            paths[seq_id] = [] if share == "none" else nodes
        self.oracle.keep(paths)

    @precondition(lambda self: self.oracle.committed)
    @rule(data=st.data())
    def cut(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.oracle.committed)))
        tail = data.draw(st.integers(0, len(self.oracle.tails[seq_id])))
        self.oracle.cache.cut([seq_id], [tail])
        self.oracle.tails[seq_id] = self.oracle.tails[seq_id][:tail]

    @precondition(lambda self: self.oracle.committed)
    @rule(data=st.data())
    def truncate(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.oracle.committed)))
        length = data.draw(st.integers(0, len(self.oracle.committed[seq_id])))
        self.oracle.cache.truncate([seq_id], [length])
        self.oracle.committed[seq_id] = self.oracle.committed[seq_id][:length]
        self.oracle.tails[seq_id] = []

    @rule(seq_ids=st.sets(IDS, max_size=2))
    def release(self, seq_ids):
        self.oracle.cache.release(sorted(seq_ids))
        for seq_id in seq_ids:
            self.oracle.forget(seq_id)

    @rule(seq_id=IDS, salt=SALTS, num_unread=st.integers(0, 2 * BLOCK))
    def retire(self, seq_id, salt, num_unread):
        """A retired row keeps the salt of the text that it was begun from. Tokens that it has not read are not kept."""
        text, salt = self.oracle.committed.get(seq_id, []), self.oracle.salts.get(seq_id, salt)
        self.oracle.cache.retire(seq_id, [*text, *[-1] * num_unread], salt)
        self.oracle.past.append((salt, text))
        self.oracle.forget(seq_id)

    @precondition(lambda self: self.oracle.past)
    @rule(data=st.data(), seq_id=IDS, salt=SALTS)
    def adopt(self, data, seq_id, salt):
        """The cached part of a text is a prefix of entire blocks; the row that adopts it goes on from there."""
        _, text = data.draw(st.sampled_from(self.oracle.past))
        text = text[: data.draw(st.integers(len(text) // 2, len(text)))]
        if seq_id in self.oracle.committed or not self.oracle.cache.can_reserve([seq_id], [len(text)]):
            return
        num_found = self.oracle.cache.adopt(seq_id, text, salt)
        assert num_found % BLOCK == 0 <= num_found <= len(text)
        assert (seq_id in self.oracle.cache) == (num_found > 0)
        if num_found:
            assert any((salt, text[:num_found]) == (own, past[:num_found]) for own, past in self.oracle.past)
            self.oracle.committed[seq_id], self.oracle.tails[seq_id] = text[:num_found], []
            self.oracle.salts[seq_id] = salt

    @precondition(lambda self: self.oracle.committed)
    @rule(data=st.data(), seq_id=IDS)
    def fork(self, data, seq_id):
        source = data.draw(st.sampled_from(sorted(self.oracle.committed)))
        count = data.draw(st.integers(0, len(self.oracle.committed[source])))
        if seq_id in self.oracle.committed or not self.oracle.cache.can_reserve([seq_id], [count]):
            return
        self.oracle.cache.fork(seq_id, source, count)
        self.oracle.committed[seq_id], self.oracle.tails[seq_id] = self.oracle.committed[source][:count], []

    @invariant()
    def everything_is_where_it_belongs(self):
        if hasattr(self, "oracle"):
            self.oracle.check()
            assert self.places == (self.oracle.cache.keys.data_ptr(), self.oracle.cache.values.data_ptr())
            assert torch.isfinite(self.oracle.cache.keys).all()


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_any_interleaving = CacheMachine.TestCase


def test_a_new_cache_is_zero_and_padded():
    cache = make_cache(10)
    assert cache.keys.shape == cache.values.shape == (LAYERS, KV_HEADS, 12 + KEY_PAD, HEAD_DIM)
    assert not cache.keys.any()
    assert not cache.values.any()
    assert cache.num_free_tokens == 12


def test_bytes_are_those_of_the_tensors():
    cache = make_cache(64)
    each = PagedCache.bytes_per_token(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float64)
    assert each * (64 + KEY_PAD) == cache.keys.nbytes + cache.values.nbytes


def test_any_path_of_a_tail_is_kept_in_its_order():
    oracle, tail = Oracle(64), range(4)
    for path in (path for length in range(5) for path in permutations(tail, length)):
        oracle.reserve({1: 2})
        oracle.keep({1: [0, 1]})
        oracle.reserve({1: len(tail)})
        oracle.keep({1: list(path)})
        oracle.check()
        oracle.cache.release([1])
        oracle.forget(1)


def test_keeping_a_chain_copies_nothing(monkeypatch):
    oracle = Oracle(64)
    oracle.reserve({1: 9, 2: 3})
    monkeypatch.setattr(oracle.cache, "gather_slots", lambda *_: pytest.fail("a chain was copied"))
    oracle.keep({1: [0, 1, 2, 3], 2: [0, 1, 2]})
    oracle.check()


def test_tokens_within_the_last_block_need_no_accounting(monkeypatch):
    oracle = Oracle(64)
    oracle.reserve({1: 1, 2: BLOCK + 1})
    monkeypatch.setattr(oracle.cache.blocks, "grow", lambda _: pytest.fail("blocks were asked for"))
    for _ in range(BLOCK - 1):
        oracle.reserve({1: 1, 2: 1})
    oracle.check()


def test_misuse_raises():
    cache = make_cache(16)
    cache.reserve([1], [4])
    with pytest.raises(AssertionError, match="sequence 2 has no row"):
        cache.length(2)
    with pytest.raises(AssertionError, match="leaves a tail of 4"):
        cache.keep([1], [[4]])
    with pytest.raises(AssertionError, match="has 0 tokens, not 1"):
        cache.truncate([1], [1])
    with pytest.raises(AssertionError, match="must be distinct"):
        cache.reserve([1, 1], [1, 1])


def test_calls_inside_and_outside_of_inference_mode_mix():
    with torch.inference_mode():
        cache = make_cache(32)
        cache.reserve([1, 2], [8, 8])
    cache.reserve([1], [16])
    cache.keep([1], [[5, 2]])
    cache.check()


@pytest.mark.short("dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unused_cache_takes_no_memory(dtype: torch.dtype) -> None:
    """A gigabyte of cache takes hardly any memory until it is written, and reads as zero."""
    process = psutil.Process()
    before = process.memory_info().rss
    num_tokens = (1 << 30) // (2 * 4 * 2 * 64 * dtype.itemsize)
    cache = PagedCache(layers=4, kv_heads=2, head_dim=64, num_tokens=num_tokens, dtype=dtype)
    assert cache.keys.nbytes + cache.values.nbytes > 1 << 30
    assert process.memory_info().rss - before < 32 << 20
    assert not cache.keys[:, :, ::997].any()
    assert not cache.values[:, :, -600:].any()
    assert cache.keys.data_ptr() % 64 == cache.values.data_ptr() % 64 == 0
    assert cache.keys.is_contiguous()
    cache.keys[3, 1, 5:9] = 1.5
    assert cache.keys[3].float().sum() == 1.5 * 4 * 64
    assert not cache.keys[:3, :, ::97].any()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs the system's account of memory, of Linux")
def test_a_cache_uses_small_pages() -> None:
    """With huge pages, the first tokens of a row would wait for hundreds of megabytes of zeros."""
    cache = PagedCache(layers=4, kv_heads=2, head_dim=64, num_tokens=1 << 16, dtype=torch.bfloat16)
    for tensor in (cache.keys, cache.values):
        assert tensor.data_ptr() % mmap.PAGESIZE == 0
        flags = flags_of_memory_at(tensor.data_ptr())
        assert "wr" in flags
        if Path("/sys/kernel/mm/transparent_hugepage").exists():
            assert "nh" in flags, flags  # no huge pages


def flags_of_memory_at(address: int) -> list[str]:
    """The system's flags of the memory mapping that contains an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if "-" in words[0]:
            first, last = (int(part, 16) for part in words[0].split("-"))
            inside = first <= address < last
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    return []


def test_a_cache_without_memory_raises_memory_error() -> None:
    with pytest.raises(MemoryError, match="no memory for a cache of "):
        fresh_pages(1 << 60)


def test_blocks_left_without_a_row_by_an_interrupt_are_released() -> None:
    cache = make_cache(8 * BLOCK)
    cache.blocks.grow({3: 2})  # as `reserve` does before it knows the row
    cache.release([3])
    cache.check()
    assert cache.num_free_tokens == 8 * BLOCK
