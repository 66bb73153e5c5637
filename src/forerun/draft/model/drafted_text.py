"""DraftedText: the state of one sequence in a drafter that is a model.

This module numbers the tokens that were read after the kept text and finds them again, and decides which part of a text
stays if its end turns out to be different.
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
    """One sequence as the drafter knows it; the runner knows how much of its text is in the cache.

    Texts of the same `salt` may share cached prefixes; None forbids it.

    `tail` finds the draft tokens that were read after the kept text: (parent node, token) -> node, numbered as by the
    runner; parent -1 is the kept text. A `lost` sequence is not drafted: its text found no room in the cache, and the
    target's states, from which it would be read, come only once.
    """

    text: list[int] = field(default_factory=list)
    root: int | None = None
    highest: int = 0  # the largest token id in the text
    tail: dict[tuple[int, int], int] = field(default_factory=dict)
    pending: Callable[[], Sequence[int]] | None = None  # waits for guesses in the tail that the host has not seen
    lost: bool = False
    salt: Hashable = None

    def add(self, parent: int, token: int) -> int:
        """Number a tail node that is about to be read."""
        return self.tail.setdefault((parent, token), len(self.tail))

    def append(self, token: int) -> None:
        """Number a token after the tail's last node."""
        self.add(len(self.tail) - 1, token)

    def settle(self) -> None:
        """Number the tail nodes that were read before the host knew them."""
        if self.pending is not None:
            for node, token in enumerate(self.pending(), start=len(self.tail)):
                self.tail[node - 1, token] = node
        self.pending = None

    def tokens(self, first: int) -> list[int]:
        """Text and root from token `first` on."""
        root = [] if self.root is None or first > len(self.text) else [self.root]
        return self.text[first:] + root

    def rewrite(self, first: int, tokens: Sequence[int]) -> int:
        """Replace text and root from token `first` on; returns how much of the text before the root is unchanged."""
        text = self.text
        if self.root is not None:
            text.append(self.root)
        same = (old == new for old, new in zip(text[first:], tokens, strict=False))
        kept = first + sum(1 for _ in takewhile(bool, same))
        text[first:] = tokens
        self.root = text.pop() if text else None
        self.highest = max(self.highest, *tokens, 0)
        return min(kept, len(text))

    def clear(self, count: int = 0) -> None:
        """Drop all but the first nodes of the tail."""
        self.tail = dict([*self.tail.items()][:count])
        self.pending = None

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The tail's nodes for the longest possible prefix of `tokens`."""
        path: list[int] = []
        for token in tokens:
            node = self.tail.get((path[-1] if path else -1, token))
            if node is None:
                break
            path.append(node)
        return path

    def shared(self, tokens: Sequence[int]) -> int:
        """How many of the tail's first nodes are a chain that is a prefix of `tokens`."""
        path = self.path(tokens)
        return next((i for i, node in enumerate(path) if node != i), len(path))


@dataclass(frozen=True, slots=True)
class Revision:
    """A sequence's final text from token `first` on, with the root last; the text before `first` stays."""

    seq_id: int
    first: int
    tokens: Sequence[int]


class DraftRow(NamedTuple):
    """A sequence to be drafted within `budget`. `late` are final tokens after its recorded text, the root last.

    `guesses` are another drafter's tokens that this one judges: they are read after the root.
    """

    seq_id: int
    late: Sequence[int]
    budget: Budget
    guesses: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RootPass:
    """A pass as far as the cache had room: what was read, which rows are left, and the requested logits."""

    reads: Sequence[Read]
    rows: list[DraftRow]
    logits: Float[Tensor, "judged vocab"]


def number_guesses(texts: Mapping[int, DraftedText], ids: IdMap, chains: Chains, starts: Sequence[ChainStart]) -> None:
    """Number the draft tokens that were read into these texts' tails; unseen ones when the host knows them."""
    if chains.draft_tokens is None:
        for start in starts:
            read = chains.trees[start.row].tokens[1 : 1 + chains.num_read.get(start.seq_id, 0)]
            for token in ids.model_id_list(read):
                texts[start.seq_id].append(token)
    elif chains.num_read:
        download = Download(ids.model_ids(chains.draft_tokens))

        def guesses(row: int, num_read: int) -> Sequence[int]:
            read: list[int] = download.values[row][:num_read]
            return read

        for start in starts:
            texts[start.seq_id].pending = partial(guesses, start.row, chains.num_read.get(start.seq_id, 0))


def starts_of(draws: Draws, granted: Mapping[int, Budget]) -> list[ChainStart]:
    """The chains of these sequences, within their budgets."""
    rows = {seq_id: row for row, seq_id in enumerate(draws.seq_ids)}
    return [ChainStart(rows[s], s, min(b.depth, b.nodes), b.min_survival) for s, b in granted.items()]
