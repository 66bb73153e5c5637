"""Growing text: one answer as it comes, read from its front.

A reader is a generator that goes through the text as if all of it were there, and yields where it has to wait for more.
So a text is read alike however it is cut into pieces. Every reader looks at each letter a bounded number of times.

Where tags are special tokens, text of ordinary tokens that spells one is broken before readers see it, so that none
takes it for a tag, and made whole again when it is told.
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
OUTSIDE_STRING = re.compile(r"[\s\da-zA-Z:,.+-]*")  # of JSON; that no tag fits in here is what ends hopeless readings
BREAK = "\ud800"  # half a character, which is in no decoded text


class Tags:
    """Texts that are looked for together; none of them begins with another one or with a blank."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.beginnings = frozenset(name[:length] for name in names for length in range(1, len(name)))
        self.longest = max(map(len, names), default=1) - 1

    def begun(self, text: str, start: int) -> int:
        """How many letters at the text's end, none of them in front of `start`, may begin one of the tags."""
        lengths = range(min(self.longest, len(text) - start), 0, -1)
        return next((length for length in lengths if text[-length:] in self.beginnings), 0)


tags_of = lru_cache(maxsize=64)(Tags)


class GrowingText:
    """The text so far, and the place up to which it is read. `ended` says that nothing will follow."""

    def __init__(self, text: str = "", ended: bool = False) -> None:
        self.text = text
        self.at = 0
        self.ended = ended
        self.before = ""  # the blanks in front of the last tag that `passage` came to
        self.num_forgotten = 0  # letters in front of the text
        self.memory: dict[object, Any] = {}  # what holds for later readings too

    def append(self, piece: str) -> None:
        """Let the text grow."""
        text, self.text = self.text, ""  # only a string that nothing else holds grows in place
        text += piece
        self.text = text

    @property
    def place(self) -> int:
        """The place in the whole answer, which stays when text is forgotten."""
        return self.num_forgotten + self.at

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` gives, which is called for the first reading that asks."""
        if key not in self.memory:
            self.memory[key] = make()
        return self.memory[key]

    @property
    def over(self) -> bool:
        """Whether everything is read and nothing will follow."""
        return self.ended and self.at == len(self.text)

    def letter(self) -> Scan[str]:
        """The next letter, which is not gone behind; "" at the text's end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def run(self, letters: re.Pattern[str]) -> Scan[str]:
        """Go behind all the letters that the pattern, a repeated class, matches from here on; which they are."""
        start = self.at
        while True:
            self.at = end_of(letters, self.text, self.at)
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def one_of(self, texts: Collection[str]) -> Scan[str]:
        """Go behind the longest of some texts that stands here; "" where none does."""
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
        """Go behind the next such tag; whether there is one."""
        while (place := self.text.find(tag, self.at)) < 0:
            self.at = max(self.at, len(self.text) - len(tag) + 1)
            if self.ended:
                return False
            yield
        self.at = place + len(tag)
        return True

    def json(self) -> Scan[str]:
        """Go behind the JSON object or list that stands here, which its brackets end; "" where none can."""
        start, depth, quoted = self.at, 1, False
        if not (yield from self.one_of(("{", "["))):
            return ""
        while depth:
            yield from self.run(INSIDE_STRING if quoted else OUTSIDE_STRING)
            letter = self.text[self.at : self.at + 1]
            self.at += len(letter)
            if letter == '"':
                quoted = not quoted
            elif quoted and letter and (yield from self.letter()):
                self.at += 1  # behind a backslash
            elif letter and letter in "{}[]":
                depth += 1 if letter in "{[" else -1
            else:
                return ""
        return self.text[start : self.at]

    def passage(self, tags: Tags, show: Callable[[str], None]) -> Scan[str]:
        """Show the text up to the next tag, as soon as it is certain; which tag that is, "" at the text's end.

        The blanks in front of the tag are not shown but kept in `before`. Text that was shown is forgotten.
        """
        shown = firm = seen = self.at  # up to here it is shown; is not blank; was looked at
        while True:
            tag = tags.pattern.search(self.text, seen)
            end = tag.start() if tag else len(self.text) - (0 if self.ended else tags.begun(self.text, seen))
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


def end_of(letters: re.Pattern[str], text: str, at: int) -> int:
    """Where a run of letters ends."""
    match = letters.match(text, at)
    return match.end() if match else at


def result_of(reading: Scan[Scanned]) -> Scanned:
    """What a reader of a text that has ended finds."""
    try:
        next(reading)
    except StopIteration as end:
        result: Scanned = end.value
        return result
    raise AssertionError("a text that has ended is not waited for")


class Literals:
    """Breaks the tags that the ordinary tokens of one growing answer spell, however many tokens that takes."""

    def __init__(self, tags: Collection[str]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, tags)) or r"(?!)")
        self.longest = max(map(len, tags), default=1) - 1
        self.end = ""  # of the text, behind the last special token: what a tag may begin in

    def broken(self, text: str, special: bool) -> str:
        """The next text, of ordinary tokens or of a special one. A tag is broken in front of its last letter."""
        if special:
            self.end = ""
            return text
        so_far = self.pattern.sub(lambda tag: f"{tag[0][:-1]}{BREAK}{tag[0][-1]}", self.end + text)
        text, self.end = so_far[len(self.end) :], so_far[max(0, len(so_far) - self.longest) :]
        return text


def unbroken(text: str) -> str:
    """Text without its breaks."""
    return text.replace(BREAK, "")
