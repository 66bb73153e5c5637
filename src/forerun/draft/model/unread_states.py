"""UnreadStates: the target's hidden states of text that a drafter has not read yet.

States come only once, so they are kept until the drafter reads their text, when it is asked for a draft: an idle
drafter runs no pass. Each token takes the number of taps times the target's hidden size: 2.3 kB for one tap of 576
numbers in float32, and 24 kB for three of 4,096 in bfloat16, which is a twentieth to a fifth of the target's keys and
values.

Texts with a common prefix share states, as they share keys and values. So the states of a finished text stay until they
are the oldest and memory is short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from forerun.annotations import Float
from forerun.cache.beginnings import num_shared
from forerun.models.runner import Read

UNREAD_BYTES = 64 << 20  # of all states that one drafter has not read; beyond, texts are read, those that ended dropped


@dataclass(slots=True)
class ShownText:
    """A text of this salt, and the states of its tokens from index `first` on, in pieces.

    `in_round`: the last piece is a view of the states of a whole round, which it keeps alive.
    """

    salt: Hashable
    tokens: Sequence[int]
    first: int
    pieces: deque[Float[Tensor, "tokens taps hidden"]] = field(default_factory=deque)
    in_round: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens up to the last one with a state."""
        return len(self.tokens) - self.first

    def covers(self, tokens: Sequence[int], salt: Hashable, num_known: int) -> int:
        """How many of the tokens are covered by these states, if the first `num_known` are known anyway."""
        behind = slice(num_known, num_known + 1)
        if salt is None or self.salt != salt or self.first > num_known or self.tokens[behind] != tokens[behind]:
            return num_known
        return max(num_known, num_shared(self.tokens, tokens, len(tokens)))

    def leave_round(self) -> None:
        """Copy its own states, so that those of the whole round can be freed."""
        if self.in_round:
            self.pieces[-1], self.in_round = self.pieces[-1].clone(), False

    def part(self, start: int, end: int) -> Iterator[Float[Tensor, "tokens taps hidden"]]:
        """The states of its tokens from `start` on and before `end`, in pieces."""
        first = self.first
        for piece in self.pieces:
            if first >= end:
                return
            if first + len(piece) > start:
                yield piece[max(0, start - first) : end - first]
            first += len(piece)


class UnreadStates:
    """The unread states by sequence, and those of finished texts, the oldest first."""

    def __init__(self) -> None:
        self.waiting: dict[int, ShownText] = {}
        self.ended: deque[ShownText] = deque()
        self.num_bytes = 0

    def __bool__(self) -> bool:
        """Whether any sequence has unread states."""
        return bool(self.waiting)

    def add(
        self,
        seq_id: int,
        text: ShownText,
        pieces: Sequence[Float[Tensor, "_ taps hidden"]],
        in_round: bool = False,
    ) -> None:
        """Append pieces to a sequence's unread states; the first ones start where `text`, which may grow, says."""
        shown = self.waiting.setdefault(seq_id, text)
        shown.leave_round()
        shown.pieces.extend(pieces)
        shown.in_round = in_round
        self.num_bytes += sum(piece.nbytes for piece in pieces)

    def known(self, tokens: Sequence[int], salt: Hashable, num_known: int) -> int:
        """How many of the tokens are covered by states of any text, if the first `num_known` are known anyway."""
        texts = (*self.ended, *self.waiting.values())
        return max((text.covers(tokens, salt, num_known) for text in texts), default=num_known)

    def share(self, seq_id: int, text: ShownText) -> bool:
        """Give a sequence's text, from its `first` on, the states of another one; False if none has all of them."""
        end = len(text.tokens)
        for other in (*self.ended, *self.waiting.values()):
            if other.covers(text.tokens, text.salt, text.first) == end:
                other.leave_round()
                self.add(seq_id, text, [*other.part(text.first, end)])
                return True
        return False

    def fullest(self) -> int:
        """The sequence with the most unread text."""
        return max(self.waiting, key=lambda seq_id: self.waiting[seq_id].num_tokens)

    def of(self, reads: Sequence[Read]) -> list[Float[Tensor, "_ taps hidden"]]:
        """The states of these tokens, in pieces; the tokens are prefixes of the unread texts."""
        texts = [(self.waiting[read.seq_id], len(read.tokens)) for read in reads]
        return [piece for text, count in texts for piece in text.part(text.first, text.first + count)]

    def drop(self, seq_id: int, count: int | None = None) -> None:
        """Forget the first `count` states of a sequence, or all; one without any is ignored."""
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

    def end(self, seq_id: int) -> None:
        """Keep the states of a finished sequence for texts with the same prefix."""
        self.waiting[seq_id].leave_round()
        self.ended.append(self.waiting.pop(seq_id))

    def fits(self) -> bool:
        """Drop finished texts until the rest fits the limit; False if it still does not."""
        while self.num_bytes > UNREAD_BYTES and self.ended:
            self.num_bytes -= sum(piece.nbytes for piece in self.ended.popleft().pieces)
        return self.num_bytes <= UNREAD_BYTES
