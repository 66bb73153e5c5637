"""Shared prefixes: starts the row of a new text with a copy of a cached prefix.

The copy comes from cached blocks (`prefix.py`; a multiple of the block size) or from the row of another running text
(any number of tokens), whichever is longer. The target's cache and those of drafters use it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from forerun.cache.paged import PagedCache

MIN_SHARED = 16  # tokens; shorter prefixes are read again, which takes hardly longer than reading one token


@dataclass(frozen=True, slots=True)
class CachedText:
    """A text that has a row in the cache, or is about to get one."""

    seq_id: int
    salt: Hashable
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix that can be copied: its length, and the sequence whose row holds it (None: cached blocks)."""

    num_tokens: int = 0
    source: int | None = None


def longest_prefix(
    cache: PagedCache, tokens: Sequence[int], salt: Hashable, others: Iterable[CachedText]
) -> CachedPrefix:
    """The longest prefix of `tokens` that the cache holds with this salt. Texts with the salt None are not shared.

    Prefixes of fewer than MIN_SHARED tokens are not used.
    """
    if salt is None or len(tokens) < MIN_SHARED:
        return CachedPrefix()
    best = CachedPrefix(len(cache.prefix_store.find(tokens, salt)) * cache.blocks.block_size)
    for other in others:
        if other.salt == salt and other.seq_id in cache:
            length = min(cache.length(other.seq_id), len(tokens))
            if length > best.num_tokens and (same := num_shared(tokens, other.tokens, length)) > best.num_tokens:
                best = CachedPrefix(same, other.seq_id)
    return best if best.num_tokens >= MIN_SHARED else CachedPrefix()


def start_row(cache: PagedCache, text: CachedText, beginning: CachedPrefix) -> int:
    """Start a text's row with its cached prefix; returns the number of tokens, 0 if too few blocks are free."""
    most = beginning.num_tokens
    if not most or not cache.can_reserve([text.seq_id], [most]):
        return 0
    if beginning.source is None:
        return cache.adopt(text.seq_id, text.tokens[:most], text.salt)
    cache.fork(text.seq_id, beginning.source, most)
    return most


def num_shared(left: Sequence[int], right: Sequence[int], most: int) -> int:
    """Length of the common prefix of two lists, at most `most`. Compares slices, which is fast for long lists."""
    most = min(most, len(left), len(right))
    same, step = 0, most
    while step > 0 and same < most:
        if left[same : same + step] == right[same : same + step]:
            same += step
            step = min(step, most - same)
        else:
            step //= 2
    return same
