"""The cached prefixes of finished rows: which texts reuse them, and which are evicted first.

test_paged checks that their content is right.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from cache.test_paged import check_slots, make_cache, marks
from forerun.cache.blocks import Move
from forerun.cache.paged import PagedCache
from forerun.cache.prefix import PrefixStore
from forerun.cache.shared_prefix import MIN_SHARED, CachedPrefix, CachedText, longest_prefix, num_shared, start_row

SIZE = 8  # of blocks


def cache_of(num_tokens: int) -> PagedCache:
    return make_cache(num_tokens, SIZE)


def read_on(cache: PagedCache, seq_id: int, text: Sequence[int]) -> None:
    """Read the part of a text that is not in its row."""
    rest = text[cache.length(seq_id) if seq_id in cache else 0 :]
    cache.reserve([seq_id], [len(rest)])
    first = cache.start(seq_id) + cache.length(seq_id)
    cache.keys[:, :, first : first + len(rest)] = marks(rest)
    cache.values[:, :, first : first + len(rest)] = -marks(rest)
    cache.keep([seq_id], [range(len(rest))])


class Colliding(bytes):
    """Keys of tokens that all have the same hash."""

    @override
    def __hash__(self) -> int:
        return 1


def test_texts_with_equal_hashes_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefixStore.keys

    def colliding(self: PrefixStore, tokens: Sequence[int]) -> Iterator[bytes]:
        return map(Colliding, original(self, tokens))

    monkeypatch.setattr(PrefixStore, "keys", colliding)
    cache, texts = cache_of(480), [[i % 2**k for i in range(5 * SIZE)] for k in range(6)]
    retired(cache, *texts)
    for text in texts:
        assert known(cache, text) == len(text)
        assert known(cache, [*text[:20], 99, *text[21:]]) == 16
        assert cache.adopt(1, text, "a") == len(text)
        check_slots(cache, cache.start(1), text)
        cache.release([1])


def retired(cache: PagedCache, *texts: Sequence[int], salt: str = "a") -> None:
    """Read texts one after the other and retire their rows."""
    for text in texts:
        cache.adopt(99, text, salt)
        read_on(cache, 99, text)
        cache.retire(99, text, salt)


def known(cache: PagedCache, text: Sequence[int], salt: str = "a") -> int:
    return len(cache.prefix_store.find(text, salt)) * SIZE


def test_only_full_blocks_with_the_same_salt_are_reused() -> None:
    cache = cache_of(200)
    text = list(range(31))
    retired(cache, text)
    assert known(cache, text) == 24
    assert known(cache, text[:23]) == 16
    assert known(cache, [*text[:20], 0, *text[21:]]) == 16
    assert known(cache, text[8:]) == 0
    assert known(cache, text, "b") == 0
    assert len(cache.prefix_store) == 3
    assert cache.num_free_tokens == 200, "what is kept counts as free"


def test_the_least_recently_used_text_is_evicted_first_from_its_end() -> None:
    """A cache of 10 blocks holds three texts of 3 blocks with a common block; a row then takes block by block."""
    cache = cache_of(10 * SIZE)
    first = list(range(24))
    second, third = [*first[:8], *range(100, 116)], [*first[:8], *range(200, 216)]
    retired(cache, first, second, third)
    assert len(cache.prefix_store) == 7
    cache.adopt(50, first, "a")  # used again, so that the second is the oldest
    cache.release([50])
    order = [(known(cache, first), known(cache, second), known(cache, third))]
    for count in range(1, 11):
        cache.reserve([7], [count * SIZE - cache.tail(7)])
        cache.check()
        order.append((known(cache, first), known(cache, second), known(cache, third)))
    assert order[:4] == [(24, 24, 24)] * 4, "free blocks are taken before anything is given up"
    assert order[4:] == [(24, 16, 24), (24, 8, 24), (24, 8, 16), (24, 8, 8), (16, 8, 8), (8, 8, 8), (0, 0, 0)]


@settings(max_examples=10)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 2**16))
def test_nothing_is_evicted_while_blocks_are_free(lengths: list[int], seed: int) -> None:
    """While a row grows and shrinks, exactly as many cached blocks stay as are free, and all of them are found."""
    rng, cache = random.Random(seed), cache_of(40 * SIZE)
    texts = [[number, *range(length * SIZE - 1)] for number, length in enumerate(lengths)]
    retired(cache, *texts)
    for _ in range(6):
        before, count = len(cache.prefix_store), rng.randint(1, 40)
        cache.reserve([7], [count * SIZE])
        cache.check()
        assert len(cache.prefix_store) == min(before, 40 - count)
        assert sum(known(cache, text) for text in texts) == len(cache.prefix_store) * SIZE
        cache.release([7])


def test_a_growing_row_displaces_each_cached_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Displaced blocks go where the row arrives last, so none is moved again before all free blocks are taken."""
    cache, moves = cache_of(20 * SIZE), list[Move]()
    retired(cache, list(range(4 * SIZE)))
    monkeypatch.setattr(cache.prefix_store, "move", moves.extend)
    for _ in range(16):
        cache.reserve([7], [SIZE])
    assert len(moves) == len(cache.prefix_store) == 4


