"""Commit: turns a verdict into final tokens.

This file decides which tokens a sequence emits in a round, the origin of each, and which tree nodes stay in the KV
cache. Here the verdict is copied to the host: the only synchronisation with a device in a round.
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
    """Where a token came from. Every token is the target's own sample, whatever its origin."""

    TARGET = "target"  # sampled where nothing was drafted
    DRAFTED = "drafted"  # drafted and accepted
    RECOVERED = "recovered"  # sampled where all draft tokens were rejected
    BONUS = "bonus"  # sampled after a draft that was accepted to its end

    def __repr__(self) -> str:
        return self.value  # short, since results print one for each token


class Accepted(NamedTuple):
    """One sequence's accepted run: the nodes of its tree that are final (root first), and the tokens that it emits.

    `ranked` are the log-probabilities of all nodes' tokens, if the verdict contains them.
    """

    tree: HostTree
    nodes: list[int]
    tokens: list[int]
    ranked: Sequence[Sequence[float]] = ()

    @property
    def length(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.nodes) - 1

    @property
    def num_drafted(self) -> int:
        """Number of draft tokens, including those that a grammar removed before the pass."""
        return self.tree.num_drafted + len(self.tree.cut)

    @property
    def offered(self) -> int:
        """Number of depths at which a draft token was judged: `length`, plus one if the path ended in a rejection."""
        last = self.nodes[-1]
        return len(self.nodes) - 1 + (last in self.tree.parents or last in [parent for parent, _ in self.tree.cut])

    @property
    def origins(self) -> list[Origin]:
        """The origins of its tokens: accepted draft tokens, then the token after them."""
        if self.tree.bare:
            return [Origin.TARGET]
        drawn = Origin.RECOVERED if self.offered > self.length else Origin.BONUS
        return [Origin.DRAFTED] * self.length + [drawn if self.num_drafted else Origin.TARGET]

    def outcome(self, seq_id: int, num_emitted: int) -> RowOutcome:
        """This run for the statistics; tokens forced by a grammar are counted separately from draft tokens."""
        tree = self.tree
        if tree.bare:
            return RowOutcome(seq_id, 0, 0, 0, num_emitted)
        if tree.forced:
            return RowOutcome(seq_id, 0, 0, 0, num_emitted, num_forced=self.num_drafted)
        row = RowOutcome(seq_id, self.num_drafted, self.offered, self.length, num_emitted, num_cut=len(tree.cut))
        if not tree.drafters:
            return row
        drafted_by = [tree.drafters[column] for column in tree.places]
        accepted = Counter(drafted_by[node] for node in self.nodes[1:])
        drafted = Counter(by for by, token in zip(drafted_by[1:], tree.tokens[1:], strict=True) if token >= 0)
        drafted.update(tree.drafters[column] for _, column in tree.cut)
        by_drafter = {drafter: (count, accepted[drafter]) for drafter, count in drafted.items()}
        return row._replace(drafter=drafted_by[0], by_drafter=by_drafter)


def accept(
    verdict: Verdict, trees: Sequence[HostTree], drawn: Int[Tensor, "batch nodes"] | None = None
) -> list[Accepted]:
    """Each sequence's accepted run. Copies the verdict to the host, which is the round's only synchronisation.

    `drawn` are the draft tokens by column of the DraftTree, if only the device knows them.
    """
    ranked_download = None if verdict.ranked is None else Download(verdict.ranked)
    if verdict.download is not None:
        packed = verdict.download.values
    else:
        packed = (verdict.packed if drawn is None else torch.cat([verdict.packed, drawn], dim=1)).tolist()
    ranked = [] if ranked_download is None else ranked_download.values
    runs, first = [], 0
    path_columns = 0 if drawn is None else verdict.path.shape[1]
    for (length, next_token, *rest), tree in zip(packed, trees, strict=True):
        known = tree if drawn is None else tree.with_tokens(rest[path_columns:])
        nodes = known.numbers(rest[: length + 1])
        tokens = [known.tokens[node] for node in nodes[1:]] + [next_token]
        runs.append(Accepted(known, nodes, tokens, ranked[first : first + len(tree.tokens)]))
        first += len(tree.tokens)
    return runs
