"""What stays known of rows that are gone: right whatever happens to it, least recently used given up first.

A toy layer stands in for a model, as in test_rounds: what lies in a slot depends on all tokens before it, so a block
that is found for another text, or was overwritten, is noticed.
"""

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_rounds import make_cache, read_chain

from forerun.cache.beginnings import LEAST_SHARED, LiveText, begin_row, longest_beginning, num_shared
from forerun.cache.blocks import OutOfBlocks
from forerun.cache.paged import PagedCache
from forerun.cache.prefix import PrefixStore

SIZE = 8  # of make_cache's blocks
SALTS = ("a", "b")


def read_on(cache: PagedCache, seq_id: int, text: Sequence[int]) -> None:
    """Read what of a text is not in its row."""
    length = cache.length(seq_id) if seq_id in cache else 0
    read_chain(cache, seq_id, list(text[length:]))


def assert_row(cache: PagedCache, seq_id: int, text: Sequence[int]) -> None:
    """A row's keys and values are those of its text, read in one go."""
    length = cache.length(seq_id)
    fresh = make_cache(max(SIZE, length))
    read_chain(fresh, 0, list(text[:length]))
    own = slice(cache.start(seq_id), cache.start(seq_id) + length)
    assert torch.equal(cache.keys[:, :, own], fresh.keys[:, :, :length])
    assert torch.equal(cache.values[:, :, own], fresh.values[:, :, :length])


class Traffic:
    """Texts that begin alike at random come and go, over one cache; a plain model says what must still be known."""

    def __init__(self, seed: int, num_tokens: int) -> None:
        self.rng = random.Random(seed)
        self.cache = make_cache(num_tokens)
        self.texts: dict[int, tuple[str, list[int]]] = {}
        self.past: list[list[int]] = [[]]
        self.next_id = self.num_found = self.num_forked = self.num_refused = 0

    def new_text(self) -> list[int]:
        """The beginning of an earlier text, and more."""
        begun = self.rng.choice(self.past)
        kept = begun[: self.rng.randint(0, len(begun))]
        return [*kept, *(self.rng.randrange(3) for _ in range(self.rng.randint(1, 30)))][:80]

    def join(self) -> None:
        salt, text, seq_id = self.rng.choice(SALTS), self.new_text(), self.next_id
        if not self.cache.can_reserve([seq_id], [len(text)]):
            return
        self.next_id += 1
        live = [LiveText(other, own, tokens) for other, (own, tokens) in self.texts.items()]
        found = longest_beginning(self.cache, text, salt, live)
        known = begin_row(self.cache, LiveText(seq_id, salt, text), found)
        assert known <= found.num_tokens <= len(text)
        assert (seq_id in self.cache) == (known > 0)
        if known:
            assert_row(self.cache, seq_id, text)
        self.num_found += known
        self.num_forked += found.source is not None and known > 0
        read_on(self.cache, seq_id, text)
        self.texts[seq_id] = (salt, text)
        self.past = [*self.past[-20:], text]

    def grow(self) -> None:
        """A text gets longer, if there is room; else the youngest goes."""
        seq_id = self.rng.choice(list(self.texts))
        self.texts[seq_id][1].extend(self.rng.randrange(3) for _ in range(self.rng.randint(1, 12)))
        try:
            read_on(self.cache, seq_id, self.texts[seq_id][1])
        except OutOfBlocks:
            self.num_refused += 1
            self.leave(max(self.texts))

    def leave(self, seq_id: int) -> None:
        salt, text = self.texts.pop(seq_id)
        how = self.rng.random()
        if how < 0.8:
            self.cache.retire(seq_id, text, salt)
        else:
            self.cache.release([seq_id])

    def play(self) -> None:
        if self.texts and self.rng.random() < 0.6:
            self.grow()
        elif len(self.texts) < 4:
            self.join()
        if self.texts and self.rng.random() < 0.2:
            self.leave(self.rng.choice(list(self.texts)))
        self.cache.check()

    def check(self) -> None:
        for seq_id, (_, text) in self.texts.items():
            assert_row(self.cache, seq_id, text)
        for kept in self.cache.kept.order:
            tokens = tokens_before(kept)
            fresh = make_cache(len(tokens))
            read_chain(fresh, 0, tokens)
            own = slice(kept.block * SIZE, kept.block * SIZE + SIZE)
            assert torch.equal(self.cache.keys[:, :, own], fresh.keys[:, :, len(tokens) - SIZE : len(tokens)])


def tokens_before(kept: object) -> list[int]:
    """All tokens up to a block's end."""
    tokens: list[int] = []
    while kept.parent is not None:  # type: ignore[attr-defined]
        tokens = [*memoryview(kept.key).cast("i"), *tokens]  # type: ignore[attr-defined]
        kept = kept.parent  # type: ignore[attr-defined]
    return tokens


@pytest.mark.parametrize(
    ("seed", "num_tokens"),
    [(0, 160), pytest.param(1, 240, marks=pytest.mark.full), pytest.param(2, 2000, marks=pytest.mark.full)],
)
def test_rows_begun_from_others_are_those_of_a_text_read_at_once(seed: int, num_tokens: int) -> None:
    traffic = Traffic(seed, num_tokens)
    for number in range(400):
        traffic.play()
        if number % 20 == 19:
            traffic.check()
    assert traffic.num_found > 200
    assert traffic.num_forked > 1
    assert (traffic.num_refused > 0) == (num_tokens < 2000)


