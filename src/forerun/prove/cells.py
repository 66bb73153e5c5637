"""Cells of the chi-square test: short texts that are counted separately, chosen by the exact law before sampling.

This file decides how many tokens of a text count and which texts get a separate cell; all others share one. The law of
the next token is a callback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from forerun.prove.chi_square import ChiSquare, chi_square

TokenIds = tuple[int, ...]
NextLaws = Callable[[Sequence[TokenIds]], Sequence[Mapping[int, float]]]  # by token, without probabilities of 0

LEAST_EXPECTED = 10
MOST_CELLS = 200
LEAST_COVERED = 0.75  # probability that the cells must cover for texts to be extended
LEAST_TOKENS, MOST_TOKENS = 2, 4


@dataclass(frozen=True, slots=True)
class Cells:
    """`chances[text]`: the probabilities of texts with a separate cell, `num_tokens` long or ended by an end token.

    `laws`: the laws of the next token after the prefixes that were evaluated.
    """

    num_tokens: int
    chances: Mapping[TokenIds, float]
    laws: Mapping[TokenIds, Mapping[int, float]]
    end_ids: frozenset[int]

    @property
    def enough(self) -> bool:
        """Whether there are at least two cells."""
        return len(self.chances) > 1

    def excludes(self, text: TokenIds) -> bool:
        """Whether the law excludes a text: for a token of probability 0, a missing one, or one after the end."""
        for i in range(self.num_tokens):
            if ended(text[:i], self.end_ids):
                return len(text) > i
            if len(text) == i:
                return True
            law = self.laws.get(text[:i])
            if law is None:  # not evaluated, since the prefix is too unlikely
                return False
            if text[i] not in law:
                return True
        return False

    def test(self, texts: Sequence[TokenIds]) -> ChiSquare:
        """Test the counts of the texts' first tokens; a rest that is too small for a cell joins the smallest cell."""
        num_texts = len(texts)
        counts = Counter(text[: self.num_tokens] for text in texts)
        seen = [counts[text] for text in self.chances]
        expected = [num_texts * chance for chance in self.chances.values()]
        others, others_expected = num_texts - sum(seen), num_texts - sum(expected)
        if others_expected >= LEAST_EXPECTED:
            return chi_square([*seen, others], [*expected, others_expected])
        return chi_square([*seen[:-1], seen[-1] + others], [*expected[:-1], expected[-1] + others_expected])


def choose_cells(next_laws: NextLaws, num_texts: int, end_ids: Collection[int] = ()) -> Cells:
    """The cells for `num_texts` texts: the 200 most likely of those expected at least 10 times, most likely first.

    Texts are extended from two tokens to four while the cells cover three quarters of the probability.
    """
    least, ends = LEAST_EXPECTED / num_texts, frozenset(end_ids)
    chances: dict[TokenIds, float] = {(): 1.0}
    laws: dict[TokenIds, Mapping[int, float]] = {}
    best: Cells | None = None
    for num_tokens in range(1, MOST_TOKENS + 1):
        open_texts = [text for text, chance in chances.items() if chance >= least and not ended(text, ends)]
        if not open_texts:
            break
        new_laws = dict(zip(open_texts, next_laws(open_texts), strict=True))
        longer = {(*text, v): chances[text] * p for text, law in new_laws.items() for v, p in law.items()}
        chances = {text: chance for text, chance in chances.items() if ended(text, ends)} | longer
        ranked = sorted(chances.items(), key=lambda entry: (-entry[1], entry[0]))
        likely = {text: chance for text, chance in ranked[:MOST_CELLS] if chance >= least}
        if num_tokens > LEAST_TOKENS and sum(likely.values()) < LEAST_COVERED:
            break
        laws |= new_laws
        best = Cells(num_tokens, likely, dict(laws), ends)
    assert best is not None, "the law after the empty text is always evaluated"
    return best


def ended(text: TokenIds, ends: frozenset[int]) -> bool:
    """Whether a text contains its end token."""
    return bool(text) and text[-1] in ends
