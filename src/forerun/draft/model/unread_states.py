"""UnreadStates: the target's hidden states of text that a drafter has not read yet.

The engine reports states only once. They are stored until the drafter reads their text, in its next draft, so that an
idle drafter runs no pass. Each token takes the number of taps times the target's hidden size: 2.3 kB for one tap of 576
numbers in float32, and 24 kB for three of 4,096 in bfloat16, which is a twentieth to a fifth of the target's keys and
values.

Texts with a common prefix share states, as they share keys and values. So the states of finished texts are kept; the
oldest are dropped first when the memory limit is reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from forerun.annotations import Float
from forerun.cache.shared_prefix import num_shared
from forerun.models.runner import Read

UNREAD_BYTES = 64 << 20  # limit of all unread states of a drafter


@dataclass(slots=True)
class TextStates:
    """A text with its salt, and the states of its tokens from index `first` on, in pieces.

    `in_round`: whether the last piece is a view of the states of an entire round, which it keeps in memory.
    """

    salt: Hashable
    tokens: Sequence[int]
    first: int
    pieces: deque[Float[Tensor, "tokens taps hidden"]] = field(default_factory=deque)
    in_round: bool = False

    @property
    def num_tokens(self) -> int:
        """The number of tokens from `first` on."""
        return len(self.tokens) - self.first

    def covers(self, tokens: Sequence[int], salt: Hashable, num_known: int) -> int:
        """How many of `tokens` these states cover from the start, if the first `num_known` need no states."""
        next_token = slice(num_known, num_known + 1)
        if salt is None or self.salt != salt or self.first > num_known:
            return num_known
        if self.tokens[next_token] != tokens[next_token]:
            return num_known
        return max(num_known, num_shared(self.tokens, tokens, len(tokens)))

    def copy_from_round(self) -> None:
        """Copy the last piece if it is a view, so that the states of the entire round can be freed."""
        if self.in_round:
            self.pieces[-1], self.in_round = self.pieces[-1].clone(), False

    def part(self, start: int, end: int) -> Iterator[Float[Tensor, "tokens taps hidden"]]:
        """The states of the tokens from index `start` on and before `end`, in pieces."""
        first = self.first
        for piece in self.pieces:
            if first >= end:
                return
            if first + len(piece) > start:
                yield piece[max(0, start - first) : end - first]
            first += len(piece)


class UnreadStates:
    """The unread states of each sequence (`waiting`), and those of finished texts, the oldest first (`ended`)."""

    def __init__(self) -> None:
        self.waiting: dict[int, TextStates] = {}
        self.ended: deque[TextStates] = deque()
        self.num_bytes = 0

    def add(
        self,
        seq_id: int,
        text: TextStates,
        pieces: Sequence[Float[Tensor, "_ taps hidden"]],
        in_round: bool = False,
    ) -> None:
        """Append pieces to a sequence's unread states; a sequence without any starts with `text`, which may grow."""
        states = self.waiting.setdefault(seq_id, text)
        states.copy_from_round()
        states.pieces.extend(pieces)
        states.in_round = in_round
        self.num_bytes += sum(piece.nbytes for piece in pieces)

    def covered(self, tokens: Sequence[int], salt: Hashable, num_known: int) -> int:
        """The longest prefix of `tokens` that one text `covers`."""
        texts = (*self.ended, *self.waiting.values())
        return max((text.covers(tokens, salt, num_known) for text in texts), default=num_known)

    def share(self, seq_id: int, text: TextStates) -> bool:
        """Give a sequence the states of another text with the same prefix; False if no text has all of them."""
        end = len(text.tokens)
        for other in (*self.ended, *self.waiting.values()):
            if other.covers(text.tokens, text.salt, text.first) == end:
                other.copy_from_round()
                self.add(seq_id, text, [*other.part(text.first, end)])
                return True
        return False

    def longest(self) -> int:
        """The sequence with the most unread tokens."""
        return max(self.waiting, key=lambda seq_id: self.waiting[seq_id].num_tokens)

    def of(self, reads: Sequence[Read]) -> list[Float[Tensor, "_ taps hidden"]]:
        """The states of these tokens, in pieces. The tokens of each read are the first unread ones of its sequence."""
        texts = [(self.waiting[read.seq_id], len(read.tokens)) for read in reads]
        return [piece for text, count in texts for piece in text.part(text.first, text.first + count)]

    def drop(self, seq_id: int, count: int | None = None) -> None:
        """Drop the first `count` states of a sequence, or all; a sequence without states is ignored."""
        if (text := self.waiting.get(seq_id)) is None:
            return
        end = len(text.tokens) if count is None else text.first + count
        while text.pieces and text.first < end:
            piece = text.pieces.popleft()
            rest = piece[end - text.first :]
            self.num_bytes -= piece.nbytes - rest.nbytes
            text.first += len(piece) - len(rest)
            if len(rest):
                text.pieces.appendleft(rest)
        if not text.pieces:
            del self.waiting[seq_id]

    def retire(self, seq_id: int) -> None:
        """Keep the states of a finished sequence for other texts with the same prefix."""
        self.waiting[seq_id].copy_from_round()
        self.ended.append(self.waiting.pop(seq_id))

    def make_room(self) -> bool:
        """Drop the states of finished texts until the rest fits the limit; False if unread texts alone exceed it."""
        while self.num_bytes > UNREAD_BYTES and self.ended:
            self.num_bytes -= sum(piece.nbytes for piece in self.ended.popleft().pieces)
        return self.num_bytes <= UNREAD_BYTES