class Colliding(bytes):
    """Tokens whose hash is always the same."""

    def __hash__(self) -> int:
        return 1


def test_texts_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    own = PrefixStore.keys

    def colliding(self: PrefixStore, tokens: Sequence[int]) -> Iterator[bytes]:
        return map(Colliding, own(self, tokens))

    monkeypatch.setattr(PrefixStore, "keys", colliding)
    traffic = Traffic(3, 240)
    for _ in range(200):
        traffic.play()
    traffic.check()
    assert traffic.num_found > 50


def retired(cache: PagedCache, *texts: Sequence[int], salt: str = "a") -> None:
    """Read texts, one after the other, and let them go."""
    for text in texts:
        cache.adopt(99, text, salt)
        read_on(cache, 99, text)
        cache.retire(99, text, salt)


def known(cache: PagedCache, text: Sequence[int], salt: str = "a") -> int:
    return len(cache.kept.find(text, salt)) * SIZE


def test_only_full_blocks_of_the_same_salt_are_found() -> None:
    cache = make_cache(200)
    text = list(range(30))
    retired(cache, text)
    assert known(cache, text) == 24
    assert known(cache, text[:23]) == 16
    assert known(cache, [*text[:20], 0, *text[21:]]) == 16
    assert known(cache, text[8:]) == 0
    assert known(cache, text, "b") == 0
    assert len(cache.kept) == 3
    assert cache.num_free_tokens == 200, "what is kept counts as free"


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning() -> None:
    """A cache of 10 blocks, full of three texts of 3 blocks with a block in common; a row then takes block by block."""
    cache = make_cache(10 * SIZE)
    first = list(range(24))
    second, third = [*first[:8], *range(100, 116)], [*first[:8], *range(200, 216)]
    retired(cache, first, second, third)
    assert len(cache.kept) == 7
    cache.adopt(50, first, "a")  # used again, so the second is now the oldest
    cache.release([50])
    order = [(known(cache, first), known(cache, second), known(cache, third))]
    for count in range(1, 11):
        cache.reserve([7], [count * SIZE - cache.tail(7)])
        cache.check()
        order.append((known(cache, first), known(cache, second), known(cache, third)))
    assert order[:4] == [(24, 24, 24)] * 4, "free blocks are taken before anything is given up"
    assert order[4:] == [(24, 16, 24), (24, 8, 24), (24, 8, 16), (24, 8, 8), (16, 8, 8), (8, 8, 8), (0, 0, 0)]


@pytest.mark.full
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 2**16))
def test_nothing_is_given_up_while_there_is_room(lengths: list[int], seed: int) -> None:
    """A row grows and shrinks; what is kept stays, exactly as many blocks as are free."""
    rng, cache = random.Random(seed), make_cache(40 * SIZE)
    for number, length in enumerate(lengths):
        retired(cache, [number, *range(length * SIZE - 1)])
    for _ in range(6):
        before, count = len(cache.kept), rng.randint(1, 40)
        cache.reserve([7], [count * SIZE])
        cache.check()
        assert len(cache.kept) == min(before, 40 - count)
        cache.release([7])


def test_a_row_that_needs_the_blocks_it_begins_with_gets_what_is_left() -> None:
    cache = make_cache(6 * SIZE)
    text = list(range(4 * SIZE))
    retired(cache, text)
    found = cache.adopt(1, text, "a")
    assert 0 < found < len(text)
    assert_row(cache, 1, text)
    read_on(cache, 1, text)
    assert_row(cache, 1, text)
    cache.check()


def test_nothing_is_known_after_a_clear_or_of_what_was_wiped() -> None:
    cache = make_cache(200)
    text = list(range(40))
    retired(cache, text)
    cache.clear()
    assert len(cache.kept) == 0
    assert not cache.keys.any()
    read_on(cache, 1, text)
    cache.release([1])
    assert known(cache, text) == 0


@given(st.lists(st.integers(0, 1), max_size=200), st.lists(st.integers(0, 1), max_size=200), st.integers(0, 210))
def test_shared_beginnings_are_counted(left: list[int], right: list[int], most: int) -> None:
    cut = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert num_shared(left, right, most) == min(cut, most)
    assert num_shared(left, [*left, 1], most) == min(len(left), most)


def test_the_longest_beginning_is_taken_and_short_ones_are_not() -> None:
    cache = make_cache(400)
    text = [*range(60)]
    retired(cache, text[:32])
    read_on(cache, 1, text[:45])
    live = [LiveText(1, "a", text[:45]), LiveText(2, "a", text), LiveText(3, "b", text)]
    assert longest_beginning(cache, text, "a", live).num_tokens == 45
    assert longest_beginning(cache, text, "a", live).source == 1
    assert longest_beginning(cache, text, "a", []).num_tokens == 32
    assert longest_beginning(cache, text, "b", live).num_tokens == 0
    assert longest_beginning(cache, text, None, [LiveText(1, None, text)]).num_tokens == 0
    assert longest_beginning(cache, [*text[: LEAST_SHARED - 1], 77, 78, 79], "a", live).num_tokens == 0
