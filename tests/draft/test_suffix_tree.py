"""Suffix trees against brute force: every context of every text counted by hand, over three letters."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft.suffix_tree import Leaf, Node, SuffixTree, continuations, likeliest

LETTERS = st.integers(0, 2)
TEXTS = st.lists(st.lists(LETTERS, max_size=25), min_size=1, max_size=4)


def counted(texts: Sequence[Sequence[int]], depth: int) -> Counter[tuple[int, ...]]:
    """How often each context of at most `depth` tokens occurs."""
    return Counter(
        tuple(text[start : start + length])
        for text in texts
        for length in range(1, depth + 1)
        for start in range(len(text) - length + 1)
    )


def stored(tree: SuffixTree) -> tuple[Counter[tuple[int, ...]], int]:
    """What a tree says of the same, and how many nodes and leaves it has."""
    counts: Counter[tuple[int, ...]] = Counter()
    size = 0
    todo: list[tuple[tuple[int, ...], Node | Leaf]] = [((), tree.root)]
    while todo:
        context, place = todo.pop()
        if context:
            size += 1
            counts[context] = place.count
        if isinstance(place, Leaf):
            rest = place.text[place.end : place.end + tree.depth - len(context)]
            for length in range(1, len(rest) + 1):
                counts[(*context, *rest[:length])] = 1
        else:
            todo += [((*context, token), child) for token, child in place.children.items()]
    return counts, size


def grown(texts: Sequence[Sequence[int]], depth: int) -> tuple[SuffixTree, list[list[int]]]:
    tree, kept = SuffixTree(depth), []
    for text in texts:
        kept.append(tree.begin())
        for token in text:
            tree.append(token)
    return tree, kept


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 6))
def test_counts_are_those_of_brute_force(texts: list[list[int]], depth: int) -> None:
    tree, _ = grown(texts, depth)
    counts, size = stored(tree)
    assert counts == counted(texts, depth)
    assert size == tree.size


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 6))
def test_matches_are_the_ends_that_occurred_before(texts: list[list[int]], depth: int) -> None:
    tree, _ = grown(texts, depth)
    counts, text = counted(texts, depth), texts[-1]
    ends = [tuple(text[-length:]) for length in range(1, min(depth, len(text)) + 1)]
    again = [end for end in ends if counts[end] > 1]
    assert [node.count for node in tree.matches] == [counts[end] for end in again]
    assert [tree.walk(end) for end in again] == tree.matches


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(LETTERS, max_size=8), st.integers(1, 5))
def test_any_context_is_found_as_far_as_it_occurred(texts: list[list[int]], context: list[int], depth: int) -> None:
    tree, _ = grown(texts, depth)
    counts = counted(texts, depth)
    expected = []
    for length in range(1, min(depth, len(context)) + 1):
        if not counts[tuple(context[-length:])]:
            break
        expected.append(counts[tuple(context[-length:])])
    assert [place.count for place in tree.find(context)] == expected


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(LETTERS, min_size=1, max_size=4), st.integers(2, 6))
def test_continuations_are_shares_of_what_followed(texts: list[list[int]], context: list[int], depth: int) -> None:
    tree, _ = grown(texts, depth)
    counts, context = counted(texts, depth), context[: depth - 1]
    place = tree.walk(context)
    followed = {token: counts[(*context, token)] for token in range(3) if counts[(*context, token)]}
    if place is None:
        assert not followed
        return
    found = continuations(place)
    assert {token: share for token, _, share in found} == {
        token: count / sum(followed.values()) for token, count in followed.items()
    }
    assert [share for _, _, share in found] == sorted((share for _, _, share in found), reverse=True)
    assert likeliest(place) == (found[0] if found else None)
    for token, longer, _ in found:
        assert longer.count == counts[(*context, token)]


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 6), st.randoms(use_true_random=False))
def test_texts_that_leave_are_forgotten(texts: list[list[int]], depth: int, dice: random.Random) -> None:
    """Counts are those of the texts that are left, and an empty tree is empty."""
    tree, kept = grown(texts, depth)
    tree.begin()
    left = list(range(len(texts)))
    while left:
        gone = left.pop(dice.randrange(len(left)))
        tree.remove(kept[gone])
        counts, size = stored(tree)
        assert counts == counted([texts[i] for i in left], depth)
        assert size == tree.size
    assert not tree.root.children
    assert tree.size == 0


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(LETTERS, max_size=10), st.integers(1, 6))
def test_what_is_undone_never_was(texts: list[list[int]], tail: list[int], depth: int) -> None:
    tree, _ = grown(texts, depth)
    before = copy.deepcopy(tree)
    steps = [tree.append(token) for token in tail]
    assert stored(tree)[0] == counted([*texts[:-1], [*texts[-1], *tail]], depth)
    tree.undo(steps)
    assert stored(tree) == stored(before)
    assert tree.text == before.text
    assert tree.matches == before.matches


def test_a_token_costs_at_most_the_depth() -> None:
    """In text that repeats itself all contexts match; in fresh text hardly any does."""
    tree = SuffixTree(8)
    for _ in range(1000):
        step = tree.append(7)
        assert len(step.counted) + len(step.replaced) <= 8
    assert tree.size < 20
    dice, tree = random.Random(0), SuffixTree(24)
    touched = sum(len(s.counted) + len(s.replaced) for s in (tree.append(dice.randrange(5000)) for _ in range(5000)))
    assert touched < 3 * 5000
