"""UnreadStates: the target's states of text that a drafter was shown and has not read.

States are shown once, so they are kept until the drafter reads their text, when it is asked for a draft: a drafter that
rests makes no pass. A token takes the taps times the target's width: 2.3 kB for one tap of 576 numbers in float32, and
24 kB for three of 4,096 in bfloat16, which is a twentieth to a fifth of what the target's keys and values take.

Texts that begin alike share states, as they share keys and values. So the states of a text that ended stay until they
are the oldest and there is no room.
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
    """A text of this salt, and the states of its tokens from number `first` on, in pieces.

    `in_round`: the last of them is a part of those of a whole round, which it holds.
    """

    salt: Hashable
    tokens: Sequence[int]
    first: int
    pieces: deque[Float[Tensor, "tokens taps hidden"]] = field(default_factory=deque)
    in_round: bool = False

    @property
    def num_tokens(self) -> int:
        """How many tokens it has states of, as far as they are shown."""
        return len(self.tokens) - self.first

    def covers(self, tokens: Sequence[int], salt: Hashable, num_known: int) -> int:
        """How many of the tokens are known with these states, where the first `num_known` are in any case."""
        behind = slice(num_known, num_known + 1)
        if salt is None or self.salt != salt or self.first > num_known or self.tokens[behind] != tokens[behind]:
            return num_known
        return max(num_known, num_shared(self.tokens, tokens, len(tokens)))

    def leave_round(self) -> None:
        """Hold no more than its own states: they wait for longer than until the next round."""
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
    """The states that are not read, by sequence, and those of texts that ended, the oldest first."""

    def __init__(self) -> None:
        self.waiting: dict[int, ShownText] = {}
        self.ended: deque[ShownText] = deque()
        self.num_bytes = 0

    def __bool__(self) -> bool:
        """Whether any sequence has some."""
        return bool(self.waiting)

    def add(
        self,
        seq_id: int,
        text: ShownText,
        pieces: Sequence[Float[Tensor, "_ taps hidden"]],
        in_round: bool = False,
    ) -> None:
        """Keep pieces behind those that wait; where none do, from where `text` says, whose tokens may grow."""
        shown = self.waiting.setdefault(seq_id, text)
        shown.leave_round()
        shown.pieces.extend(pieces)
        shown.in_round = in_round
        self.num_bytes += sum(piece.nbytes for piece in pieces)

    def known(self, tokens: Sequence[int], salt: Hashable, num_known: int) -> int:
        """How many of the tokens are known with states of any text, where the first `num_known` are in any case."""
        texts = (*self.ended, *self.waiting.values())
        return max((text.covers(tokens, salt, num_known) for text in texts), default=num_known)

    def share(self, seq_id: int, text: ShownText) -> bool:
        """Give a sequence's text, from its `first` on, the states of another one; False where none has all of them."""
        end = len(text.tokens)
        for other in (*self.ended, *self.waiting.values()):
            if other.covers(text.tokens, text.salt, text.first) == end:
                other.leave_round()
                self.add(seq_id, text, [*other.part(text.first, end)])
                return True
        return False

    def fullest(self) -> int:
        """The sequence of which most is not read."""
        return max(self.waiting, key=lambda seq_id: self.waiting[seq_id].num_tokens)

    def of(self, reads: Sequence[Read]) -> list[Float[Tensor, "_ taps hidden"]]:
        """The states of these tokens, in pieces, with which the unread texts begin."""
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
        """Keep the states of a sequence that ends for texts that begin alike."""
        self.waiting[seq_id].leave_round()
        self.ended.append(self.waiting.pop(seq_id))

    def fits(self) -> bool:
        """Forget texts that ended until the rest takes no more than it may; False where it still does."""
        while self.num_bytes > UNREAD_BYTES and self.ended:
            self.num_bytes -= sum(piece.nbytes for piece in self.ended.popleft().pieces)
        return self.num_bytes <= UNREAD_BYTES
