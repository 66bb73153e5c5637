"""DraftedText: the state of one sequence in a drafter that is a model.

A model reads draft tokens after the text that is committed to its cache; they are the sequence's *tail*. This module
numbers the tail's tokens as the runner does, and finds those that a longer text confirms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from torch import Tensor

from forerun.annotations import Float
from forerun.device import Download
from forerun.draft.base import Budget
from forerun.models.chains import Chains, ChainStart, IdMap
from forerun.models.runner import Read
from forerun.sampling.draws import Draws


@dataclass(slots=True)
class DraftedText:
    """One sequence of a drafter; the runner knows how much of `text` is in the cache.

    Texts of the same `salt` may share cached prefixes; None forbids it.

    `tail` has the draft tokens that were read after the committed text: (parent node, token) -> node, with the numbers
    that the runner uses; parent -1 is the end of the committed text. `pending`, if set, waits for the tail's last
    tokens, which so far only the device knows. A `lost` sequence is not drafted any more: its text did not fit the
    cache, and cannot be read later, because the target's states come only once.
    """

    text: list[int] = field(default_factory=list)
    root: int | None = None
    highest: int = 0  # the largest token id in the text
    tail: dict[tuple[int, int], int] = field(default_factory=dict)
    pending: Callable[[], Sequence[int]] | None = None
    lost: bool = False
    salt: Hashable = None

    def add(self, parent: int, token: int) -> int:
        """Number a node of the tail that is about to be read."""
        return self.tail.setdefault((parent, token), len(self.tail))

    def append(self, token: int) -> None:
        """Number a token after the tail's last node."""
        self.add(len(self.tail) - 1, token)

    def number_pending(self) -> None:
        """Wait for the pending tokens, and number them in the tail."""
        if self.pending is not None:
            for node, token in enumerate(self.pending(), start=len(self.tail)):
                self.tail[node - 1, token] = node
        self.pending = None

    def tokens(self, first: int) -> list[int]:
        """Text and root from index `first` on."""
        root = [] if self.root is None or first > len(self.text) else [self.root]
        return self.text[first:] + root

    def rewrite(self, first: int, tokens: Sequence[int]) -> int:
        """Replace text and root from index `first` on; returns how many tokens before the new root are unchanged."""
        text = self.text
        if self.root is not None:
            text.append(self.root)
        same = (old == new for old, new in zip(text[first:], tokens, strict=False))
        num_same = first + sum(1 for _ in takewhile(bool, same))
        text[first:] = tokens
        self.root = text.pop() if text else None
        self.highest = max(self.highest, *tokens, 0)
        return min(num_same, len(text))

    def clear(self, count: int = 0) -> None:
        """Drop all but the first `count` nodes of the tail."""
        self.tail = dict([*self.tail.items()][:count])
        self.pending = None

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes of the tail along the longest prefix of `tokens` that it has."""
        path: list[int] = []
        for token in tokens:
            node = self.tail.get((path[-1] if path else -1, token))
            if node is None:
                break
            path.append(node)
        return path

    def num_reusable(self, tokens: Sequence[int]) -> int:
        """How many of the tail's first nodes form a chain that is a prefix of `tokens`."""
        path = self.path(tokens)
        return next((i for i, node in enumerate(path) if node != i), len(path))


@dataclass(frozen=True, slots=True)
class Revision:
    """A sequence's final text from index `first` on, with the root last; the text before `first` stays."""

    seq_id: int
    first: int
    tokens: Sequence[int]


class DraftRow(NamedTuple):
    """A sequence to be drafted within `budget`.

    `after_text` are the final tokens after its recorded text, the root last. `judged` are another drafter's tokens,
    which are read after the root to judge them.
    """

    seq_id: int
    after_text: Sequence[int]
    budget: Budget
    judged: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RootPass:
    """The result of a pass: what was read, the rows for which the cache had room, and the requested logits."""

    reads: Sequence[Read]
    rows: list[DraftRow]
    logits: Float[Tensor, "judged vocab"]


def number_tokens(texts: Mapping[int, DraftedText], ids: IdMap, chains: Chains, starts: Sequence[ChainStart]) -> None:
    """Add the draft tokens that were read to the tails of their texts; tokens on the device are added as pending."""
    if chains.draft_tokens is None:
        for start in starts:
            read = chains.trees[start.row].tokens[1 : 1 + chains.num_read.get(start.seq_id, 0)]
            for token in ids.model_id_list(read):
                texts[start.seq_id].append(token)
    elif chains.num_read:
        download = Download(ids.model_ids(chains.draft_tokens))

        def downloaded(row: int, num_read: int) -> Sequence[int]:
            tokens: list[int] = download.values[row][:num_read]
            return tokens

        for start in starts:
            texts[start.seq_id].pending = partial(downloaded, start.row, chains.num_read.get(start.seq_id, 0))


def starts_of(draws: Draws, granted: Mapping[int, Budget]) -> list[ChainStart]:
    """The starts of these sequences' chains, within their budgets."""
    rows = {seq_id: row for row, seq_id in enumerate(draws.seq_ids)}
    return [ChainStart(rows[s], s, b.depth, b.min_survival) for s, b in granted.items()]
