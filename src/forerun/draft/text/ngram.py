"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last few tokens.

It copies after the latest occurrence of the longest suffix, up to `max_n` tokens, that occurs earlier in the sequence's
own text. It costs one dictionary entry per token and length. Drafts are chains, and a function of the text alone, so
there is no law to declare. Acceptance is estimated by the length of the match: how often matches of this length were
right before. After Saxena's prompt lookup decoding (2023).
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.config import AUTO_DEPTH
from forerun.draft.base import Budget, Committed, Draft, Outlook
from forerun.draft.plan import DraftContext, DraftPlan, refuse, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, padded

Ngram = tuple[int, ...]
LONGEST_MATCH = 4  # unless told
BELIEF, WEIGHT = 0.5, 4.0  # how often a match is right where nothing is known, and how many matches that counts as
FADING = 0.999  # what counts of other texts' matches after each further one


@dataclass(slots=True)
class Matches:
    """How often the token after the longest match was right, by the length of that match."""

    met: list[float]
    right: list[float]

    @classmethod
    def up_to(cls, max_n: int) -> Matches:
        """Empty counts for lengths up to this."""
        return cls([0.0] * (max_n + 1), [0.0] * (max_n + 1))

    def count(self, n: int, right: bool, fading: float = 1.0) -> None:
        """Count one more match of n tokens."""
        self.met[n] = fading * self.met[n] + 1
        self.right[n] = fading * self.right[n] + right

    def rate(self, n: int, belief: float = BELIEF) -> float:
        """How often a match of n tokens is right, with a prior belief."""
        return (self.right[n] + WEIGHT * belief) / (self.met[n] + WEIGHT)


@dataclass(slots=True)
class History:
    """One sequence: the tokens that the target has read, the root, and where each n-gram last ended."""

    matches: Matches
    text: list[int] = field(default_factory=list)
    root: int | None = None
    ends: dict[Ngram, int] = field(default_factory=dict)  # n-gram -> index of the token after it


def record(ends: dict[Ngram, int], text: Sequence[int], first: int, min_n: int, max_n: int, shift: int = 0) -> None:
    """Enter the n-grams that end with `text[first:]`, the latest occurrence last; `text` begins at index `shift`."""
    for end in range(first + 1, len(text) + 1):
        for n in range(min_n, min(max_n, end) + 1):
            ends[tuple(text[end - n : end])] = shift + end


def lookup(
    indexes: Sequence[Mapping[Ngram, int]], text: Sequence[int], min_n: int, max_n: int
) -> tuple[int, int] | None:
    """The longest suffix of `text` that occurs earlier: its length, and the index after its latest occurrence.

    None if none occurs. The indexes are those of the text without its last token, so a token always follows an
    occurrence; those listed first hold the later places.
    """
    for n in range(min(max_n, len(text)), min_n - 1, -1):
        suffix = tuple(text[-n:])
        for ends in indexes:
            if suffix in ends:
                return n, ends[suffix]
    return None


