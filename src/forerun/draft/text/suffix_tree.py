"""SuffixTree: the counts of continuations of every context of a few tokens, in texts that grow and can be removed.

A context that occurred once is a leaf, which points into its text; one that occurred again is a node with children. So
the tree grows with repetition, and appending a token touches one node for each context that ends there and occurred
before: at most `depth` of them, few in fresh text. Its counts are a function of its texts alone, in whatever order they
came and whatever texts were removed. After the suffix trees of SuffixDecoding (Oliaro et al., 2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

LEAST_SHARE = 0.1  # rarer continuations are counted, but not offered: there are never more than ten
NODE_BYTES, LEAF_BYTES, TOKEN_BYTES = 75, 120, 45  # measured on CPython 3.11, over random and repetitive texts


# What followed a context: how often anything did, the tokens that did in at least LEAST_SHARE of all cases, and, if
# there were several, what is stored for each.
Followed = tuple[int, Sequence[int], "dict[int, Node | Leaf] | None"]


@dataclass(slots=True)
class Leaf:
    """A context that occurred once: `text[end]` is the token that followed, if any."""

    text: list[int]
    end: int
    count: ClassVar[int] = 1

    def after(self, token: int) -> Leaf | None:
        """The contexts with one more token; None where another one followed."""
        return Leaf(self.text, self.end + 1) if self.text[self.end : self.end + 1] == [token] else None

    def followed(self) -> Followed:
        """What followed, if anything did."""
        return (1, (self.text[self.end],), None) if self.end < len(self.text) else (0, (), None)


@dataclass(slots=True)
class Node:
    """A context that occurred `count` times, and what is stored for its continuations.

    Most went on in one way only, by `token`, and need no dictionary. `known` is what followed, until something changes.
    """

    count: int = 0
    token: int = -1  # -1: there is no continuation, or several
    child: Node | Leaf | None = None
    several: dict[int, Node | Leaf] | None = None
    known: Followed | None = field(default=None, compare=False)

    def after(self, token: int) -> Node | Leaf | None:
        """The context with one more token; None where it never occurred."""
        if self.several is not None:
            return self.several.get(token)
        return self.child if token == self.token else None

    def put(self, token: int, child: Node | Leaf) -> None:
        """Store a continuation, in the place of the one with the same token."""
        if self.several is not None:
            self.several[token] = child
        elif self.child is None or self.token == token:
            self.token, self.child = token, child
        else:
            self.several = {self.token: self.child, token: child}
            self.token, self.child = -1, None

    def drop(self, token: int) -> None:
        """Forget the continuation with this token."""
        if self.several is None:
            self.token, self.child = -1, None
            return
        del self.several[token]
        if len(self.several) == 1:
            ((self.token, self.child),) = self.several.items()
            self.several = None

    def followed(self) -> Followed:
        if self.several is None:
            return (0, (), None) if self.child is None else (self.child.count, (self.token,), None)
        if self.known is None:
            total = sum([child.count for child in self.several.values()])
            often = [token for token, child in self.several.items() if child.count / total >= LEAST_SHARE]
            self.known = total, often, self.several
        return self.known


class Change(NamedTuple):
    """The effect of appending a token on one context: what was stored before."""

    node: Node
    token: int
    before: Node | Leaf | None


class Insertion(NamedTuple):
    """The effect of appending a token on a tree, to be undone."""

    changes: list[Change]
    matches: list[Node]
    num_bytes: int


@dataclass(slots=True)
class SuffixTree:
    """Contexts of up to `depth` tokens. One text grows at a time, at its end; texts that grow no more may leave.

    `matches[i]` is the node of the growing text's last i + 1 tokens, for as many as occurred before. `num_bytes` is
    about what it takes, its texts included. `num_changes` tells whether other texts than the growing one changed.
    """

    depth: int
    root: Node = field(default_factory=Node)
    text: list[int] = field(default_factory=list)
    matches: list[Node] = field(default_factory=list)
    num_bytes: int = 0
    num_changes: int = 0

    def __post_init__(self) -> None:
        assert self.depth >= 2, f"contexts of up to {self.depth} tokens: one, and what followed it, are two"

    def add(self, tokens: Sequence[int]) -> list[int]:
        """A whole text, which grows no more. Returns it as it is stored: `remove` wants it back."""
        self.text, self.matches = [], []
        for token in tokens:
            self.append(token)
        stored, self.text, self.matches = self.text, [], []
        self.num_changes += 1
        return stored

    def append(self, token: int, steps: list[Insertion] | None = None) -> None:
        """The growing text's next token, in O(1) per context that ends before it and occurred before.

        What is to be taken back is noted in `steps`.
        """
        text = self.text
        text.append(token)
        leaf, old = Leaf(text, len(text)), self.num_bytes
        changes: list[Change] = []
        behind: Leaf | None = None
        matched: list[Node] = []
        for node in (self.root, *self.matches[: self.depth - 1]):
            before = node.after(token)
            if steps is not None:
                changes.append(Change(node, token, before))
            node.known = None
            if isinstance(before, Node):
                before.count += 1
                matched.append(before)
            elif before is None:
                node.put(token, leaf)
                self.num_bytes += LEAF_BYTES
            else:  # a second time; contexts that occurred once until now did so in one place
                behind = behind or Leaf(before.text, before.end + 1)
                node.put(token, again := self.opened(before, behind, len(matched) + 1))
                matched.append(again)
        if steps is not None:
            steps.append(Insertion(changes, self.matches, old))
        self.num_bytes += TOKEN_BYTES
        self.matches = matched

    def opened(self, leaf: Leaf, behind: Leaf, depth: int) -> Node:
        """The node, in a leaf's place, of a context of `depth` tokens; `behind` is one token further."""
        if depth < self.depth and leaf.end < len(leaf.text):
            self.num_bytes += NODE_BYTES
            return Node(2, leaf.text[leaf.end], behind)
        self.num_bytes += NODE_BYTES - LEAF_BYTES
        return Node(2)

    def undo(self, steps: Sequence[Insertion]) -> None:
        """Take back the last tokens of the growing text, from the steps that were noted for them."""
        for step in reversed(steps):
            self.text.pop()
            for node, token, before in step.changes:
                node.known = None
                if isinstance(before, Node):
                    before.count -= 1
                elif before is None:
                    node.drop(token)
                else:
                    node.put(token, before)
            self.matches, self.num_bytes = step.matches, step.num_bytes

    def remove(self, text: Sequence[int]) -> None:
        """Forget a text that grows no more. A context that is left once keeps its node."""
        assert text is not self.text, "the growing text cannot leave"
        for start in range(len(text)):
            node = self.root
            for token in text[start : start + self.depth]:
                child = node.after(token)
                assert child is not None, "a text that was never added cannot leave"
                node.known = None
                if isinstance(child, Leaf):
                    node.drop(token)
                    self.num_bytes -= LEAF_BYTES
                    break
                child.count -= 1
                if child.count == 0:  # what hangs below is this text's alone, and counted down in turn
                    node.drop(token)
                    self.num_bytes -= NODE_BYTES
                node = child
        self.num_bytes -= TOKEN_BYTES * len(text)
        self.num_changes += 1

    def follow(self, places: Sequence[Node | Leaf], token: int) -> list[Node | Leaf]:
        """What is stored for a text's last 1, 2, ... tokens, given the same for the text without its last token.

        As long as they occurred; a context that did not has no longer ones. None stored before the text begins.
        """
        places_after: list[Node | Leaf] = []
        ends = (self.root, *places[: self.depth - 1])
        for i, place in enumerate(ends):
            longer = place.after(token)
            if longer is None:
                break
            if isinstance(place, Leaf):  # what is longer occurred once too, and in the same place
                return places_after + [longer] * (len(ends) - i)
            places_after.append(longer)
        return places_after
