"""The text of a sequence in the drafter's tokens, kept up to date while it grows in the target's tokens.

This module decides where a text may be cut so that what follows the cut cannot change the tokens before it. So only
little is encoded again when the text grows, and the tokens depend on the text alone, not on the steps in which it came.

A *seam* is a place before a blank and after anything but white space. Texts are closed at the first seam behind every
SHORTEST characters, at the latest after LONGEST, and each closed piece is encoded once. The tokens equal those of the
whole text, encoded at once, if pieces were closed at seams, no token of the vocabulary holds a seam, and the tokenizer
splits a text alike on both sides of one, because merges on the two sides then never meet. That holds for all tokenizers
that cut words off with their leading blanks, such as those of GPT, Llama, Qwen and Gemma. Elsewhere (a text without
seams, a vocabulary of phrases) there may be two tokens where one was possible; guesses may then be worse, but the
output does not change.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.draft.vocab.vocabulary import Vocabulary, shared_marks

SHORTEST, LONGEST = 32, 192  # characters
SEAM = re.compile(r"(?<=\S) ")


@dataclass(slots=True)
class Transcript:
    """One sequence: how much of its text is closed, and the text behind that, whose tokens may still change."""

    open: str = ""
    unfinished: bytes = b""  # the first bytes of a character
    begun: bool = False  # whether a token was told that is not special
    inside: bool = False  # whether text was closed before
    num_told: int = 0  # tokens of the target
    num_closed: int = 0  # tokens of the drafter

    @property
    def empty(self) -> bool:
        """Whether there is no text at all, special tokens aside."""
        return not (self.inside or self.open or self.unfinished)


class Transcriber:
    """Tells texts of `target`'s tokens in `own` tokens, byte for byte; special tokens become their counterparts."""

    def __init__(self, target: Vocabulary, own: Vocabulary) -> None:
        self.target = target
        self.own = own
        self.marks = shared_marks(target, own)

    def extend(self, transcript: Transcript, tokens: Sequence[int]) -> list[int]:
        """Go on with tokens of the target; the drafter's tokens that are certain now, and were not before."""
        closed: list[int] = []
        if transcript.num_told == 0 and tokens and [self.marks.get(tokens[0])] != self.own.front:
            closed += self.own.front
        for token in tokens:
            spelled = self.target.spelled[token] if token < self.target.num_ids else None
            closed += self.mark(transcript, token) if spelled is None else self.add(transcript, spelled)
        transcript.num_told += len(tokens)
        transcript.num_closed += len(closed)
        return closed

    def add(self, transcript: Transcript, spelled: bytes) -> list[int]:
        """Append bytes to the text, and close it where it can be closed."""
        if not transcript.begun:
            spelled, transcript.begun = spelled.removeprefix(b" " * self.target.lead), True
        data = transcript.unfinished + spelled
        text, used = decode(data)
        transcript.open += text
        transcript.unfinished = data[used:]
        closed: list[int] = []
        while (end := closing(transcript.open)) is not None:
            closed += self.own.cut(transcript.open[:end], starts=not transcript.inside)
            transcript.open, transcript.inside = transcript.open[end:], True
        return closed

    def mark(self, transcript: Transcript, token: int) -> list[int]:
        """Close the text before a special token; one without a counterpart leaves nothing but that."""
        closed = self.ending(transcript)
        transcript.inside = not transcript.empty
        transcript.open, transcript.unfinished = "", b""
        return [*closed, self.marks[token]] if token in self.marks else closed

    def ending(self, transcript: Transcript) -> list[int]:
        """The drafter's tokens of what is open, as if the text ended here."""
        tokens = self.own.cut(transcript.open, starts=not transcript.inside)
        return tokens + self.own.raw(transcript.unfinished)

    def continuation(self, transcript: Transcript, guesses: Sequence[int]) -> list[int]:
        """The target's tokens of what the drafter's guesses add to the text.

        The text is encoded together with what is open before it, so that merges and splits are those of the place.
        Where a token would reach over both, the target has said the first part of it otherwise already: then what
        the guesses add is encoded by itself. The rest of a character that is unfinished at the end is left out.
        """
        added = self.own.spell(guesses)
        if transcript.empty:
            added = added.removeprefix(b" " * self.own.lead)
        data = transcript.unfinished + added
        text, used = decode(data)
        added = data[len(transcript.unfinished) : used]
        tokens = self.target.cut(transcript.open + text, starts=not transcript.inside)
        if transcript.empty:
            return tokens
        behind = self.split(tokens, len(added))
        if behind is not None and self.target.spell(behind) == added:
            return behind
        return self.target.cut(added.decode("utf-8", "surrogateescape"), starts=False)

    def split(self, tokens: Sequence[int], num_bytes: int) -> list[int] | None:
        """The last tokens that have so many bytes; None where no token begins there."""
        first = len(tokens)
        while num_bytes > 0 and first > 0:
            first -= 1
            num_bytes -= len(self.target.spelled[tokens[first]] or b"")
        return list(tokens[first:]) if num_bytes == 0 else None


def decode(data: bytes) -> tuple[str, int]:
    """The text of bytes, and how many of them it is: all but an unfinished character. Bytes that are no text stay."""
    return codecs.utf_8_decode(data, "surrogateescape", False)


def closing(text: str) -> int | None:
    """Where the open text is to be closed; None where it is too short or might still go on as one word."""
    seam = SEAM.search(text, SHORTEST)
    if seam is not None and seam.start() <= LONGEST:
        return seam.start()
    return LONGEST if len(text) > LONGEST else None