class NgramDrafter:
    """Copies from the sequence's own text.

    If the copy reaches the end of the text it continues with its own tokens: the text repeats itself with that period.
    Matches are of `min_n` to `max_n` tokens, the root included.
    """

    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("ngram",)

    def __init__(self, max_n: int = LONGEST_MATCH, min_n: int = 1) -> None:
        assert 1 <= min_n <= max_n, f"n-grams of {min_n} to {max_n} tokens"
        self.min_n = min_n
        self.max_n = max_n
        self.histories: dict[int, History] = {}
        self.matches = Matches.up_to(max_n)  # of all texts: what is expected of a new one, but not what it is told

    def observe(self, news: Committed) -> None:
        """Index the final tokens, and count the matches that were right, in O(1) per token and length."""
        for seq_id, tokens, root in news.rows():
            history = self.histories.get(seq_id)
            if history is None:
                history = self.histories[seq_id] = History(Matches.up_to(self.max_n))
            history.root = root
            for token, following in zip(tokens, [*tokens, root][1:], strict=True):
                history.text.append(token)
                self.enter(history, following)

    def enter(self, history: History, following: int) -> None:
        """Index the n-grams that end with the text, and count whether the longest that was known told the next."""
        text, ends, longest = history.text, history.ends, 0
        end, right = len(text), False
        for n in range(self.min_n, min(self.max_n, end) + 1):
            ngram = tuple(text[end - n :])
            if (start := ends.get(ngram)) is not None:
                longest, right = n, text[start] == following
            ends[ngram] = end
        if longest:
            history.matches.count(longest, right)
            self.matches.count(longest, right, FADING)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """One chain per sequence, as deep as its budget wherever anything matches that survives as it must.

        With a minimum it says how likely each guess is, by this text's own matches.
        """
        tails = {} if tail is None else {seq_id: (tokens, root) for seq_id, tokens, root in tail.rows()}
        priced = any(budget.min_survival > 0 for budget in budgets)
        texts: list[list[int]] = []
        chances: list[list[float]] = []
        for row, budget in zip(draws.rows, budgets, strict=True):
            history = self.histories.get(row.seq_id) or History(Matches.up_to(0))
            tokens, root = tails.get(row.seq_id, ((), history.root))
            depth = min(budget.depth, budget.nodes)
            length, guesses = (0, []) if root is None or depth == 0 else self.copy(history, [*tokens, root], depth)
            if priced:
                survival = self.survival(history.matches, length, len(guesses))
                guesses = guesses[: sum(chance >= budget.min_survival for chance in survival)]
                chances.append([1.0, *survival[: len(guesses)]])
            texts.append([row.tokens[-1], *guesses])
        tree = DraftTree.of_texts(texts)  # on the host, which knows it all
        return Draft(tree, padded(chances, 0.0, np.float32) if priced else None)

    def survival(self, own: Matches, length: int, depth: int, others: Matches | None = None) -> list[float]:
        """The chances of `depth` guesses behind a match; every one that is right makes the match longer."""
        lengths = [min(n, self.max_n) for n in range(length, length + depth)]
        rates = [own.rate(n, BELIEF if others is None else others.rate(n)) for n in lengths]
        return list(itertools.accumulate(rates, operator.mul))

    def copy(self, history: History, late: list[int], depth: int) -> tuple[int, list[int]]:
        """The length of the match in text + `late`, and `depth` tokens after the match; 0 and no tokens without one."""
        match = self.match(history, late)
        if match is None:
            return 0, []
        n, start = match
        source = history.text[start : start + depth]
        if len(source) < depth:
            source += late[max(0, start - len(history.text)) :]
        return n, [source[i % len(source)] for i in range(depth)]

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Never unread; any depth where something matches, 0 elsewhere; estimates by what earlier matches gave."""
        histories = [self.histories.get(seq_id) for seq_id in seq_ids]
        matches = [None if h is None or h.root is None else self.match(h, [h.root]) for h in histories]

        def estimate(i: int, _least: float) -> Sequence[float]:
            history, match = histories[i], matches[i]
            if history is None or match is None:
                return ()
            return self.survival(history.matches, match[0], AUTO_DEPTH, self.matches)

        limit = [0 if match is None else sys.maxsize for match in matches]
        return Outlook([0] * len(seq_ids), limit, estimate, ends_early=True)

    def match(self, history: History, late: list[int]) -> tuple[int, int] | None:
        """What text + `late`, whose last token is the root, ends with and held before, as `lookup` gives it."""
        window, fresh = history.text[-self.max_n :], dict[Ngram, int]()
        shift = len(history.text) - len(window)
        record(fresh, window + late[:-1], len(window), self.min_n, self.max_n, shift)
        return lookup([fresh, history.ends], window + late, self.min_n, self.max_n)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop the indexes of these sequences; unknown ones are ignored."""
        for seq_id in seq_ids:
            self.histories.pop(seq_id, None)


def plan_ngram(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`ngram[:N]`: prompt lookup with matches of up to N tokens. Needs hardly any memory."""
    longest = longest_match(spec)
    return DraftPlan({}, lambda _tokens, _progress, _target: NgramDrafter(max_n=longest))


def longest_match(spec: DraftSpec) -> int:
    """The N of `ngram[:N]`. Raises UnknownDrafter for what is no such thing."""
    refuse_members(spec)
    if spec.argument is None:
        return LONGEST_MATCH
    if not spec.argument.isdecimal() or int(spec.argument) < 1:
        refuse(spec, "the argument is the longest match in tokens, a whole number of at least 1, as in ngram:5")
    return int(spec.argument)
