"""The text of a sequence in the drafter's tokens, updated while it grows in the target's tokens.

The text is encoded in pieces, each of which is closed at a place where later text cannot change earlier tokens. So
little text is encoded again when it grows, and the tokens depend on the text alone, not on the steps in which it came.

A *seam* is a place before a blank and after a character that is not white space. A piece ends at the first seam after
SHORTEST characters, at the latest after LONGEST. The tokens equal those of the entire text, encoded at once, if all
pieces end at seams, no token of the vocabulary contains a seam, and the tokenizer splits texts at seams, because no
merge then crosses a seam. This holds for all tokenizers that split words off with their leading blanks, such as those
of GPT, Llama, Qwen and Gemma. Otherwise (a text without seams, a vocabulary of phrases) there may be two tokens where
one was possible. Drafts may then be worse, but the output does not change.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.draft.vocab.vocabulary import Vocabulary, shared_special

SHORTEST, LONGEST = 32, 192  # characters
SEAM = re.compile(r"(?<=\S) ")


@dataclass(slots=True)
class Transcript:
    """The state of one sequence: the text after its closed pieces, whose tokens may still change, and counts."""

    open: str = ""
    unfinished: bytes = b""  # the first bytes of an incomplete character
    started: bool = False  # whether there was a token that is not special
    inside: bool = False  # whether there is a closed piece before the open text
    num_target: int = 0  # target tokens so far
    num_closed: int = 0  # drafter tokens of closed pieces and special tokens

    @property
    def empty(self) -> bool:
        """Whether there is no text at all, apart from special tokens."""
        return not (self.inside or self.open or self.unfinished)


class Transcriber:
    """Converts target tokens to the drafter's tokens of the same bytes; special tokens become their counterparts."""

    def __init__(self, target: Vocabulary, drafter: Vocabulary) -> None:
        self.target = target
        self.drafter = drafter
        self.special = shared_special(target, drafter)

    def extend(self, transcript: Transcript, tokens: Sequence[int]) -> list[int]:
        """Append target tokens; returns the drafter's tokens of the pieces that this closes."""
        closed: list[int] = []
        if transcript.num_target == 0 and tokens and [self.special.get(tokens[0])] != self.drafter.front:
            closed += self.drafter.front
        for token in tokens:
            data = self.target.token_bytes[token] if token < self.target.num_ids else None
            closed += self.add_special(transcript, token) if data is None else self.add(transcript, data)
        transcript.num_target += len(tokens)
        transcript.num_closed += len(closed)
        return closed

    def add(self, transcript: Transcript, data: bytes) -> list[int]:
        """Append bytes to the text; returns the drafter's tokens of the pieces that this closes."""
        if not transcript.started:
            data, transcript.started = data.removeprefix(b" " * self.target.lead), True
        data = transcript.unfinished + data
        text, used = decode(data)
        transcript.open += text
        transcript.unfinished = data[used:]
        closed: list[int] = []
        while (end := end_of_piece(transcript.open)) is not None:
            closed += self.drafter.encode(transcript.open[:end], starts=not transcript.inside)
            transcript.open, transcript.inside = transcript.open[end:], True
        return closed

    def add_special(self, transcript: Transcript, token: int) -> list[int]:
        """Close the text before a special token; returns its tokens, and the special token's counterpart if any."""
        closed = self.ending(transcript)
        transcript.inside = not transcript.empty
        transcript.open, transcript.unfinished = "", b""
        return [*closed, self.special[token]] if token in self.special else closed

    def ending(self, transcript: Transcript) -> list[int]:
        """The drafter's tokens of the open text, as if it ended here."""
        tokens = self.drafter.encode(transcript.open, starts=not transcript.inside)
        return tokens + self.drafter.byte_tokens(transcript.unfinished)

    def continuation(self, transcript: Transcript, draft_tokens: Sequence[int]) -> list[int]:
        """The target's tokens for the text that the drafter's draft tokens add.

        The added text is encoded together with the open text before it, so that it is split as in its context. If one
        token would cover the end of the open text and the start of the added text, which is impossible since the open
        text is final, the added text is encoded alone. An incomplete character at the end is left out.
        """
        added = self.drafter.to_bytes(draft_tokens)
        if transcript.empty:
            added = added.removeprefix(b" " * self.drafter.lead)
        data = transcript.unfinished + added
        text, used = decode(data)
        added = data[len(transcript.unfinished) : used]
        tokens = self.target.encode(transcript.open + text, starts=not transcript.inside)
        if transcript.empty:
            return tokens
        last = self.last_tokens(tokens, len(added))
        if last is not None and self.target.to_bytes(last) == added:
            return last
        return self.target.encode(added.decode("utf-8", "surrogateescape"), starts=False)

    def last_tokens(self, tokens: Sequence[int], num_bytes: int) -> list[int] | None:
        """The last tokens, whose bytes are `num_bytes` in all; None if no token starts there."""
        first = len(tokens)
        while num_bytes > 0 and first > 0:
            first -= 1
            num_bytes -= len(self.target.token_bytes[tokens[first]] or b"")
        return list(tokens[first:]) if num_bytes == 0 else None


def decode(data: bytes) -> tuple[str, int]:
    """The text of these bytes, and the number of bytes used: all but those of an incomplete character at the end.

    Bytes that are not UTF-8 become surrogates.
    """
    return codecs.utf_8_decode(data, "surrogateescape", False)


def end_of_piece(text: str) -> int | None:
    """The index where the first piece of the open text ends; None if the text is too short or has no seam yet."""
    seam = SEAM.search(text, SHORTEST)
    if seam is not None and seam.start() <= LONGEST:
        return seam.start()
    return LONGEST if len(text) > LONGEST else None