def test_a_prefix_is_reused_in_part_if_the_row_needs_its_blocks() -> None:
    cache = cache_of(6 * SIZE)
    text = list(range(4 * SIZE))
    retired(cache, text)
    found = cache.adopt(1, text, "a")
    assert 0 < found < len(text)
    read_on(cache, 1, text)
    check_slots(cache, cache.start(1), text)
    cache.check()


@pytest.mark.parametrize("num_cached", range(1, 5))
def test_a_cached_block_is_not_moved_to_where_a_row_is_still_to_be_read(num_cached: int) -> None:
    """A row moves to blocks with a cached text, which goes elsewhere: not to the row's old block before it moved."""
    cache, texts = cache_of(6 * SIZE), [list(range(first, first + SIZE)) for first in (0, 100)]
    for seq_id, text in enumerate(texts):
        read_on(cache, seq_id, text)
    kept = list(range(200, 200 + num_cached * SIZE))
    retired(cache, kept)
    texts[0] += range(50, 50 + SIZE)
    read_on(cache, 0, texts[0])
    for seq_id, text in enumerate(texts):
        check_slots(cache, cache.start(seq_id), text)
    cache.check()
    assert known(cache, kept) == min(num_cached, 2) * SIZE, "the old block counts as taken"
    cache.release([1])
    found = cache.adopt(2, kept, "a")
    check_slots(cache, cache.start(2), kept[:found])


def test_no_prefix_is_found_after_clear_or_release() -> None:
    cache = cache_of(200)
    text = list(range(40))
    retired(cache, text)
    cache.clear()
    cache.check()
    assert len(cache.prefix_store) == 0
    assert not cache.keys.any()
    read_on(cache, 1, text)
    cache.release([1])
    assert known(cache, text) == 0


@given(st.lists(st.integers(0, 1), max_size=200), st.lists(st.integers(0, 1), max_size=200), st.integers(0, 210))
def test_shared_prefix_lengths_are_counted(left: list[int], right: list[int], most: int) -> None:
    cut = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert num_shared(left, right, most) == min(cut, most)
    assert num_shared(left, [*left, 1], most) == min(len(left), most)


def test_the_longest_shared_prefix_is_taken_and_short_ones_are_not() -> None:
    cache = cache_of(400)
    text = [*range(60)]
    retired(cache, text[:32])
    read_on(cache, 1, text[:45])  # the rest of this text is not read yet
    live = [CachedText(1, "a", text), CachedText(2, "a", text), CachedText(3, "b", text)]
    beginning = longest_prefix(cache, text, "a", live)
    assert (beginning.num_tokens, beginning.source) == (45, 1)
    assert start_row(cache, CachedText(2, "a", text), beginning) == cache.length(2) == 45
    check_slots(cache, cache.start(2), text[:45])
    assert longest_prefix(cache, text, "a", []).num_tokens == 32
    assert longest_prefix(cache, text, "b", live).num_tokens == 0
    assert longest_prefix(cache, text, None, [CachedText(1, None, text)]).num_tokens == 0
    assert longest_prefix(cache, [*text[: MIN_SHARED - 1], 77, 78, 79], "a", live).num_tokens == 0


def test_the_longest_shared_prefix_is_taken_whatever_the_order_and_length_of_the_texts() -> None:
    """The text that shares least is the longest, and so are its read tokens."""
    text, shared = [*range(60)], {1: 40, 2: 33, 3: 20}
    for order in permutations(shared):
        for num_cached in (0, 32, 48):
            cache = cache_of(600)
            retired(cache, text[:num_cached])
            texts = {each: [*text[:num], *range(100, 150 - num)] for each, num in shared.items()}
            for each in order:
                texts[each] += [*range(200, 210 + 10 * each)]
                read_on(cache, each, texts[each])
            found = longest_prefix(cache, text, "a", [CachedText(each, "a", texts[each]) for each in order])
            assert found == (CachedPrefix(48) if num_cached == 48 else CachedPrefix(40, 1))
