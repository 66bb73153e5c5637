"""Prefixes: sequences that begin alike are read once.

This module decides which running sequence begins with what the target's cache holds already, how much of that is used,
and which sequence waits a round or more because another is reading its beginning: that is how the samples of a request,
and equal prompts in the queue, share one pass. A drafter that needs the target's states says how far it can do without
them; behind that place the target reads. Texts are shared within a tenant only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from forerun.cache.beginnings import LEAST_SHARED, Beginning, LiveText, begin_row, longest_beginning, num_shared
from forerun.cache.paged import PagedCache
from forerun.draft.base import Committed, Drafter, adoptable
from forerun.engine.sequence import Sequence

LEAST_WAITED = 64  # tokens for whose sake a sequence waits: below, a round that reads them twice is hardly longer


class Prefixes:
    """The shared beginnings of one engine. Where it is off nothing is shared or kept, and no drafter keeps anything."""

    def __init__(self, cache: PagedCache, drafter: Callable[[], Drafter | None], on: bool) -> None:
        self.cache = cache
        self.drafter = drafter
        self.on = on
        self.num_queried = 0  # tokens looked up, once for each sequence, and tokens that were found, since `counted`
        self.num_hits = 0

    def salt(self, sequence: Sequence) -> str | None:
        """Under which name its text is kept and found; None where it is not."""
        return sequence.tenant if self.on else None

    def begin(self, running: Seq[Sequence]) -> set[int]:
        """Begin the sequences of which nothing is read, if anything of them is known; the ids of those that wait."""
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
        """What is known of a text before its root."""
        others = [LiveText(s.id, self.salt(s), s.tokens) for s in running if s.num_read]
        return longest_beginning(self.cache, sequence.tokens[:-1], salt, others)

    def coming(self, sequence: Sequence, other: Sequence) -> int:
        """How much of a text will be known when another one is read; 0 if that is read already."""
        most = min(len(sequence.tokens), len(other.tokens)) - 1
        return num_shared(sequence.tokens, other.tokens, most) if other.num_read < most else 0

    def adopt(self, sequence: Sequence, salt: str, found: Beginning, running: Seq[Sequence]) -> int:
        """Begin a row with what is known, as far as the drafter can follow; how many tokens that is.

        Nothing is begun unless all that is running has room for what it is to read, so no sequence loses its place.
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
        """Count what was found for a sequence, the first time that it is read; of a prompt alone, not of an answer."""
        if sequence.num_cached is None and not sequence.num_output:
            sequence.num_cached = num_tokens
            self.num_queried += sequence.num_prompt - 1
            self.num_hits += num_tokens

    def counted(self) -> tuple[int, int]:
        """Tokens looked up and tokens found since the last call."""
        counts = self.num_queried, self.num_hits
        self.num_queried = self.num_hits = 0
        return counts

    def retire(self, sequence: Sequence) -> None:
        """Free a sequence's row; its full blocks stay known where they may be shared."""
        if (salt := self.salt(sequence)) is None:
            self.cache.release([sequence.id])
        else:
            self.cache.retire(sequence.id, sequence.tokens, salt)
