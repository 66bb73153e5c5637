"""DraftedText: the state of one sequence in a drafter that is a model.

This module decides how the tokens that were read behind the kept text are numbered and found again, which part of a
text stays when its end turns out to be different, and which texts share a beginning in the cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor

from forerun.annotations import Float
from forerun.cache.beginnings import Beginning, LiveText, begin_row, longest_beginning
from forerun.device import Download
from forerun.draft.base import Budget
from forerun.models.runner import Read, Runner

NO_SEQUENCE = -1


@dataclass(frozen=True, slots=True)
class UnseenGuesses:
    """Guesses of one sequence that were read into its tail before the host saw them."""

    guesses: Download
    row: int
    num_read: int

    def tokens(self) -> list[int]:
        """The guesses, once the device has drawn them."""
        guesses: list[int] = self.guesses.values()[self.row][: self.num_read]
        return guesses


@dataclass(slots=True)
class DraftedText:
    """One sequence as the drafter knows it; how much of its text the cache holds is the runner's to say.

    Texts of the same `salt` may share what was read of a common beginning; None forbids it.

    `tail` finds what was read behind the kept text, right or wrong: (parent node, token) -> node, numbered as the
    runner does; parent -1 is the kept text itself. `features` are the target's states at the end of the text, as long
    as they are not read. A `lost` sequence is not drafted: its features found no room, and are shown only once.
    """

    text: list[int] = field(default_factory=list)
    root: int | None = None
    highest: int = 0  # the largest token id in the text
    tail: dict[tuple[int, int], int] = field(default_factory=dict)
    pending: UnseenGuesses | None = None  # guesses in the tail, behind all others, that the host has not seen
    features: Float[Tensor, "unread taps hidden"] | None = None
    lost: bool = False
    salt: Hashable = None

    def add(self, parent: int, token: int) -> int:
        """Number a tail node that is about to be read."""
        return self.tail.setdefault((parent, token), len(self.tail))

    def append(self, token: int) -> None:
        """Number a token behind the tail's last node."""
        self.add(len(self.tail) - 1, token)

    def settle(self) -> None:
        """Number the tail nodes that were read unseen."""
        if self.pending is not None:
            for token in self.pending.tokens():
                self.append(token)
        self.pending = None

    def tokens(self, first: int) -> list[int]:
        """Text and root from token `first` on."""
        root = [] if self.root is None or first > len(self.text) else [self.root]
        return self.text[first:] + root

    def rewrite(self, first: int, tokens: Sequence[int]) -> int:
        """Replace text and root from token `first` on; how much of the text before the root stays as it was."""
        text = self.text
        if self.root is not None:
            text.append(self.root)
        same = (old == new for old, new in zip(text[first:], tokens, strict=False))
        kept = first + sum(1 for _ in takewhile(bool, same))
        text[first:] = tokens
        self.root = text.pop() if text else None
        self.highest = max(self.highest, *tokens, 0)
        return min(kept, len(text))

    def clear(self, count: int = 0) -> None:
        """Forget the tail but for its first nodes."""
        for place in list(self.tail)[count:]:
            del self.tail[place]
        self.pending = None

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The tail's nodes that spell the longest possible beginning of `tokens`."""
        path: list[int] = []
        for token in tokens:
            node = self.tail.get((path[-1] if path else -1, token))
            if node is None:
                break
            path.append(node)
        return path

    def shared(self, tokens: Sequence[int]) -> int:
        """How many of the tail's first nodes are a chain that begins as `tokens` do."""
        path = self.path(tokens)
        return next((i for i, node in enumerate(path) if node != i), len(path))


@dataclass(frozen=True, slots=True)
class Revision:
    """A sequence's final text from token `first` on, its root the last; what is before `first` stays."""

    seq_id: int
    first: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A sequence to be drafted: the final tokens that were not observed yet, its root the last, and how far.

    Or one to be judged behind them: `guesses` are read with the root.
    """

    seq_id: int
    late: Sequence[int]
    budget: Budget
    guesses: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RootPass:
    """A pass as far as there was room: what was read, which wishes are left, and the logits asked for."""

    reads: Sequence[Read]
    wishes: list[DraftRow]
    logits: Float[Tensor, "judged vocab"]


class PrefixReuse:
    """What a drafter's cache holds of texts that begin alike is not read again: those in `sequences`, by `runner`."""

    def __init__(self, runner: Runner, sequences: Mapping[int, DraftedText]) -> None:
        self.runner = runner
        self.sequences = sequences

    def known(self, text: Sequence[int], salt: Hashable) -> Beginning:
        """How much of a text's beginning the cache holds."""
        others = (LiveText(seq_id, other.salt, other.text) for seq_id, other in self.sequences.items())
        return longest_beginning(self.runner.cache, text, salt, others)

    def has_room(self, num_tokens: int) -> bool:
        """Whether one more text of so many tokens can be read."""
        return self.runner.cache.can_reserve([NO_SEQUENCE], [num_tokens])

    def begin(self, seq_id: int) -> None:
        """Begin the row of a text that has none with what the cache holds of it."""
        drafted = self.sequences[seq_id]
        if seq_id not in self.runner.cache:
            beginning = self.known(drafted.text, drafted.salt)
            begin_row(self.runner.cache, LiveText(seq_id, drafted.salt, drafted.text), beginning)

    def give_up(self, seq_id: int) -> None:
        """Free a row; what it held stays known as long as there is room, where the text may be shared."""
        drafted = self.sequences.get(seq_id)
        if drafted is None or drafted.salt is None:
            self.runner.release([seq_id])
        else:
            self.runner.retire(seq_id, drafted.text, drafted.salt)
