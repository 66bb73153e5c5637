"""Prefixes: a prefix that several sequences share is prefilled once.

This file looks up how much of a new sequence the target's KV cache already holds, and lets a sequence wait while
another one prefills the same prefix: the samples of a request, and equal prompts in the queue, share one prefill. If
the drafter needs the target's states, the target reads the prefix again from where the drafter requires them. Texts are
shared within a tenant only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from forerun.cache.paged import PagedCache
from forerun.cache.shared_prefix import MIN_SHARED, CachedPrefix, CachedText, longest_prefix, num_shared, start_row
from forerun.draft.base import Committed, Drafter, adoptable
from forerun.engine.sequence import Sequence

MIN_AWAITED_TOKENS = 64  # a sequence waits for a prefix of this length; shorter ones are cheaply prefilled twice


class Prefixes:
    """Prefix sharing of one engine. If not `enabled`, nothing is shared or cached, nor in the drafter's caches."""

    def __init__(self, cache: PagedCache, drafter: Callable[[], Drafter | None], enabled: bool) -> None:
        self.cache = cache
        self.drafter = drafter
        self.enabled = enabled
        self.num_queried = 0  # tokens looked up since the last `counted`; each sequence counts once
        self.num_hits = 0  # of these, tokens found

    def salt(self, sequence: Sequence) -> str | None:
        """The salt of the sequence's text in the prefix cache, its tenant; None if the text is not to be cached."""
        return sequence.tenant if self.enabled else None

    def start_new(self, running: Seq[Sequence]) -> set[int]:
        """Start new sequences from cached prefixes; returns the ids of those that wait for another one's prefill."""
        waiting: set[int] = set()
        for i, sequence in enumerate(running):
            if sequence.num_read or len(sequence.tokens) <= MIN_SHARED or sequence.scores_prompt:
                continue
            if (salt := self.salt(sequence)) is None:
                continue
            cached = self.find(sequence, salt, running)
            earlier = [other for other in running[:i] if other.id not in waiting and self.salt(other) == salt]
            num_coming = max((self.num_coming(sequence, other) for other in earlier), default=0)
            if num_coming - cached.num_tokens >= MIN_AWAITED_TOKENS:
                waiting.add(sequence.id)
            else:
                self.count(sequence, self.adopt(sequence, salt, cached, running))
        return waiting

    def find(self, sequence: Sequence, salt: str, running: Seq[Sequence]) -> CachedPrefix:
        """The longest cached prefix of a sequence's text, its root excluded."""
        others = [CachedText(s.id, self.salt(s), s.tokens) for s in running if s.num_read]
        return longest_prefix(self.cache, sequence.tokens[:-1], salt, others)

    def num_coming(self, sequence: Sequence, other: Sequence) -> int:
        """Length of the common prefix that will be cached after the prefill of `other`; 0 if that is already done."""
        most = min(len(sequence.tokens), len(other.tokens)) - 1
        return num_shared(sequence.tokens, other.tokens, most) if other.num_read < most else 0

    def adopt(self, sequence: Sequence, salt: str, cached: CachedPrefix, running: Seq[Sequence]) -> int:
        """Start a sequence from a cached prefix, up to the length that the drafter allows; returns this length.

        Nothing is adopted unless all running sequences have cache slots for their unread tokens.
        """
        drafter, text = self.drafter(), sequence.tokens
        counts = [len(s.unread) + 1 for s in running]
        if not cached.num_tokens or not self.cache.can_reserve([s.id for s in running], counts):
            return 0
        most = cached.num_tokens if drafter is None else adoptable(drafter, text, cached.num_tokens, salt)
        if most < MIN_SHARED:
            return 0
        prefix = CachedPrefix(min(most, cached.num_tokens), cached.source)
        sequence.num_read = start_row(self.cache, CachedText(sequence.id, salt, text), prefix)
        if drafter is not None and sequence.num_read:
            drafter.observe(
                Committed(
                    seq_ids=[sequence.id],
                    tokens=text[: sequence.num_read],
                    offsets=[0, sequence.num_read],
                    roots=[text[sequence.num_read]],
                    tenants=[sequence.tenant],
                    num_prompts=[sequence.num_prompt],
                    salts=[salt],
                    adopted=True,
                )
            )
        return sequence.num_read

    def count(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the cache hits of a sequence's prompt, once, when its prefill starts."""
        if sequence.num_cached is None and not sequence.num_output:
            sequence.num_cached = num_tokens
            self.num_queried += sequence.num_prompt - 1
            self.num_hits += num_tokens

    def counted(self) -> tuple[int, int]:
        """(tokens looked up, tokens found) since the last call."""
        counts = self.num_queried, self.num_hits
        self.num_queried = self.num_hits = 0
        return counts

    def retire(self, sequence: Sequence) -> None:
        """Free a sequence's cache row; its full blocks stay in the prefix cache if they may be shared."""
        if (salt := self.salt(sequence)) is None:
            self.cache.release([sequence.id])
        else:
            self.cache.retire(sequence.id, sequence.tokens, salt)
