"""From token ids to text, one token at a time, without splitting a character.

This file decides which text is final after each token, so that all pieces joined are exactly what the tokenizer decodes
from all ids at once. It knows three ways to spell text in tokens: bytes (GPT-2, Llama 3, Qwen), words with byte
fallback (SentencePiece: Llama 2, Mistral, Gemma), and any other, which is decoded through a small window. Stop strings
are found in `accept.stop`.
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
    """Text, and the ordinal of the token that completed it; ordinals count a sequence's output from 0.

    `special` is whether that is a special token.
    """

    text: str
    ordinal: int
    special: bool = False


@runtime_checkable
class Spelling(Protocol):
    """The state of one text being decoded."""

    def feed(self, token_id: int, ordinal: int) -> list[Piece]:
        """The text that this token makes final."""
        ...

    def undecided(self) -> Sequence[Piece]:
        """Text that is final only if the next token leaves it so; empty while a character is unfinished."""
        ...

    def close(self) -> list[Piece]:
        """What is left when no token follows."""
        ...


class IncrementalDecoder:
    """Decodes a growing list of ids: all of `push` and then `finish`, joined, is `Tokenizer.decode` of the ids.

    A character whose bytes lie in several tokens is handed out with its last one. Only text that cannot change any
    more is handed out: a run of byte-fallback tokens is text or replacement characters *as a whole*, so it waits for
    its end. Work per token does not grow with the text. `hidden` ids are passed over.
    """

    def __init__(self, spelling: Spelling, hidden: Collection[int], special: Collection[int]) -> None:
        self._spelling = spelling
        self._hidden = hidden
        self._special = special
        self._num_tokens = 0

    def feed(self, token_id: int) -> list[Piece]:
        """The pieces of text that this token makes final, with the ordinals of the tokens that completed them."""
        ordinal = self._num_tokens
        self._num_tokens += 1
        if token_id in self._hidden:
            return []
        pieces = self._spelling.feed(token_id, ordinal)
        if token_id not in self._special:
            return pieces
        return [Piece(piece.text, piece.ordinal, special=piece.ordinal == ordinal) for piece in pieces]

    def push(self, token_id: int) -> str:
        """The text that this token makes final."""
        return "".join(piece.text for piece in self.feed(token_id))

    def undecided(self) -> Sequence[Piece]:
        """Whole characters that would be final if the ids ended here; empty while a character is unfinished."""
        return self._spelling.undecided()

    def close(self) -> list[Piece]:
        """The pieces that are left, the ids being complete."""
        return self._spelling.close()

    def finish(self) -> str:
        """The text that is left, the ids being complete; an unfinished character becomes U+FFFD."""
        return "".join(piece.text for piece in self.close())


def spelling_of(tokenizer: tokenizers.Tokenizer) -> Callable[[Sequence[int]], Spelling]:
    """How this tokenizer spells text, by its decoder: a maker of fresh states.

    The maker's argument is the last few ids before those that will be decoded: where text precedes, a leading
    space stays.
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
    """What each token adds to a text, in bytes, by id; None for ids without a token.

    `lead` is the number of blanks that the text loses at its start.
    """

    spelled: Sequence[bytes | None]
    lead: int = 0


def byte_table(tokenizer: tokenizers.Tokenizer) -> ByteTable | None:
    """The bytes of all tokens, as the decoder joins them; None for a decoder that does not join bytes."""
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
    """How words are spelled: replacements within a token, then up to `strip` leading `blank`s of the text dropped."""

    replacements: tuple[tuple[str, str], ...]
    strip: int = 0
    blank: str = " "

    def text_of(self, surface: str) -> str:
        """A token with its replacements made."""
        for old, new in self.replacements:
            surface = surface.replace(old, new)
        return surface

    def bytes_of(self, surface: str) -> bytes:
        """The bytes that a token stands for."""
        text = self.text_of(surface)
        byte = _BYTE_TOKEN.match(text)
        return bytes([int(byte[1], 16)]) if byte else text.encode()


def _words_with_fallback(chain: list[dict[str, Any]]) -> Words | None:
    """Reads `Replace* ByteFallback Fuse Strip?`, the decoder of SentencePiece conversions; None for any other."""
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
    """GPT-2's printable stand-ins: a printable Latin-1 byte is itself, the others are counted up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _token_bytes(surface: str) -> bytes:
    """The bytes that a byte-level token stands for; a token outside the alphabet stands for its own text."""
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
    """Tokens are bytes of UTF-8: text is final once its bytes are. `spelled` gives a token's; None: there is none."""

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
    """Byte-fallback tokens in a row. All of them are one text if they are UTF-8 together, else each is U+FFFD."""

    utf8: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")())
    ordinals: list[int] = field(default_factory=list)
    text: list[Piece] = field(default_factory=list)
    broken: bool = False

    @property
    def whole(self) -> bool:
        return not self.broken and not self.utf8.getstate()[0]


class WordSpelling:
    """Tokens are text or single bytes; bytes in a row are decoded together, as the tokenizer's decoder does."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, words: Words, lead: int) -> None:
        self._tokenizer = tokenizer
        self._words = words
        self._lead = lead  # blanks that may still be dropped from the text's start
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
        """The run is not UTF-8 and never will be: its bytes so far are replacement characters, each one."""
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
        return self._run.text if self._run.whole else ()

    def close(self) -> list[Piece]:
        run = self._run
        if not run.ordinals and not run.broken:
            return []
        pieces = run.text if run.whole else self._spoiled()
        self._run = _ByteRun()
        return pieces


class WindowSpelling:
    """Any other decoder: the new text is what a token adds to the text of the few tokens before it.

    Exact for decoders in which a token's text depends on its neighbours alone. While the text ends in U+FFFD a
    character may be unfinished, and the window waits, for as many tokens as a character can have bytes.
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
        unfinished = text.endswith(REPLACEMENT) and len(self._waiting) < 4
        return [] if unfinished else self.close()

    def _text(self, ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        except BaseException as error:  # a damaged decoder panics on some tokens, and a round must not fail for it
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
