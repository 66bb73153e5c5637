"""The token counts that are kept from round to round equal those of the text."""

from __future__ import annotations

import math
import random
import sys
from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.sampling.edits import TextCounts, TextEdits
from forerun.sampling.params import SamplingParams

tokens = st.lists(st.integers(0, 9), max_size=12)


def recounted(text: list[int], first: int, num_prompt: int) -> tuple[array[int], array[int]]:
    """The ids and their counts, by going through the text."""
    ids, counts = sorted(set(text[first:])), Counter(text[num_prompt:])
    return array("i", ids), array("i", [counts[token] for token in ids])


@settings(max_examples=300, deadline=None)
@given(tokens.filter(bool), st.booleans(), st.lists(st.tuples(st.integers(0, 6), tokens), max_size=8))
def test_counts_are_those_of_the_text(prompt: list[int], whole: bool, steps: list[tuple[int, list[int]]]) -> None:
    """For any committed tokens; a text that became shorter, which no engine does, is counted again."""
    text, first = list(prompt), 0 if whole else len(prompt)
    counts = TextCounts.of(text, first, len(prompt))
    for back, news in steps:
        before, old = (counts.ids[:], counts.times[:]), list(text)
        if back:
            text = text[: max(1, len(text) - back)]
            counts = counts.at(text)
            assert (counts.ids, counts.times) == recounted(text, first, len(prompt))
        kept = counts
        text = text + news
        counts = counts.at(text)
        assert (counts.ids, counts.times) == recounted(text, first, len(prompt))
        assert counts.num_tokens == len(text)
        assert (kept.ids, kept.times) == recounted(text[: kept.num_tokens], first, len(prompt))  # unchanged
        assert len(before[0]) <= len(set(old))


def test_a_text_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds add new tokens; adding tokens to a copy, for an inner round, does not change the original."""
    rng, made = random.Random(3), []
    of = TextCounts.of
    monkeypatch.setattr(TextCounts, "of", lambda *given: made.append(given) or of(*given))
    text = [rng.randrange(50) for _ in range(200)]
    edits = TextEdits.of(SamplingParams(repetition_penalty=1.1), text, 200, (2,), ())
    for _ in range(50):
        edits.at([*text, 7, 7, 8])
        text += [rng.randrange(50) for _ in range(rng.randrange(5))]
        edits = edits.at(text)
    assert len(made) == 1
    assert edits.counts is not None
    assert (edits.counts.ids, edits.counts.times) == recounted(text, 0, 200)


def test_counts_take_little_memory() -> None:
    """Eight bytes and some spare space per distinct id, however long the text is."""
    text = [i % 500 for i in range(20_000)]
    counts = TextCounts.of(text, 0, 100).at([*text, *range(600)])
    assert sys.getsizeof(counts.ids) + sys.getsizeof(counts.times) < 600 * 12


def test_requests_that_change_no_logit_have_no_edits() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)):
        assert not TextEdits.of(params, [1, 2], 1, (2,), ()).any
    params = SamplingParams(min_tokens=3, banned_tokens=[9, 4], logit_bias={6: 1.5, 4: 2.0})
    edits = TextEdits.of(params, [1, 2], 1, (2,), ())
    assert edits.any
    assert (edits.fixed.tolist(), edits.ends.tolist(), edits.ends_from) == ([4, 6, 9], [2], 4)
    assert edits.added.tolist() == [-math.inf, 1.5, -math.inf]
    assert edits.counts is None
    assert edits.at([1, 2, 3]) is edits
