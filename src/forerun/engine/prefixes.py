"""Prefixes: shared prefixes of running sequences are read once.

This module looks up how much of a new sequence the target's KV cache already holds, and lets a sequence wait while
another one reads the same prefix: the samples of a request, and equal prompts in the queue, share one prefill. If the
drafter needs the target's states, the target reads the prefix again from where the drafter requires them. Texts are
shared within a tenant only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from forerun.cache.beginnings import LEAST_SHARED, Beginning, LiveText, begin_row, longest_beginning, num_shared
from forerun.cache.paged import PagedCache
from forerun.draft.base import Committed, Drafter, adoptable
from forerun.engine.sequence import Sequence

LEAST_WAITED = 64  # a sequence waits for a prefix of at least this many tokens; reading fewer twice costs little


class Prefixes:
    """Prefix sharing of one engine. If `on` is False nothing is shared or kept, in the drafter's caches either."""

    def __init__(self, cache: PagedCache, drafter: Callable[[], Drafter | None], on: bool) -> None:
        self.cache = cache
        self.drafter = drafter
        self.on = on
        self.num_queried = 0  # tokens looked up since the last `counted`, once for each sequence
        self.num_hits = 0  # tokens found

    def salt(self, sequence: Sequence) -> str | None:
        """The name under which the sequence's text is cached (its tenant); None if it is not cached."""
        return sequence.tenant if self.on else None

    def begin(self, running: Seq[Sequence]) -> set[int]:
        """Start new sequences from cached prefixes; returns the ids of those that wait for another one's prefill."""
        waiting: set[int] = set()
        for i, sequence in enumerate(running):
            if sequence.num_read or len(sequence.tokens) <= LEAST_SHARED or sequence.scores_prompt:
                continue
            if (salt := self.salt(sequence)) is None:
                continue
            beginning = self.find(sequence, salt, running)
            ahead = [other for other in running[:i] if other.id not in waiting and self.salt(other) == salt]
            coming = max((self.coming(sequence, other) for other in ahead), default=0)
            if coming - beginning.num_tokens >= LEAST_WAITED:
                waiting.add(sequence.id)
            else:
                self.count(sequence, self.adopt(sequence, salt, beginning, running))
        return waiting

    def find(self, sequence: Sequence, salt: str, running: Seq[Sequence]) -> Beginning:
        """The longest cached prefix of a text, its root excluded."""
        others = [LiveText(s.id, self.salt(s), s.tokens) for s in running if s.num_read]
        return longest_beginning(self.cache, sequence.tokens[:-1], salt, others)

    def coming(self, sequence: Sequence, other: Sequence) -> int:
        """Length of the common prefix that will be cached once `other` is read; 0 if it is read already."""
        most = min(len(sequence.tokens), len(other.tokens)) - 1
        return num_shared(sequence.tokens, other.tokens, most) if other.num_read < most else 0

    def adopt(self, sequence: Sequence, salt: str, found: Beginning, running: Seq[Sequence]) -> int:
        """Start a row from a cached prefix, as far as the drafter allows; returns the number of tokens.

        Nothing is adopted unless all running sequences have cache space for what they still read.
        """
        drafter, text = self.drafter(), sequence.tokens
        if not found.num_tokens or not self.cache.can_reserve(
            [s.id for s in running], [len(s.unread) + 1 for s in running]
        ):
            return 0
        most = found.num_tokens if drafter is None else adoptable(drafter, text, found.num_tokens, salt)
        if most < LEAST_SHARED:
            return 0
        live = LiveText(sequence.id, salt, text)
        sequence.num_read = begin_row(self.cache, live, Beginning(min(most, found.num_tokens), found.source))
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
        """Count cache hits of a sequence's prompt, once, when it is first read."""
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
        """Free a sequence's row; its full blocks stay in the prefix cache if they may be shared."""
        if (salt := self.salt(sequence)) is None:
            self.cache.release([sequence.id])
        else:
            self.cache.retire(sequence.id, sequence.tokens, salt)
