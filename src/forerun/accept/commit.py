"""Commit: what a verdict makes final.

Decides which tokens a sequence emits in a round, where each came from, and which nodes of its tail stay in the
cache. Holds the round's one synchronisation: the verdict comes to the host here. Knows nothing of models or
schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun.accept.outcome import RowOutcome
from forerun.tree import DraftTree
from forerun.verify.rules import Verdict


@dataclass(frozen=True, slots=True)
class HostTree:
    """One sequence's tree on the host: its valid nodes, renumbered without holes, in order."""

    tokens: list[int]
    parents: list[int]
    number: dict[int, int]  # node of the DraftTree -> node here

    @property
    def branches(self) -> bool:
        """Whether it is more than a chain."""
        return any(parent != i - 1 for i, parent in enumerate(self.parents))

    def depth(self) -> int:
        """Edges of its longest path."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return max(depths)


def host_trees(tree: DraftTree) -> list[HostTree]:
    """The trees of a batch, for planning slots and paths."""
    trees = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        valid = [i for i, token in enumerate(tokens) if token >= 0]
        number = {node: i for i, node in enumerate(valid)}
        trees.append(HostTree([tokens[i] for i in valid], [number.get(parents[i], -1) for i in valid], number))
    return trees


@dataclass(frozen=True, slots=True)
class Accepted:
    """One sequence's run: the nodes of its host tree that are final (root first), and the tokens it emits."""

    nodes: list[int]
    tokens: list[int]
    num_drafted: int
    offered: int

    @property
    def length(self) -> int:
        """Guesses accepted."""
        return len(self.nodes) - 1

    def outcome(self, seq_id: int, num_emitted: int) -> RowOutcome:
        """This run, to be counted."""
        return RowOutcome(seq_id, self.num_drafted, self.offered, self.length, num_emitted)


def accept(verdict: Verdict, trees: Sequence[HostTree]) -> list[Accepted]:
    """Bring the verdict to the host: the round's one synchronisation."""
    packed = torch.cat([verdict.path, verdict.length[:, None], verdict.next_token[:, None]], dim=1).tolist()
    runs = []
    for (*path, length, next_token), tree in zip(packed, trees, strict=True):
        nodes = [tree.number[node] for node in path[: length + 1]]
        tokens = [tree.tokens[n] for n in nodes[1:]] + [next_token]
        rejected = nodes[-1] in tree.parents
        runs.append(Accepted(nodes, tokens, len(tree.tokens) - 1, length + rejected))
    return runs
