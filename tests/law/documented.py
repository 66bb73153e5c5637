"""The drafters of docs/write-a-drafter.md, taken from the page itself: what readers copy is what is tested.

The first Python block of the page, and the first one of its section about states, define one each.
"""

import re
from functools import cache

from forerun.draft.base import Drafter
from kit.checkpoints import ROOT

PAGE = ROOT / "docs" / "write-a-drafter.md"
PHRASES = (
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys.",
    "Once upon a time, in a big forest, there lived a group of",
    "They were very happy.",
    "The bird was very happy.",
    "The dog saw a big ball.",
    "Don't worry, we can be",
    "came to the park.",
)


DEFINING = ("class PhraseDrafter", "class SimilarPlaceDrafter")


@cache
def definitions() -> dict[str, object]:
    """The names that the page's defining blocks define."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "write_a_drafter"}
    for start in DEFINING:
        (body,) = (block for block in blocks if start in block)
        exec(compile(body, str(PAGE), "exec"), names)
    return names


def made(name: str, *arguments: object) -> Drafter:
    """A fresh drafter of this class."""
    kind = definitions()[name]
    assert isinstance(kind, type), f"{name} is no class"
    drafter = kind(*arguments)
    assert isinstance(drafter, Drafter), "the page's drafter does not fulfil the protocol"
    return drafter


def phrase_drafter(phrases: list[list[int]]) -> Drafter:
    """A fresh PhraseDrafter."""
    return made("PhraseDrafter", phrases)


def similar_place_drafter() -> Drafter:
    """A fresh SimilarPlaceDrafter."""
    return made("SimilarPlaceDrafter")
