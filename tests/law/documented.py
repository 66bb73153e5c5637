"""The drafter of docs/write-a-drafter.md, taken from the page itself: what readers copy is what is tested.

The page's first Python block defines it.
"""

import re
from functools import cache
from pathlib import Path

from forerun.draft.base import Drafter

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "write-a-drafter.md"
PHRASES = (
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys.",
    "Once upon a time, in a big forest, there lived a group of",
    "They were very happy.",
    "The bird was very happy.",
    "The dog saw a big ball.",
    "Don't worry, we can be",
    "came to the park.",
)


@cache
def definitions() -> dict[str, object]:
    """The names that the page's first Python block defines."""
    found = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found, f"{PAGE.name} holds no Python block"
    names: dict[str, object] = {"__name__": "write_a_drafter"}
    exec(compile(found.group(1), str(PAGE), "exec"), names)
    return names


def phrase_drafter(phrases: list[list[int]]) -> Drafter:
    """A fresh PhraseDrafter."""
    kind = definitions()["PhraseDrafter"]
    assert isinstance(kind, type), "PhraseDrafter is no class"
    made = kind(phrases)
    assert isinstance(made, Drafter), "the page's drafter does not fulfil the protocol"
    return made
