"""Past: the answers of finished sequences, separate for each tenant, for suffix decoding.

This module decides how much is kept and what is forgotten first: the oldest answer of all tenants. Where there is a
file, every answer is written to it as soon as it is held here. `suffix_file.py` decides how the file is written.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft.text.suffix_file import PastAnswer, PastFile
from forerun.draft.text.suffix_tree import Leaf, Node, SuffixTree

DEPTH = 12  # longest context, what followed it included
MAX_BYTES = 256 << 20
SLACK = 64  # lines of a file that may be dead before it is written anew


class Past:
    """Contexts of past answers, by tenant: at most about `max_bytes` in all. Not thread-safe, as drafters are not.

    `answers` are what is kept, the oldest first. With a file, what it holds is read now, as far as there is room; the
    newest first. Raises what PastFile raises.
    """

    def __init__(self, depth: int = DEPTH, max_bytes: int = MAX_BYTES, file: PastFile | None = None) -> None:
        self.depth, self.max_bytes, self.file = depth, max_bytes, file
        self.trees: dict[str, SuffixTree] = {}
        self.answers: OrderedDict[str, PastAnswer] = OrderedDict()
        self.num_bytes = 0
        self.origin = secrets.token_hex(8)  # other processes number their sequences too
        if file is not None:
            file.restore(self.restore)

    def restore(self, found: Sequence[PastAnswer]) -> list[PastAnswer] | None:
        """Take over what a file holds; what it should hold instead, if much of it is dead."""
        for kept in reversed(found):
            if self.num_bytes > self.max_bytes:
                break
            if kept.name not in self.answers:  # or else it was said again later, and longer
                self.enter(kept)
        self.answers = OrderedDict(reversed(self.answers.items()))
        self.shrink()
        return list(self.answers.values()) if len(found) > 2 * len(self.answers) + SLACK else None

    def add(self, seq_id: int, tenant: str, answer: Sequence[int]) -> None:
        """Keep a sequence's answer, if it said anything, in the place of an earlier one of it."""
        self.drop(self.name(seq_id))
        if not answer:
            return
        kept = PastAnswer(self.name(seq_id), tenant, answer)
        self.enter(kept)
        self.shrink()
        if self.file is not None and kept.name in self.answers:
            self.file.append(kept)

    def reopen(self, seq_id: int) -> None:
        """A sequence was resumed: its answer so far is no past answer."""
        self.drop(self.name(seq_id))

    def clear(self) -> None:
        """Forget all answers. The file stays as it is."""
        self.trees.clear()
        self.answers.clear()
        self.num_bytes = 0

    def name(self, seq_id: int) -> str:
        """The name of a sequence's answer, here and in files."""
        return f"{self.origin}-{seq_id}"

    def enter(self, kept: PastAnswer) -> None:
        """Add an answer to its tenant's tree."""
        tree = self.trees.setdefault(kept.tenant, SuffixTree(self.depth))
        before = tree.num_bytes
        self.answers[kept.name] = PastAnswer(kept.name, kept.tenant, tree.add(kept.tokens))
        self.num_bytes += tree.num_bytes - before

    def shrink(self) -> None:
        """Drop the oldest answers until there is room."""
        while self.num_bytes > self.max_bytes:
            self.drop(next(iter(self.answers)))

    def drop(self, name: str) -> None:
        """Forget an answer; unknown ones are ignored."""
        kept = self.answers.pop(name, None)
        if kept is None:
            return
        tree = self.trees[kept.tenant]
        before = tree.num_bytes
        tree.remove(kept.tokens)
        self.num_bytes += tree.num_bytes - before
        if not tree.num_bytes:
            del self.trees[kept.tenant]


@dataclass(slots=True)
class Reader:
    """Where a growing text stands in its tenant's past, so that each token of it is looked up once.

    `places` is what is stored for its last 1, 2, ... tokens, when it had `length` of them and the tree was as it was.
    """

    tree: SuffixTree | None = None
    num_changes: int = 0
    length: int = 0
    places: list[Node | Leaf] = field(default_factory=list)

    def read(self, tree: SuffixTree | None, text: Sequence[int]) -> list[Node | Leaf]:
        """Go on to the text's end; from a little before it where the past has changed, or much is unread."""
        if tree is None:
            self.tree, self.places = None, []
            return self.places
        first = len(text) - tree.depth
        if tree is not self.tree or tree.num_changes != self.num_changes or self.length < first:
            self.tree, self.num_changes, self.length, self.places = tree, tree.num_changes, max(0, first), []
        for token in text[self.length :]:
            self.places = tree.follow(self.places, token)
        self.length = len(text)
        return self.places
