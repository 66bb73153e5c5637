"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the text's last few tokens.

The drafter looks for the longest suffix of at most `max_n` tokens that occurs earlier in the sequence's own text, and
copies what followed its latest occurrence. The index has one dictionary entry per token and suffix length. Drafts are
deterministic chains, so they have no distribution to declare. The acceptance rate is estimated from earlier matches of
the same length. After Saxena's prompt lookup decoding (2023).
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
from forerun.limits import is_whole
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, padded

Ngram = tuple[int, ...]
LONGEST_MATCH = 4  # default of `max_n`
PRIOR_RATE, PRIOR_COUNT = 0.5, 4.0  # prior of a match's acceptance rate, and the number of matches it counts as
FADING = 0.999  # factor on the counts over all sequences with each further match


@dataclass(slots=True)
class MatchCounts:
    """How many matches there were, and how many of them predicted the next token, by the length of the match."""

    total: list[float]
    correct: list[float]

    @classmethod
    def up_to(cls, max_n: int) -> MatchCounts:
        """Zero counts for matches of at most `max_n` tokens."""
        return cls([0.0] * (max_n + 1), [0.0] * (max_n + 1))

    def count(self, n: int, correct: bool, fading: float = 1.0) -> None:
        """Count one more match of n tokens, after earlier counts were multiplied by `fading`."""
        self.total[n] = fading * self.total[n] + 1
        self.correct[n] = fading * self.correct[n] + correct

    def rate(self, n: int, prior: float = PRIOR_RATE) -> float:
        """Estimated probability that a match of n tokens predicts the next token."""
        return (self.correct[n] + PRIOR_COUNT * prior) / (self.total[n] + PRIOR_COUNT)


@dataclass(slots=True)
class IndexedText:
    """One sequence: its text without the root, the root, and where each n-gram of the text last ended."""

    matches: MatchCounts
    text: list[int] = field(default_factory=list)
    root: int | None = None
    ends: dict[Ngram, int] = field(default_factory=dict)  # n-gram -> index of the token after it


def record(ends: dict[Ngram, int], text: Sequence[int], first: int, min_n: int, max_n: int, shift: int = 0) -> None:
    """Index the n-grams that end in `text[first:]`; a later occurrence replaces an earlier one.

    Recorded places are indices into `text` plus `shift`.
    """
    for end in range(first + 1, len(text) + 1):
        for n in range(min_n, min(max_n, end) + 1):
            ends[tuple(text[end - n : end])] = shift + end


def lookup(
    indexes: Sequence[Mapping[Ngram, int]], text: Sequence[int], min_n: int, max_n: int
) -> tuple[int, int] | None:
    """The length of the longest suffix of `text` that occurs earlier, and the index after its latest occurrence.

    None if no suffix does. `indexes` cover the text without its last token, so each occurrence has a next token; an
    index of later places comes first.
    """
    for n in range(min(max_n, len(text)), min_n - 1, -1):
        suffix = tuple(text[-n:])
        for ends in indexes:
            if suffix in ends:
                return n, ends[suffix]
    return None


