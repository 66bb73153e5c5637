"""Commit: makes a verdict's tokens final.

This file decides which tokens a sequence emits in a round, where each came from, and which nodes of the draft stay in
the cache. The round's one synchronisation is here: the verdict is copied to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.accept.outcome import RowOutcome
from forerun.annotations import Int
from forerun.device import Download
from forerun.tree import HostTree
from forerun.verify.rules import Verdict


class Origin(Enum):
    """How a token came about; every token is the target's own choice, whatever its origin."""

    TARGET = "target"  # drawn with nothing drafted
    DRAFTED = "drafted"  # drafted and accepted
    RECOVERED = "recovered"  # drawn where all guesses were rejected
    BONUS = "bonus"  # drawn behind a draft that was accepted to its end

    def __repr__(self) -> str:
        return self.value  # results hold one for each token


class Accepted(NamedTuple):
    """One sequence's run: the nodes of its tree that are final (root first), and the tokens that it emits.

    `ranked` are the log-probabilities of all nodes' tokens, where the verdict has brought them along.
    """

    tree: HostTree
    nodes: list[int]
    tokens: list[int]
    ranked: Sequence[Sequence[float]] = ()

    @property
    def length(self) -> int:
        """How many guesses were accepted."""
        return len(self.nodes) - 1

    @property
    def num_drafted(self) -> int:
        """All guesses, those that a grammar has removed before they were read too."""
        return self.tree.num_guesses + len(self.tree.cut)

    @property
    def offered(self) -> int:
        """At how many depths a guess was judged: one more than were accepted, unless nothing was guessed behind."""
        last = self.nodes[-1]
        return len(self.nodes) - 1 + (last in self.tree.parents or last in [parent for parent, _ in self.tree.cut])

    @property
    def origins(self) -> list[Origin]:
        """Of its tokens: accepted guesses, then the token behind them."""
        if self.tree.bare:
            return [Origin.TARGET]
        drawn = Origin.RECOVERED if self.offered > self.length else Origin.BONUS
        return [Origin.DRAFTED] * self.length + [drawn if self.num_drafted else Origin.TARGET]

    def outcome(self, seq_id: int, num_emitted: int) -> RowOutcome:
        """This run, to be counted; forced tokens apart from guesses."""
        tree = self.tree
        if tree.bare:
            return RowOutcome(seq_id, 0, 0, 0, num_emitted)
        if tree.forced:
            return RowOutcome(seq_id, 0, 0, 0, num_emitted, num_forced=self.num_drafted)
        row = RowOutcome(seq_id, self.num_drafted, self.offered, self.length, num_emitted, num_cut=len(tree.cut))
        if not tree.drafters:
            return row
        guessed_by = [tree.drafters[column] for column in tree.places]
        right = Counter(guessed_by[node] for node in self.nodes[1:])
        guessed = Counter(by for by, token in zip(guessed_by[1:], tree.tokens[1:], strict=True) if token >= 0)
        guessed.update(tree.drafters[column] for _, column in tree.cut)
        by_drafter = {drafter: (count, right[drafter]) for drafter, count in guessed.items()}
        return row._replace(drafter=guessed_by[0], by_drafter=by_drafter)


def accept(
    verdict: Verdict, trees: Sequence[HostTree], drawn: Int[Tensor, "batch nodes"] | None = None
) -> list[Accepted]:
    """Bring the verdict to the host: the round's one synchronisation. `drawn` are guesses that it has not seen yet."""
    download = None if verdict.ranked is None else Download(verdict.ranked)
    if verdict.arriving is not None:
        packed = verdict.arriving.values
    else:
        packed = (verdict.packed if drawn is None else torch.cat([verdict.packed, drawn], dim=1)).tolist()
    ranked = [] if download is None else download.values
    runs, first, width = [], 0, 0 if drawn is None else verdict.path.shape[1]
    for (length, next_token, *rest), tree in zip(packed, trees, strict=True):
        whole = tree if drawn is None else tree.with_tokens(rest[width:])
        nodes = whole.numbers(rest[: length + 1])
        tokens = [whole.tokens[node] for node in nodes[1:]] + [next_token]
        runs.append(Accepted(whole, nodes, tokens, ranked[first : first + len(tree.tokens)]))
        first += len(tree.tokens)
    return runs
