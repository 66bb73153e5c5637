"""Row texts: identifies an engine's rows across steps by their tokens.

The other engine passes the tokens of every row in every step, without ids; rows move, finish, wait and return between
steps. A row continues a known text if it starts with all tokens of the text. State that is stored for a text must be a
function of its tokens, so that it does not matter which of two equal texts a row is matched with.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
PATIENCE = 8  # steps for which a text without a row is kept, since its row may return


@dataclass(frozen=True, slots=True)
class EngineRow:
    """A row in a step: all tokens of its text, of which the last `num_new` were generated in this step."""

    ids: Tokens
    num_new: int


@dataclass(slots=True, eq=False)
class KnownText:
    """A text: its tokens when it last had a row, the length of its prompt, and the last step in which it had one."""

    id: int
    num_prompt: int
    ids: Tokens
    tokens: list[int]
    last_seen: int

    def begins(self, row: Tokens) -> bool:
        """Whether the row starts with this text."""
        length = len(self.ids)
        return length <= len(row) and bool(row[length - 1] == self.ids[-1]) and np.array_equal(row[:length], self.ids)


@dataclass(slots=True)
class RowTexts:
    """The texts of the rows of one engine.

    A text without a row is forgotten after `PATIENCE` steps; at most `most_absent` such texts are kept.
    """

    most_absent: int
    step: int = 0
    at_row: dict[int, KnownText] = field(default_factory=dict)
    absent: list[KnownText] = field(default_factory=list)  # texts without a row, the oldest first
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def follow(self, rows: Mapping[int, EngineRow]) -> tuple[list[KnownText], list[int]]:
        """(the texts of these rows, in order, with their tokens of the previous step; the ids of forgotten texts).

        `rows`: rows that gained tokens, by number. A new text has no tokens until `extend` adds them.
        """
        self.step += 1
        here: dict[int, KnownText] = {}
        left = [*self.absent, *self.at_row.values()]
        for number, row in rows.items():
            text = self.at_row.get(number)
            if text is not None and text.begins(row.ids):
                here[number] = text
                left.remove(text)
        for number, row in rows.items():
            if number in here:
                continue
            prefixes = [text for text in left if text.begins(row.ids)]
            if prefixes:
                here[number] = text = max(prefixes, key=lambda text: len(text.ids))
                left.remove(text)
            else:
                here[number] = KnownText(next(self.numbers), len(row.ids) - row.num_new, row.ids[:0], [], self.step)
        for text in here.values():
            text.last_seen = self.step
        self.at_row = here
        return [here[number] for number in rows], self.forget(left)

    def forget(self, left: Sequence[KnownText]) -> list[int]:
        """Keep the recent ones of these texts without a row; returns the ids of the others."""
        recent = sorted((text for text in left if self.step - text.last_seen <= PATIENCE), key=lambda t: t.last_seen)
        self.absent = recent[max(0, len(recent) - self.most_absent) :]
        kept = {text.id for text in self.absent}
        return [text.id for text in left if text.id not in kept]


def extend(text: KnownText, row: Tokens) -> list[int]:
    """Extend a text to its row's tokens; returns the tokens that it gained."""
    gained: list[int] = row[len(text.ids) :].tolist()
    text.ids = row.copy()
    text.tokens += gained
    return gained