class NgramDrafter:
    """Drafts by copying from the sequence's own text.

    A copy that reaches the end of the text continues with the copied tokens, as if the text were periodic. Matches
    have `min_n` to `max_n` tokens, including the root.
    """

    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("ngram",)

    def __init__(self, max_n: int = LONGEST_MATCH, min_n: int = 1) -> None:
        assert 1 <= min_n <= max_n, f"n-grams of {min_n} to {max_n} tokens"
        self.min_n = min_n
        self.max_n = max_n
        self.texts: dict[int, IndexedText] = {}
        self.matches = MatchCounts.up_to(max_n)  # of all sequences: prior of `outlook`, never used in a draft

    def observe(self, committed: Committed) -> None:
        """Index the final tokens and count correct matches, in O(1) per token and match length."""
        for seq_id, tokens, root in committed.rows():
            indexed = self.texts.get(seq_id)
            if indexed is None:
                indexed = self.texts[seq_id] = IndexedText(MatchCounts.up_to(self.max_n))
            indexed.root = root
            for token, next_token in zip(tokens, [*tokens, root][1:], strict=True):
                indexed.text.append(token)
                self.index_end(indexed, next_token)

    def index_end(self, indexed: IndexedText, next_token: int) -> None:
        """Index the n-grams at the text's end; count whether the longest match there predicts `next_token`."""
        text, ends, longest = indexed.text, indexed.ends, 0
        end, correct = len(text), False
        for n in range(self.min_n, min(self.max_n, end) + 1):
            ngram = tuple(text[end - n :])
            if (start := ends.get(ngram)) is not None:
                longest, correct = n, text[start] == next_token
            ends[ngram] = end
        if longest:
            indexed.matches.count(longest, correct)
            self.matches.count(longest, correct, FADING)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A chain per sequence with a match, to the depth of its budget or until its survival falls below the minimum.

        With a minimum the draft has survival estimates, from earlier matches in the same sequence.
        """
        tails = {} if tail is None else {seq_id: [*tokens, root] for seq_id, tokens, root in tail.rows()}
        with_survival = any(budget.min_survival > 0 for budget in budgets)
        chains: list[list[int]] = []
        survivals: list[list[float]] = []
        for row, budget in zip(draws.rows, budgets, strict=True):
            indexed = self.texts.get(row.seq_id) or IndexedText(MatchCounts.up_to(0))
            after_text = tails.get(row.seq_id, [] if indexed.root is None else [indexed.root])
            length, draft_tokens = self.copy(indexed, after_text, budget.depth) if budget.depth else (0, [])
            if with_survival:
                survival = self.survival(indexed.matches, length, len(draft_tokens))
                draft_tokens = draft_tokens[: sum(p >= budget.min_survival for p in survival)]
                survivals.append([1.0, *survival[: len(draft_tokens)]])
            chains.append([row.tokens[-1], *draft_tokens])
        return Draft(DraftTree.of_texts(chains), padded(survivals, 0.0, np.float32) if with_survival else None)

    def survival(self, matches: MatchCounts, length: int, depth: int, prior: MatchCounts | None = None) -> list[float]:
        """Survival of each of `depth` draft tokens after a match of `length`.

        Each accepted token makes the match one token longer.
        """
        lengths = [min(n, self.max_n) for n in range(length, length + depth)]
        rates = [matches.rate(n, PRIOR_RATE if prior is None else prior.rate(n)) for n in lengths]
        return list(itertools.accumulate(rates, operator.mul))

    def copy(self, indexed: IndexedText, after_text: list[int], depth: int) -> tuple[int, list[int]]:
        """The length of the longest match, and the `depth` tokens that followed it; 0 and no tokens without a match."""
        match = self.match(indexed, after_text)
        if match is None:
            return 0, []
        n, start = match
        source = indexed.text[start : start + depth]
        if len(source) < depth:
            source += after_text[max(0, start - len(indexed.text)) :]
        return n, [source[i % len(source)] for i in range(depth)]

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Any depth for a text with a match, else 0; nothing is ever unread."""
        texts = [self.texts.get(seq_id) for seq_id in seq_ids]
        matches = [None if t is None or t.root is None else self.match(t, [t.root]) for t in texts]

        def estimate(i: int, _least: float) -> Sequence[float]:
            indexed, match = texts[i], matches[i]
            if indexed is None or match is None:
                return ()
            return self.survival(indexed.matches, match[0], AUTO_DEPTH, self.matches)

        limit = [0 if match is None else sys.maxsize for match in matches]
        return Outlook([0] * len(seq_ids), limit, estimate)

    def match(self, indexed: IndexedText, after_text: list[int]) -> tuple[int, int] | None:
        """`lookup` in the text followed by `after_text`, whose last token is the root."""
        window, fresh = indexed.text[-self.max_n :], dict[Ngram, int]()
        shift = len(indexed.text) - len(window)
        record(fresh, window + after_text[:-1], len(window), self.min_n, self.max_n, shift)
        return lookup([fresh, indexed.ends], window + after_text, self.min_n, self.max_n)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop the indexes of these sequences; unknown ids are ignored."""
        for seq_id in seq_ids:
            self.texts.pop(seq_id, None)


def plan_ngram(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`ngram[:N]`: prompt lookup with matches of up to N tokens; loads no model."""
    longest = longest_match(spec)
    return DraftPlan({}, lambda _tokens, _progress, _target: NgramDrafter(max_n=longest))


def longest_match(spec: DraftSpec) -> int:
    """The N of `ngram[:N]`. Raises UnknownDrafter unless it is a whole number of at least 1."""
    refuse_members(spec)
    if spec.argument is None:
        return LONGEST_MATCH
    if not is_whole(spec.argument) or int(spec.argument) < 1:
        refuse(spec, "the argument is the longest match in tokens, a whole number of at least 1, as in ngram:5")
    return int(spec.argument)
