"""Growing text: incremental parsing of an answer that arrives in pieces.

A parser is a generator that reads the text as if it were complete, and yields when it needs more text. Therefore the
result does not depend on how the text is cut into pieces. Every parser reads each character a bounded number of times.

If a tag is a special token, the same characters from ordinary tokens are not a tag. A BREAK character is inserted into
such text before it is parsed, and removed from the results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from functools import lru_cache
from typing import Any, TypeVar

Scanned = TypeVar("Scanned")
Scan = Generator[None, None, Scanned]
BLANKS = re.compile(r"\s*")
INSIDE_STRING = re.compile(r'[^"\\]*')
OUTSIDE_STRING = re.compile(r"[\s\da-zA-Z:,.+-]*")  # of JSON; it excludes "<" and "[" so that a tag ends a failed parse
BREAK = "\ud800"  # a lone surrogate, which no decoded text contains


class Tags:
    """Tags that are searched for together. No tag begins with another one or with a blank."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.beginnings = frozenset(name[:length] for name in names for length in range(1, len(name)))
        self.longest = max(map(len, names), default=1) - 1

    def partial_length(self, text: str, start: int) -> int:
        """How many characters at the end of the text, from `start` on, may be the beginning of a tag."""
        lengths = range(min(self.longest, len(text) - start), 0, -1)
        return next((length for length in lengths if text[-length:] in self.beginnings), 0)


tags_of = lru_cache(maxsize=64)(Tags)


class GrowingText:
    """The text so far, and the position `at` up to which it is parsed. `ended`: no more text will be appended."""

    def __init__(self, text: str = "", ended: bool = False) -> None:
        self.text = text
        self.at = 0
        self.ended = ended
        self.before = ""  # the blanks before the last tag that `passage` found
        self.num_forgotten = 0  # characters already removed from the front
        self.memory: dict[object, Any] = {}  # shared by the parsers of this text

    def append(self, piece: str) -> None:
        """Append a piece of text."""
        text, self.text = self.text, ""  # CPython appends in place if there is no other reference
        text += piece
        self.text = text

    @property
    def place(self) -> int:
        """The current position in the entire answer, including removed text."""
        return self.num_forgotten + self.at

    def cached(self, key: object, make: Callable[[], Any]) -> Any:
        """The value stored under `key`, made by `make` at the first call."""
        if key not in self.memory:
            self.memory[key] = make()
        return self.memory[key]

    @property
    def is_over(self) -> bool:
        """Whether all text is parsed and no more will be appended."""
        return self.ended and self.at == len(self.text)

    def peek(self) -> Scan[str]:
        """Peek at the next character; "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def run(self, letters: re.Pattern[str]) -> Scan[str]:
        """Consume the longest run of a character class (a pattern that is a repeated class); returns it."""
        start = self.at
        while True:
            if match := letters.match(self.text, self.at):
                self.at = match.end()
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def one_of(self, texts: Collection[str]) -> Scan[str]:
        """Consume and return the longest of these texts that comes next; "" if none does."""
        longest = max(map(len, texts), default=0)
        while not self.ended:
            rest = self.text[self.at : self.at + longest]
            if not any(len(text) > len(rest) and text.startswith(rest) for text in texts):
                break
            yield
        best = max((text for text in texts if self.text.startswith(text, self.at)), key=len, default="")
        self.at += len(best)
        return best

    def upto(self, tag: str) -> Scan[bool]:
        """Skip text up to and including the next such tag; False if there is none."""
        while (place := self.text.find(tag, self.at)) < 0:
            self.at = max(self.at, len(self.text) - len(tag) + 1)
            if self.ended:
                return False
            yield
        self.at = place + len(tag)
        return True

    def json(self) -> Scan[str]:
        """Consume and return a JSON object or list, delimited by its brackets; "" if there is none."""
        start, depth, quoted = self.at, 1, False
        if not (yield from self.one_of(("{", "["))):
            return ""
        while depth:
            yield from self.run(INSIDE_STRING if quoted else OUTSIDE_STRING)
            letter = self.text[self.at : self.at + 1]
            self.at += len(letter)
            if letter == '"':
                quoted = not quoted
            elif quoted and letter and (yield from self.peek()):
                self.at += 1  # the character after a backslash
            elif letter and letter in "{}[]":
                depth += 1 if letter in "{[" else -1
            else:
                return ""
        return self.text[start : self.at]

    def passage(self, tags: Tags, show: Callable[[str], None]) -> Scan[str]:
        """Pass text before the next tag to `show` as soon as it cannot be part of one. Returns the tag, "" at the end.

        The blanks before the tag are not shown but stored in `before`. Text that was shown is removed.
        """
        shown = firm = seen = self.at  # positions: shown up to; last non-blank; searched up to
        while True:
            tag = tags.pattern.search(self.text, seen)
            end = tag.start() if tag else len(self.text) - (0 if self.ended else tags.partial_length(self.text, seen))
            if solid := self.text[seen:end].rstrip():
                firm = seen + len(solid)
            if tag is None and (self.ended or not tags.names):
                firm = end
            if firm > shown:
                show(self.text[shown:firm])
            if tag or self.ended:
                self.at, self.before = (tag.end(), self.text[firm:end]) if tag else (end, "")
                return tag[0] if tag else ""
            self.text, self.num_forgotten = self.text[firm:], self.num_forgotten + firm
            self.at, shown, firm, seen = 0, 0, 0, end - firm
            yield


def result_of(reading: Scan[Scanned]) -> Scanned:
    """The result of a parser whose text has ended."""
    try:
        next(reading)
    except StopIteration as end:
        result: Scanned = end.value
        return result
    raise AssertionError("a parser must not wait for more text after its end")


class Literals:
    """Marks tags in the text of ordinary tokens as literal text, including tags that span several tokens."""

    def __init__(self, tags: Collection[str]) -> None:
        self.tags = tags_of(tuple(tags))
        self.end = ""  # end of the text since the last special token, in which a tag may begin

    def broken(self, text: str, special: bool) -> str:
        """The next piece of text, with BREAK before the last character of literal tags."""
        if special:
            self.end = ""
            return text
        so_far = self.tags.pattern.sub(lambda tag: f"{tag[0][:-1]}{BREAK}{tag[0][-1]}", self.end + text)
        text, self.end = so_far[len(self.end) :], so_far[max(0, len(so_far) - self.tags.longest) :]
        return text


def unbroken(text: str) -> str:
    """The text without BREAK marks."""
    return text.replace(BREAK, "")
