"""Incremental detokenization: from token ids to text, one token at a time, without splitting a character.

This file decides which text is final after each token, so that all pieces joined are exactly what the tokenizer decodes
from all ids at once. There are three kinds of decoders: bytes (GPT-2, Llama 3, Qwen), words with byte fallback
(SentencePiece: Llama 2, Mistral, Gemma), and all others, which are called on a small window of tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tokenizers

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Piece(NamedTuple):
    """Text, and the ordinal of the token that completed it: its index in the sequence's output.

    `special`: whether this is a special token.
    """

    text: str
    ordinal: int
    special: bool = False


@runtime_checkable
class Spelling(Protocol):
    """The decoding state of one text."""

    def feed(self, token_id: int, ordinal: int) -> list[Piece]:
        """The text that becomes final with this token."""
        ...

    def undecided(self) -> Sequence[Piece]:
        """Decoded text that the next token may still change; empty while a character is incomplete."""
        ...

    def close(self) -> list[Piece]:
        """The rest of the text, after the last token."""
        ...


class IncrementalDecoder:
    """Decodes ids one by one: the results of `push` and then `finish`, joined, are `Tokenizer.decode` of all ids.

    Only final text is returned: a character whose bytes are in several tokens is returned with the last of them, and a
    run of byte-fallback tokens at its end, since an invalid byte turns all of it into replacement characters. The work
    per token does not grow with the text. `hidden` ids are skipped.
    """

    def __init__(self, spelling: Spelling, hidden: Collection[int], special: Collection[int]) -> None:
        self._spelling = spelling
        self._hidden = hidden
        self._special = special
        self._num_tokens = 0

    def feed(self, token_id: int) -> list[Piece]:
        """The pieces of text that become final with this token."""
        ordinal = self._num_tokens
        self._num_tokens += 1
        if token_id in self._hidden:
            return []
        pieces = self._spelling.feed(token_id, ordinal)
        if token_id not in self._special:
            return pieces
        return [Piece(piece.text, piece.ordinal, special=piece.ordinal == ordinal) for piece in pieces]

    def push(self, token_id: int) -> str:
        """The text that becomes final with this token."""
        return "".join(piece.text for piece in self.feed(token_id))

    def undecided(self) -> Sequence[Piece]:
        """Decoded text that the next token may still change; empty while a character is incomplete."""
        return self._spelling.undecided()

    def close(self) -> list[Piece]:
        """The remaining pieces, after the last token."""
        return self._spelling.close()

    def finish(self) -> str:
        """The remaining text, after the last token; an incomplete character becomes U+FFFD."""
        return "".join(piece.text for piece in self.close())


def spelling_of(tokenizer: tokenizers.Tokenizer) -> Callable[[Sequence[int]], Spelling]:
    """A function that makes new decoding states for this tokenizer.

    Its argument is the last few ids before those that will be decoded; if there are any, a leading blank is kept.
    """
    chain = _decoder_chain(tokenizer)
    if [step["type"] for step in chain] == ["ByteLevel"]:
        spelled = cache(partial(_spelled, tokenizer))
        return lambda after: ByteSpelling(spelled)
    words = _words_with_fallback(chain)
    if words is not None:
        return lambda after: WordSpelling(tokenizer, words, lead=0 if after else words.strip)
    return lambda after: WindowSpelling(tokenizer, after)


@dataclass(frozen=True, slots=True)
class ByteTable:
    """The bytes that each id adds to a text; None for ids without a token.

    `lead` is the number of leading blanks that are removed from a text.
    """

    spelled: Sequence[bytes | None]
    lead: int = 0


def byte_table(tokenizer: tokenizers.Tokenizer) -> ByteTable | None:
    """The bytes of all tokens; None for a decoder that does not join bytes."""
    chain, vocab = _decoder_chain(tokenizer), tokenizer.get_vocab()
    words = _words_with_fallback(chain)
    if [step["type"] for step in chain] != ["ByteLevel"] and words is None:
        return None
    spelled: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for surface, token_id in vocab.items():
        spelled[token_id] = _token_bytes(surface) if words is None else words.bytes_of(surface)
    return ByteTable(spelled, words.strip if words is not None and words.blank == " " else 0)


def _decoder_chain(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


@dataclass(frozen=True, slots=True)
class Words:
    """A decoder of words: replacements within each token, then up to `strip` leading `blank`s are removed."""

    replacements: tuple[tuple[str, str], ...]
    strip: int = 0
    blank: str = " "

    def text_of(self, surface: str) -> str:
        """The text of a token, given in the spelling of the vocabulary."""
        for old, new in self.replacements:
            surface = surface.replace(old, new)
        return surface

    def bytes_of(self, surface: str) -> bytes:
        """The bytes of a token, given in the spelling of the vocabulary."""
        text = self.text_of(surface)
        byte = _BYTE_TOKEN.match(text)
        return bytes([int(byte[1], 16)]) if byte else text.encode()


def _words_with_fallback(chain: list[dict[str, Any]]) -> Words | None:
    """The decoder `Replace* ByteFallback Fuse Strip?` of converted SentencePiece models; None for any other."""
    replacements = []
    rest = list(chain)
    while rest and rest[0]["type"] == "Replace" and rest[0]["pattern"].get("String"):
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step["type"] for step in rest]
    if kinds == ["ByteFallback", "Fuse"]:
        return Words(tuple(replacements))
    if kinds == ["ByteFallback", "Fuse", "Strip"] and rest[-1]["stop"] == 0:
        return Words(tuple(replacements), rest[-1]["start"], rest[-1]["content"])
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for bytes: a printable Latin-1 byte is itself, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _token_bytes(surface: str) -> bytes:
    """The bytes of a byte-level token; a token with characters outside the alphabet is its own text."""
    if surface.isascii():
        return surface.encode()
    try:
        return bytes([_BYTE_OF[char] for char in surface])
    except KeyError:
        return surface.encode()


def _spelled(tokenizer: tokenizers.Tokenizer, token_id: int) -> bytes | None:
    surface = tokenizer.id_to_token(token_id)
    return None if surface is None else _token_bytes(surface)


class ByteSpelling:
    """Decodes tokens that are bytes of UTF-8; `spelled` returns a token's bytes, None for an id without a token."""

    def __init__(self, spelled: Callable[[int], bytes | None]) -> None:
        self._spelled = spelled
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = 0

    def feed(self, token_id: int, ordinal: int) -> list[Piece]:
        spelled = self._spelled(token_id)
        if spelled is None:
            return []
        self._last = ordinal
        return _pieces(self._utf8.decode(spelled), ordinal)

    def undecided(self) -> Sequence[Piece]:
        return ()

    def close(self) -> list[Piece]:
        return _pieces(self._utf8.decode(b"", final=True), self._last)


