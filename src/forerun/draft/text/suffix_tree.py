"""SuffixTree: how often each token followed each context of a few tokens, in texts that grow and can be removed.

A context that occurred once is a leaf, which points into its text; a context that occurred more often is a node with
children. So the tree's size grows with repetition. Appending a token touches one node for each earlier context that
ends there: at most `depth` nodes, and few in text without repetition. The counts depend on the texts in the tree alone,
not on their order nor on removed texts. After the suffix trees of SuffixDecoding (Oliaro et al., 2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

LEAST_SHARE = 0.1  # of a context's occurrences: rarer continuations are not drafted, so a context has at most ten
NODE_BYTES, LEAF_BYTES, TOKEN_BYTES = 75, 120, 45  # measured on CPython 3.11, over random and repetitive texts


# The continuations of a context: the number of occurrences with a next token; the tokens that followed at least
# LEAST_SHARE of them; and the children by token if different tokens followed, else None.
Followed = tuple[int, Sequence[int], "dict[int, Node | Leaf] | None"]


@dataclass(slots=True)
class Leaf:
    """A context that occurred once, before index `end` of `text`."""

    text: list[int]
    end: int
    count: ClassVar[int] = 1

    def after(self, token: int) -> Leaf | None:
        """The context with `token` appended; None if another token followed."""
        return Leaf(self.text, self.end + 1) if self.text[self.end : self.end + 1] == [token] else None

    def followed(self) -> Followed:
        """The continuations of this context: one, or none at the end of the text."""
        return (1, (self.text[self.end],), None) if self.end < len(self.text) else (0, (), None)


@dataclass(slots=True)
class Node:
    """A context that occurred `count` times, and its children, which are the contexts with one more token.

    Most nodes have a single child, `child`, which follows `token`; only several children need the dictionary `several`.
    `known` caches the result of `followed` until a child changes.
    """

    count: int = 0
    token: int = -1  # -1: no child, or several
    child: Node | Leaf | None = None
    several: dict[int, Node | Leaf] | None = None
    known: Followed | None = field(default=None, compare=False)

    def after(self, token: int) -> Node | Leaf | None:
        """The context with `token` appended; None if it never occurred."""
        if self.several is not None:
            return self.several.get(token)
        return self.child if token == self.token else None

    def put(self, token: int, child: Node | Leaf) -> None:
        """Store the child that follows `token`, in place of an earlier one."""
        if self.several is not None:
            self.several[token] = child
        elif self.child is None or self.token == token:
            self.token, self.child = token, child
        else:
            self.several = {self.token: self.child, token: child}
            self.token, self.child = -1, None

    def drop(self, token: int) -> None:
        """Remove the child that follows `token`."""
        if self.several is None:
            self.token, self.child = -1, None
            return
        del self.several[token]
        if len(self.several) == 1:
            ((self.token, self.child),) = self.several.items()
            self.several = None

    def followed(self) -> Followed:
        """The continuations of this context."""
        if self.several is None:
            return (0, (), None) if self.child is None else (self.child.count, (self.token,), None)
        if self.known is None:
            total = sum([child.count for child in self.several.values()])
            often = [token for token, child in self.several.items() if child.count / total >= LEAST_SHARE]
            self.known = total, often, self.several
        return self.known


class Change(NamedTuple):
    """The effect of appending a token on one context: `before` was its child for this token."""

    node: Node
    token: int
    before: Node | Leaf | None


class Insertion(NamedTuple):
    """The effect of appending a token on a tree, for `undo`; `matches` and `num_bytes` are the values before."""

    changes: list[Change]
    matches: list[Node]
    num_bytes: int


@dataclass(slots=True)
class SuffixTree:
    """The contexts of up to `depth` tokens in its texts. At most one text grows; others are complete and removable.

    `text` is the growing text. `matches[i]` is the node of its last i + 1 tokens, for all lengths that also occurred
    before. `num_bytes` is the approximate memory of the tree with its texts. `num_changes` counts how often a complete
    text was added or removed.
    """

    depth: int
    root: Node = field(default_factory=Node)
    text: list[int] = field(default_factory=list)
    matches: list[Node] = field(default_factory=list)
    num_bytes: int = 0
    num_changes: int = 0

    def __post_init__(self) -> None:
        assert self.depth >= 2, f"depth {self.depth} is below 2: a context and its next token are two"

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Add a complete text. Returns the list to pass to `remove`."""
        self.text, self.matches = [], []
        for token in tokens:
            self.append(token)
        stored, self.text, self.matches = self.text, [], []
        self.num_changes += 1
        return stored

    def append(self, token: int, steps: list[Insertion] | None = None) -> None:
        """Append a token to the growing text, in O(1) per context that ends before it and occurred before.

        With `steps` the change is appended there, for `undo`.
        """
        text = self.text
        text.append(token)
        leaf, old = Leaf(text, len(text)), self.num_bytes
        changes: list[Change] = []
        next_leaf: Leaf | None = None
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
            else:  # its second occurrence; the first was in one place for all contexts that occurred once so far
                next_leaf = next_leaf or Leaf(before.text, before.end + 1)
                node.put(token, opened := self.node_of_leaf(before, next_leaf, len(matched) + 1))
                matched.append(opened)
        if steps is not None:
            steps.append(Insertion(changes, self.matches, old))
        self.num_bytes += TOKEN_BYTES
        self.matches = matched

    def node_of_leaf(self, leaf: Leaf, next_leaf: Leaf, depth: int) -> Node:
        """The node that replaces a leaf of `depth` tokens at its second occurrence; `next_leaf` is one token longer."""
        if depth < self.depth and leaf.end < len(leaf.text):
            self.num_bytes += NODE_BYTES
            return Node(2, leaf.text[leaf.end], next_leaf)
        self.num_bytes += NODE_BYTES - LEAF_BYTES
        return Node(2)

    def undo(self, steps: Sequence[Insertion]) -> None:
        """Remove the last tokens of the growing text, given the `steps` that `append` recorded for them."""
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
        """Remove a complete text. A context with one occurrence left stays a node."""
        assert text is not self.text, "the growing text cannot be removed"
        for start in range(len(text)):
            node = self.root
            for token in text[start : start + self.depth]:
                child = node.after(token)
                assert child is not None, "a text that was never added cannot be removed"
                node.known = None
                if isinstance(child, Leaf):
                    node.drop(token)
                    self.num_bytes -= LEAF_BYTES
                    break
                child.count -= 1
                if child.count == 0:  # its descendants belong to this text alone; the loop goes on to count them
                    node.drop(token)
                    self.num_bytes -= NODE_BYTES
                node = child
        self.num_bytes -= TOKEN_BYTES * len(text)
        self.num_changes += 1

    def follow(self, places: Sequence[Node | Leaf], token: int) -> list[Node | Leaf]:
        """The places of a text's last 1, 2, ... tokens, given `places` of the text without its last `token`.

        The list ends at the longest suffix that occurs in the tree; it is empty for a text of no tokens.
        """
        places_after: list[Node | Leaf] = []
        ends = (self.root, *places[: self.depth - 1])
        for i, place in enumerate(ends):
            longer = place.after(token)
            if longer is None:
                break
            if isinstance(place, Leaf):  # longer contexts occurred once too, in the same place
                return places_after + [longer] * (len(ends) - i)
            places_after.append(longer)
        return places_after
