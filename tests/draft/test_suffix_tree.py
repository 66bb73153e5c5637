"""Suffix trees compared with brute force, which counts every context of every text, over three letters."""

import copy
import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft.text.suffix_tree import LEAF_BYTES, LEAST_SHARE, NODE_BYTES, TOKEN_BYTES, Leaf, Node, SuffixTree
from kit.unchecked import unchecked

LETTERS = st.integers(0, 2)
TEXTS = st.lists(st.lists(LETTERS, max_size=25), min_size=1, max_size=4)
DEPTHS = st.integers(2, 6)
Context = tuple[int, ...]


def counted(texts: Sequence[Sequence[int]], depth: int) -> Counter[Context]:
    """How often each context of at most `depth` tokens occurs."""
    return Counter(
        tuple(text[start : start + length])
        for text in texts
        for length in range(1, depth + 1)
        for start in range(len(text) - length + 1)
    )


def stored(tree: SuffixTree, num_tokens: int) -> tuple[Counter[Context], int]:
    """A tree's counts of contexts, and the bytes that its nodes, leaves and `num_tokens` tokens should take."""
    counts: Counter[Context] = Counter()
    num_bytes = TOKEN_BYTES * num_tokens
    todo: list[tuple[Context, Node | Leaf]] = [((), tree.root)]
    while todo:
        context, place = todo.pop()
        if context:
            num_bytes += LEAF_BYTES if isinstance(place, Leaf) else NODE_BYTES
            counts[context] = place.count
        if isinstance(place, Leaf):
            rest = place.text[place.end : place.end + tree.depth - len(context)]
            for length in range(1, len(rest) + 1):
                counts[(*context, *rest[:length])] = 1
        else:
            children = {} if place.child is None else {place.token: place.child}
            todo += [((*context, token), child) for token, child in (place.several or children).items()]
    return counts, num_bytes


def grown(texts: Sequence[Sequence[int]], depth: int) -> tuple[SuffixTree, list[list[int]]]:
    """A tree of texts, of which the last may still grow."""
    tree = SuffixTree(depth)
    kept = [tree.add(text) for text in texts[:-1]]
    for token in texts[-1]:
        tree.append(token)
    return tree, kept


def node_of(tree: SuffixTree, context: Sequence[int]) -> Node | Leaf | None:
    """The node or leaf of a context, searched from the root."""
    place: Node | Leaf | None = tree.root
    for token in context:
        place = place and place.after(token)
    return place


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(LETTERS, min_size=1, max_size=4), DEPTHS)
def test_continuations_are_counted_and_frequent_ones_offered(
    texts: list[list[int]], context: list[int], depth: int
) -> None:
    tree, _ = grown(texts, depth)
    counts, context = counted(texts, depth), context[: depth - 1]
    place = node_of(tree, context)
    times = {token: counts[(*context, token)] for token in range(3) if counts[(*context, token)]}
    if place is None:
        assert not times
        return
    for _ in range(2):  # the second time from the node's memory
        total, tokens, several = place.followed()
        assert total == sum(times.values())
        assert sorted(tokens) == [token for token, count in times.items() if count / total >= LEAST_SHARE]
        assert (several is None) == (len(times) < 2)
        assert several is None or {token: child.count for token, child in several.items()} == times


def test_rare_continuations_are_not_offered() -> None:
    tree = SuffixTree(3)
    tree.add([0, 1] * 19 + [0, 2] * 2)
    assert node_of(tree, [0]).followed()[:2] == (21, [1])
    tree.add([0, 2])
    assert node_of(tree, [0]).followed()[:2] == (22, [1, 2])


@settings(max_examples=200, deadline=None)
@given(TEXTS, DEPTHS, st.randoms(use_true_random=False))
def test_a_removed_text_leaves_no_trace_in_the_tree(texts: list[list[int]], depth: int, dice: random.Random) -> None:
    """Counts and offers are those of a tree of the remaining texts, and a tree without texts is empty."""
    tree = SuffixTree(depth)
    kept = [tree.add(text) for text in texts]
    left = list(range(len(texts)))
    while left:
        for context in counted(texts, depth - 1):
            if place := node_of(tree, context):
                place.followed()  # fills the node's memory, which must be cleared, too
        gone = left.pop(dice.randrange(len(left)))
        tree.remove(kept[gone])
        rest = [texts[i] for i in left]
        counts = counted(rest, depth)
        assert stored(tree, sum(map(len, rest))) == (counts, tree.num_bytes)
        fresh = SuffixTree(depth)
        for text in rest:
            fresh.add(text)
        for context in counts:
            if len(context) < depth:
                now, anew = (node_of(t, context).followed() for t in (tree, fresh))
                assert (now[0], sorted(now[1])) == (anew[0], sorted(anew[1]))
    assert tree.root == Node()
    assert tree.num_bytes == 0


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(LETTERS, max_size=10), DEPTHS)
def test_undoing_tokens_restores_the_tree(texts: list[list[int]], tail: list[int], depth: int) -> None:
    """All nodes are as before."""
    tree, _ = grown(texts, depth)
    before, steps = copy.deepcopy(tree), []
    for token in tail:
        tree.append(token, steps)
    longer = [*texts[:-1], [*texts[-1], *tail]]
    assert stored(tree, sum(map(len, longer))) == (counted(longer, depth), tree.num_bytes)
    for context in counted(longer, depth - 1):
        node_of(tree, context).followed()
    tree.undo(steps)
    assert tree == before
    for context in counted(texts, depth - 1):
        assert node_of(tree, context).followed() == node_of(before, context).followed()


class Operations:
    """Counts how often a node's continuation is looked up: there is no other way through a tree."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for kind in (Node, Leaf):
            monkeypatch.setattr(kind, "after", self.counting(kind.after))

    def counting(self, after: object) -> object:
        def counted_after(place: Node | Leaf, token: int) -> Node | Leaf | None:
            self.count += 1
            return after(place, token)

        return counted_after


def test_adding_a_token_takes_at_most_as_many_operations_as_the_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """In repeated text all contexts match; in fresh text hardly any."""
    operations, tree = Operations(monkeypatch), SuffixTree(8)
    for _ in range(1000):
        before = operations.count
        tree.append(7)
        assert operations.count - before <= 8
    assert tree.num_bytes < 1000 * TOKEN_BYTES + 10 * NODE_BYTES
    operations.count, tree, dice = 0, SuffixTree(24), random.Random(0)
    for _ in range(5000):
        tree.append(dice.randrange(5000))
    assert operations.count < 3 * 5000


def texts_of(kind: str) -> list[list[int]]:
    """Texts of a kind; each number is its own object, as with tokens from tensors."""
    dice = random.Random(1)
    if kind == "letters":
        texts = [[dice.randrange(3) for _ in range(300)] for _ in range(8)]
    elif kind == "fresh":
        texts = [[dice.randrange(50_000) for _ in range(300)] for _ in range(8)]
    else:
        texts = [[min(49_999, int(1 / (1 - dice.random()))) for _ in range(300)] for _ in range(4)] * 2
    return [[int(str(token)) for token in text] for text in texts]


@pytest.mark.parametrize(
    "kind", ["letters", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("fresh", "twice"))]
)
def test_the_reported_size_is_about_the_memory_taken(kind: str) -> None:
    tree = SuffixTree(24)
    gc.collect()
    tracemalloc.start()
    try:
        texts = texts_of(kind)
        with unchecked():
            for text in texts:
                tree.add(text)
        del texts, text
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 < tree.num_bytes / taken < 1.6
