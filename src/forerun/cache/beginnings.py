"""Beginnings: the row of a new text is begun from what a cache holds of a text that begins alike.

This module decides which of the two sources gives most: kept blocks (`prefix.py`), of which there are whole ones, or
the row of a text that is there now, token by token. Both the target's cache and those of drafters are begun so.
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
    """How many tokens of a text can be copied; from kept blocks, or from the row of the sequence `source`."""

    num_tokens: int = 0
    source: int | None = None


def longest_beginning(
    cache: PagedCache, tokens: Sequence[int], salt: Hashable, others: Iterable[LiveText]
) -> Beginning:
    """The most of `tokens` that the cache holds under this salt; None as a salt stands for texts that are not shared.

    Nothing below LEAST_SHARED tokens is found.
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
    """Give a new text a row that starts with its beginning, as far as there is room; how many tokens it starts with."""
    most = beginning.num_tokens
    if not most or not cache.can_reserve([text.seq_id], [most]):
        return 0
    if beginning.source is None:
        return cache.adopt(text.seq_id, text.tokens[:most], text.salt)
    cache.fork(text.seq_id, beginning.source, most)
    return most


def num_shared(left: Sequence[int], right: Sequence[int], most: int) -> int:
    """How many of the first `most` tokens are the same in both; compared in slices, which is fast for long lists."""
    most = min(most, len(left), len(right))
    same, step = 0, most
    while step > 0 and same < most:
        if left[same : same + step] == right[same : same + step]:
            same += step
            step = min(step, most - same)
        else:
            step //= 2
    return same
