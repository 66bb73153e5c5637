"""SuffixTree: what followed every context of a few tokens, and how often, in texts that grow and leave again.

Decides how contexts are stored: a context that occurred once is a leaf, which points into its text; one that occurred
again is a node with children. So the tree grows with what repeats, and appending a token touches one node for each
context that ends there and occurred before: at most `depth` of them, few in fresh text. Knows nothing of drafting.
After the suffix trees of SuffixDecoding (Oliaro et al., 2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Leaf:
    """A context that occurred once: `text[end]` is what followed it, if anything has."""

    text: list[int]
    end: int

    @property
    def count(self) -> int:
        """How often it occurred."""
        return 1


@dataclass(slots=True)
class Node:
    """A context that occurred `count` times, and its continuations by token, in the order of their first occurrence."""

    count: int = 0
    children: dict[int, Node | Leaf] = field(default_factory=dict)

    @property
    def num_followed(self) -> int:
        """Occurrences behind which the text goes on."""
        return sum(child.count for child in self.children.values())


@dataclass(slots=True)
class Step:
    """What appending a token changed, to be undone: children as they were, nodes counted up, and the tree's books."""

    matches: list[Node]
    size: int
    replaced: list[tuple[Node, int, Leaf | None]] = field(default_factory=list)
    counted: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class SuffixTree:
    """Contexts of up to `depth` tokens. One text grows at a time, at its end; texts that grow no more may leave.

    `matches[i]` is the node of the growing text's last i + 1 tokens, for as many as occurred before. `size` counts
    nodes and leaves.
    """

    depth: int
    root: Node = field(default_factory=Node)
    text: list[int] = field(default_factory=list)
    matches: list[Node] = field(default_factory=list)
    size: int = 0

    def __post_init__(self) -> None:
        assert self.depth >= 1, f"contexts of up to {self.depth} tokens"

    def begin(self) -> list[int]:
        """A new text grows from here on; the one before stays as it is. Returns it: `remove` wants it back."""
        self.text, self.matches = [], []
        return self.text

    def append(self, token: int) -> Step:
        """The growing text's next token. In O(1) per context that ends with it and occurred before."""
        self.text.append(token)
        step = Step(self.matches, self.size)
        matched = []
        for node in [self.root, *self.matches[: self.depth - 1]]:
            child = node.children.get(token)
            if isinstance(child, Node):
                child.count += 1
                step.counted.append(child)
                matched.append(child)
                continue
            step.replaced.append((node, token, child))
            if child is None:
                node.children[token] = Leaf(self.text, len(self.text))
                self.size += 1
            else:
                node.children[token] = again = self.opened(child, len(matched) + 1)
                matched.append(again)
        self.matches = matched
        return step

    def opened(self, leaf: Leaf, depth: int) -> Node:
        """The node of a context of `depth` tokens that occurs a second time now."""
        node = Node(2)
        if depth < self.depth and leaf.end < len(leaf.text):
            node.children[leaf.text[leaf.end]] = Leaf(leaf.text, leaf.end + 1)
            self.size += 1
        return node

    def undo(self, steps: Sequence[Step]) -> None:
        """Take back the last tokens of the growing text: what their `append`s returned, in order."""
        for step in reversed(steps):
            self.text.pop()
            for node in step.counted:
                node.count -= 1
            for node, token, child in step.replaced:
                if child is None:
                    del node.children[token]
                else:
                    node.children[token] = child
            self.matches, self.size = step.matches, step.size

    def remove(self, text: Sequence[int]) -> None:
        """Forget a text that grows no more. A context that is left once keeps its node."""
        assert text is not self.text, "the growing text cannot leave"
        for start in range(len(text)):
            node = self.root
            for token in text[start : start + self.depth]:
                child = node.children[token]
                if isinstance(child, Leaf):
                    del node.children[token]
                    self.size -= 1
                    break
                child.count -= 1
                if child.count == 0:  # what hangs below is this text's alone, and counted down in turn
                    del node.children[token]
                    self.size -= 1
                node = child

    def find(self, context: Sequence[int]) -> list[Node | Leaf]:
        """What is stored for the last 1, 2, ... tokens of a context, as long as they occurred; at most `depth`."""
        found: list[Node | Leaf] = []
        for length in range(1, min(self.depth, len(context)) + 1):
            place = self.walk(context[len(context) - length :])
            if place is None:
                break
            found.append(place)
        return found

    def walk(self, context: Sequence[int]) -> Node | Leaf | None:
        """What is stored for a context of at most `depth` tokens; None where it never occurred."""
        place: Node | Leaf | None = self.root
        for token in context:
            place = child_of(place, token)
            if place is None:
                return None
        return place


def child_of(place: Node | Leaf, token: int) -> Node | Leaf | None:
    """The context with one more token; None where it never occurred."""
    if isinstance(place, Node):
        return place.children.get(token)
    follows = place.end < len(place.text) and place.text[place.end] == token
    return Leaf(place.text, place.end + 1) if follows else None


def continuations(place: Node | Leaf) -> list[tuple[int, Node | Leaf, float]]:
    """What followed a context, most often first, ties by first occurrence: (token, longer context, share)."""
    if isinstance(place, Leaf):
        if place.end >= len(place.text):
            return []
        return [(place.text[place.end], Leaf(place.text, place.end + 1), 1.0)]
    total = place.num_followed
    found = [(token, child, child.count / total) for token, child in place.children.items()]
    return sorted(found, key=lambda entry: -entry[2])


def likeliest(place: Node | Leaf) -> tuple[int, Node | Leaf, float] | None:
    """The first of `continuations`; None where there is none."""
    if isinstance(place, Leaf):
        return next(iter(continuations(place)), None)
    if not place.children:
        return None
    token, child = max(place.children.items(), key=lambda entry: entry[1].count)
    return token, child, child.count / place.num_followed
