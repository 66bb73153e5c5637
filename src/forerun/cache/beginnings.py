"""Shared prefixes: starts the row of a new text with a copy of a cached prefix.

This module decides which source is longer: cached blocks (`prefix.py`), in whole blocks, or the row of another running
text, token by token. It serves the target's cache and those of drafters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from forerun.cache.paged import PagedCache

LEAST_SHARED = 16  # tokens below which a beginning is read again: that is hardly slower than one token


@dataclass(frozen=True, slots=True)
class LiveText:
    """A text that has a row, or will have one."""

    seq_id: int
    salt: Hashable
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Beginning:
    """A prefix that can be copied: its length, and the sequence `source` whose row has it (None: cached blocks)."""

    num_tokens: int = 0
    source: int | None = None


def longest_beginning(
    cache: PagedCache, tokens: Sequence[int], salt: Hashable, others: Iterable[LiveText]
) -> Beginning:
    """The longest prefix of `tokens` that the cache holds under this salt; a salt of None means not shared.

    Prefixes below LEAST_SHARED tokens are not used.
    """
    if salt is None or len(tokens) < LEAST_SHARED:
        return Beginning()
    best = Beginning(len(cache.kept.find(tokens, salt)) * cache.blocks.block_size)
    for other in others:
        if other.salt == salt and other.seq_id in cache:
            length = min(cache.length(other.seq_id), len(tokens))
            if length > best.num_tokens and (same := num_shared(tokens, other.tokens, length)) > best.num_tokens:
                best = Beginning(same, other.seq_id)
    return best if best.num_tokens >= LEAST_SHARED else Beginning()


def begin_row(cache: PagedCache, text: LiveText, beginning: Beginning) -> int:
    """Start a text's row with its cached prefix, as far as there are free blocks; returns the number of tokens."""
    most = beginning.num_tokens
    if not most or not cache.can_reserve([text.seq_id], [most]):
        return 0
    if beginning.source is None:
        return cache.adopt(text.seq_id, text.tokens[:most], text.salt)
    cache.fork(text.seq_id, beginning.source, most)
    return most


def num_shared(left: Sequence[int], right: Sequence[int], most: int) -> int:
    """Length of the common prefix, at most `most`; compared in slices, which is fast for long lists."""
    most = min(most, len(left), len(right))
    same, step = 0, most
    while step > 0 and same < most:
        if left[same : same + step] == right[same : same + step]:
            same += step
            step = min(step, most - same)
        else:
            step //= 2
    return same