@dataclass(slots=True)
class _ByteRun:
    """Consecutive byte-fallback tokens. If together they are valid UTF-8 they are its text, else each is U+FFFD."""

    utf8: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")())
    ordinals: list[int] = field(default_factory=list)
    text: list[Piece] = field(default_factory=list)
    broken: bool = False

    @property
    def is_text(self) -> bool:
        return not self.broken and not self.utf8.getstate()[0]


class WordSpelling:
    """Decodes tokens that are text or single bytes; consecutive bytes are decoded together."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, words: Words, lead: int) -> None:
        self._tokenizer = tokenizer
        self._words = words
        self._lead = lead  # leading blanks that may still be removed
        self._run = _ByteRun()

    def feed(self, token_id: int, ordinal: int) -> list[Piece]:
        surface = self._tokenizer.id_to_token(token_id)
        if surface is None:
            return []
        surface = self._words.text_of(surface)
        byte = _BYTE_TOKEN.match(surface)
        if byte:
            return self._feed_byte(int(byte[1], 16), ordinal)
        return [*self.close(), *self._stripped(surface, ordinal)]

    def _feed_byte(self, byte: int, ordinal: int) -> list[Piece]:
        run = self._run
        run.ordinals.append(ordinal)
        if not run.broken:
            try:
                run.text += self._stripped(run.utf8.decode(bytes([byte])), ordinal)
            except UnicodeDecodeError:
                run.broken = True
        return self._spoiled() if run.broken else []

    def _spoiled(self) -> list[Piece]:
        """The run is invalid UTF-8: each of its bytes so far becomes a replacement character."""
        self._lead = 0
        pieces = [Piece(REPLACEMENT, ordinal) for ordinal in self._run.ordinals]
        self._run.ordinals.clear()
        self._run.text.clear()
        return pieces

    def _stripped(self, text: str, ordinal: int) -> list[Piece]:
        while self._lead and text:
            if text[0] != self._words.blank:
                self._lead = 0
                break
            text = text[1:]
            self._lead -= 1
        return _pieces(text, ordinal)

    def undecided(self) -> Sequence[Piece]:
        return self._run.text if self._run.is_text else ()

    def close(self) -> list[Piece]:
        run = self._run
        if not run.ordinals and not run.broken:
            return []
        pieces = run.text if run.is_text else self._spoiled()
        self._run = _ByteRun()
        return pieces


class WindowSpelling:
    """Any other decoder: a token's text is the text that it adds to that of the few tokens before it.

    Exact for decoders in which a token's text depends on adjacent tokens only. While the text ends in U+FFFD, a
    character may be incomplete, and text is held back for up to four tokens, the most bytes of a character.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = list(after)
        self._waiting: list[int] = []
        self._last = 0

    def feed(self, token_id: int, ordinal: int) -> list[Piece]:
        if self._tokenizer.id_to_token(token_id) is None:
            return []
        self._waiting.append(token_id)
        self._last = ordinal
        text = self._text(self._shown + self._waiting)
        incomplete = text.endswith(REPLACEMENT) and len(self._waiting) < 4
        return [] if incomplete else self.close()

    def _text(self, ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        except BaseException as error:  # damaged decoders panic on some tokens, which must not fail a round
            if type(error).__name__ != "PanicException":
                raise
            return "".join(self._tokenizer.id_to_token(i) or "" for i in ids)

    def undecided(self) -> Sequence[Piece]:
        return ()

    def close(self) -> list[Piece]:
        new = self._text(self._shown + self._waiting)[len(self._text(self._shown)) :]
        if self._waiting:
            self._shown = [*self._shown, *self._waiting][-4:]
        self._waiting = []
        return _pieces(new, self._last)


def _pieces(text: str, ordinal: int) -> list[Piece]:
    return [Piece(text, ordinal)] if text else []
