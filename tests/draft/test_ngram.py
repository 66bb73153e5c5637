"""Prompt lookup compared with a brute-force search, and its state with one rebuilt from the text."""

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.rounds import Row, chunked, committed, draws_of
from forerun.config import AUTO_DEPTH
from forerun.draft.base import Budget, Committed
from forerun.draft.text.ngram import FADING, PRIOR_COUNT, PRIOR_RATE, NgramDrafter

LETTERS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
LENGTHS = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda t: (t[0], t[0] + t[1]))
VOCAB = 16


def brute_force(text: list[int], min_n: int, max_n: int, depth: int) -> list[int]:
    """The draft by definition: a search of every earlier position, longest suffix and latest position first."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                longer = list(text)
                for i in range(depth):
                    longer.append(longer[end + i])
                return longer[len(text) :]
    return []


def chains_of(
    drafter: NgramDrafter, rows: list[Row], budgets: list[Budget], tail: Committed | None = None
) -> list[list[int]]:
    """The draft tokens of each row."""
    tree = drafter.propose(draws_of(rows, VOCAB), budgets, tail).tree
    assert tree.tokens[:, 0].tolist() == [row.text[-1] for row in rows]
    return [[t for t in row if t >= 0] for row in tree.tokens[:, 1:].tolist()]


@given(text=LETTERS, lengths=LENGTHS, depth=st.integers(1, 9), nodes=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_it_copies_from_the_latest_place_of_the_longest_suffix(
    text: list[int], lengths: tuple[int, int], depth: int, nodes: int, seed: int
) -> None:
    min_n, max_n = lengths
    drafter, row = NgramDrafter(max_n, min_n), Row(5, text)
    for news in chunked([row], seed):
        drafter.observe(news)
    expected = brute_force(text, min_n, max_n, min(depth, nodes))
    assert chains_of(drafter, [row], [Budget(depth, nodes=nodes)]) == [expected]
    assert drafter.outlook([5]).limit == [sys.maxsize if expected else 0]


def matches(text: list[int], min_n: int, max_n: int) -> list[tuple[int, bool]]:
    """For every position with a match before it: the length of the longest one, and whether it predicts the token."""
    found = []
    for place in range(1, len(text)):
        for n in range(min(max_n, place), min_n - 1, -1):
            ends = [end for end in range(n, place) if text[end - n : end] == text[place - n : place]]
            if ends:
                found.append((n, text[ends[-1]] == text[place]))
                break
    return found


def rate(counted: list[tuple[int, bool]], n: int, prior: float, fading: float = 1.0) -> float:
    """The share of matches of n tokens that were right, with the latest weighing most."""
    own = [right for length, right in counted if length == n][::-1]
    met, right = (sum(fading**i * x for i, x in enumerate(xs)) for xs in ([1] * len(own), own))
    return (right + PRIOR_COUNT * prior) / (met + PRIOR_COUNT)


@given(text=LETTERS, others=LETTERS, lengths=LENGTHS, seed=st.integers(0, 99), depth=st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_the_estimate_is_the_past_accuracy_of_matches_of_the_same_length(
    text: list[int], others: list[int], lengths: tuple[int, int], seed: int, depth: int
) -> None:
    """The outlook counts this text and others; the draft and its survival follow from this text alone."""
    min_n, max_n = lengths
    drafter, row = NgramDrafter(max_n, min_n), Row(5, text)
    drafter.observe(committed([Row(1, others)]))
    for news in chunked([row], seed):
        drafter.observe(news)
    last = [n for n in range(min_n, max_n + 1) if any(text[e - n : e] == text[-n:] for e in range(n, len(text)))]
    own = matches(text, min_n, max_n)
    every = matches(others, min_n, max_n) + own
    along = [min(last[-1] + i, max_n) for i in range(AUTO_DEPTH)] if last else []
    beliefs = [rate(every, n, PRIOR_RATE, FADING) for n in along]
    chances = [rate(own, n, prior) for n, prior in zip(along, beliefs, strict=True)]
    estimate = drafter.outlook([5]).estimate
    assert estimate is not None
    assert estimate(0, 0.0) == pytest.approx([math.prod(chances[: i + 1]) for i in range(len(chances))])
    alone = [rate(own, n, PRIOR_RATE) for n in along]
    survival = [math.prod(alone[: i + 1]) for i in range(depth)] if last else []
    for price in (1e-9, 0.2):
        draft = drafter.propose(draws_of([row], VOCAB), [Budget(depth, min_survival=price)])
        assert draft.survival is not None
        worth = [chance for chance in survival if chance >= price]
        assert draft.survival[0].tolist() == pytest.approx([1.0, *worth])
        assert (draft.tree.tokens[0, 1:] >= 0).sum() == len(worth)
    assert drafter.propose(draws_of([row], VOCAB), [Budget(depth)]).survival is None
