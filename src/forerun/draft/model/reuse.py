"""Reuse: what a drafter's own cache holds of texts that begin alike is not read again.

This module decides how the texts that a drafter follows meet its cache: which of them may share, and what stays of
those that are given up. How beginnings are found and copied is decided in `cache/`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from forerun.cache.beginnings import Beginning, LiveText, begin_row, longest_beginning
from forerun.draft.model.following import Following
from forerun.models.runner import Runner

NO_SEQUENCE = -1


class Reuse:
    """The shared beginnings of the texts in `sequences`, which `runner` reads."""

    def __init__(self, runner: Runner, sequences: Mapping[int, Following]) -> None:
        self.runner = runner
        self.sequences = sequences

    def known(self, text: Sequence[int], salt: Hashable) -> Beginning:
        """How much of a text's beginning the cache holds."""
        others = (LiveText(seq_id, own.salt, own.text) for seq_id, own in self.sequences.items())
        return longest_beginning(self.runner.cache, text, salt, others)

    def has_room(self, num_tokens: int) -> bool:
        """Whether one more text of so many tokens can be read."""
        return self.runner.cache.can_reserve([NO_SEQUENCE], [num_tokens])

    def begin(self, seq_id: int) -> None:
        """Begin the row of a text that has none with what the cache holds of it."""
        own = self.sequences[seq_id]
        if seq_id not in self.runner.cache:
            found = self.known(own.text, own.salt)
            begin_row(self.runner.cache, LiveText(seq_id, own.salt, own.text), found)

    def give_up(self, seq_id: int) -> None:
        """Free a row; what it held stays known as long as there is room, where the text may be shared."""
        own = self.sequences.get(seq_id)
        if own is None or own.salt is None:
            self.runner.release([seq_id])
        else:
            self.runner.retire(seq_id, own.text, own.salt)
