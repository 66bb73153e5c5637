"""Literals: what a model spells in ordinary tokens, where the tags that it spells are special tokens.

Readers of answers look for tags in text. Here such text is broken before they see it, so that no reader takes it for a
tag, and made whole again when it is told.
"""

from __future__ import annotations

import re
from collections.abc import Collection

BREAK = "\ud800"  # half a character, which is in no decoded text


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
