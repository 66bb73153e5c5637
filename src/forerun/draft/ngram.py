"""Prompt lookup: guess that what followed the last few tokens before will follow them again.

Decides which earlier place of a sequence's own text to copy from: the latest occurrence of the longest suffix, up
to `max_n` tokens, that occurs earlier at all. Knows nothing of models. Costs one dictionary entry per token and
length. Chains only, and a function of the text alone, so there is no law to declare. After Saxena's prompt lookup
decoding (2023).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.draft.base import Budget, Committed, Draft, Outlook
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree

Ngram = tuple[int, ...]


@dataclass(slots=True)
class History:
    """One sequence: what the target has read, the root after it, and where each n-gram of the text last ended."""

    text: list[int] = field(default_factory=list)
    root: int | None = None
    ends: dict[Ngram, int] = field(default_factory=dict)  # n-gram -> index of the token after it


def record(ends: dict[Ngram, int], text: Sequence[int], first: int, min_n: int, max_n: int, shift: int = 0) -> None:
    """Enter the n-grams that end with `text[first:]`, the latest occurrence last; `text` begins at index `shift`."""
    for end in range(first + 1, len(text) + 1):
        for n in range(min_n, min(max_n, end) + 1):
            ends[tuple(text[end - n : end])] = shift + end


def lookup(indexes: Sequence[Mapping[Ngram, int]], text: Sequence[int], min_n: int, max_n: int) -> int | None:
    """The index after the latest earlier occurrence of the longest suffix of `text`; None if none occurs.

    The indexes are those of the text without its last token, so a token always follows an occurrence; those listed
    first hold the later places.
    """
    for n in range(min(max_n, len(text)), min_n - 1, -1):
        suffix = tuple(text[-n:])
        for ends in indexes:
            if suffix in ends:
                return ends[suffix]
    return None


class NgramDrafter:
    """Copies from the sequence's own text.

    Where the copy runs into the end of the text it goes on with what it copied so far: the text repeats itself
    with that period. Matches are of `min_n` to `max_n` tokens, the root included.
    """

    taps: tuple[int, ...] = ()
    arms: tuple[str, ...] = ("ngram",)

    def __init__(self, max_n: int = 4, min_n: int = 1) -> None:
        assert 1 <= min_n <= max_n, f"n-grams of {min_n} to {max_n} tokens"
        self.min_n = min_n
        self.max_n = max_n
        self.histories: dict[int, History] = {}

    def observe(self, news: Committed) -> None:
        """Index what became final, in O(1) per token and length."""
        for seq_id, tokens, root in news.rows():
            history = self.histories.setdefault(seq_id, History())
            first = len(history.text)
            history.text.extend(tokens)
            history.root = root
            record(history.ends, history.text, first, self.min_n, self.max_n)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """One chain per sequence, as deep as its budget wherever anything matches."""
        tails = {} if tail is None else {seq_id: (tokens, root) for seq_id, tokens, root in tail.rows()}
        texts: list[list[int]] = []
        for row, budget in zip(draws.rows, budgets, strict=True):
            history = self.histories.get(row.seq_id, History())
            tokens, root = tails.get(row.seq_id, ((), history.root))
            depth = min(budget.depth, budget.nodes)
            guesses = [] if root is None or depth == 0 else self.copy(history, [*tokens, root], depth)
            texts.append([row.tokens[-1], *guesses])
        return Draft(DraftTree.of_texts(texts))  # on the host, which knows it all

    def copy(self, history: History, late: list[int], depth: int) -> list[int]:
        """`depth` tokens copied from behind the match in text + `late`, whose last is the root; [] without one."""
        length = len(history.text)
        window = history.text[-self.max_n :]
        fresh: dict[Ngram, int] = {}
        record(fresh, window + late[:-1], len(window), self.min_n, self.max_n, shift=length - len(window))
        start = lookup([fresh, history.ends], window + late, self.min_n, self.max_n)
        if start is None:
            return []
        source = history.text[start : start + depth]
        if len(source) < depth:
            source += late[max(0, start - length) :]
        return [source[i % len(source)] for i in range(depth)]

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Never behind; any depth where something matches, none elsewhere."""
        limits = [self.limit(self.histories.get(seq_id)) for seq_id in seq_ids]
        return Outlook(unread=[0] * len(seq_ids), limit=limits, expected=[None] * len(seq_ids))

    def limit(self, history: History | None) -> int:
        """How deep this sequence can be drafted now."""
        if history is None or history.root is None:
            return 0
        suffix = [*history.text[-self.max_n :], history.root]
        return 0 if lookup([history.ends], suffix, self.min_n, self.max_n) is None else sys.maxsize

    def adopt(self, seq_ids: Sequence[int], prefixes: Sequence[Sequence[int]]) -> Sequence[int]:
        """All of each prefix: an index needs tokens alone."""
        return [len(prefix) for prefix in prefixes]

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop the indexes of these sequences; unknown ones are none."""
        for seq_id in seq_ids:
            self.histories.pop(seq_id, None)
