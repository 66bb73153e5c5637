"""Commit: makes a verdict's tokens final.

This file decides which tokens a sequence emits in a round, where each came from, and which nodes of the draft stay in
the cache. The round's one synchronisation is here: the verdict is copied to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from forerun.accept.outcome import RowOutcome
from forerun.annotations import Int
from forerun.tree import DraftTree
from forerun.verify.rules import Verdict


class Origin(Enum):
    """How a token came about; every token is the target's own choice, whatever its origin."""

    TARGET = "target"  # drawn with nothing drafted
    DRAFTED = "drafted"  # drafted and accepted
    RECOVERED = "recovered"  # drawn where all guesses were rejected
    BONUS = "bonus"  # drawn behind a draft that was accepted to its end

    def __repr__(self) -> str:
        return self.value  # results hold one for each token


@dataclass(frozen=True, slots=True)
class HostTree:
    """One sequence's tree on the host: the nodes that are read, renumbered without holes, in order.

    Where guesses were drawn on a device their tokens are -1 until `with_tokens` fills them in; some may stay -1.
    """

    tokens: list[int]
    parents: list[int]
    number: dict[int, int]  # node of the DraftTree -> node here
    drafters: list[int] = field(default_factory=list)  # of a mix's tree: who guessed each node, at the root who drafted
    cut: Sequence[tuple[int, int]] = ()  # guesses that a grammar has removed: parent here or -1, and who guessed them
    forced: bool = False  # whether all guesses are a grammar's

    def with_tokens(self, tokens: Sequence[int]) -> HostTree:
        """Fills in the tokens, which are given by column of the DraftTree; a node without a token gets no parent."""
        drawn = [tokens[node] for node in self.number]
        parents = [parent if token >= 0 else -1 for parent, token in zip(self.parents, drawn, strict=True)]
        return replace(self, tokens=drawn, parents=parents)

    @property
    def num_guesses(self) -> int:
        """Nodes that hold a guess."""
        return sum(token >= 0 for token in self.tokens) - 1

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


def host_trees(tree: DraftTree, drafter: Int[Tensor, "batch columns"] | None = None) -> list[HostTree]:
    """The trees of a batch, for planning slots and paths; `drafter`, on the host, says who guessed each node."""
    known, trees = tree.host(), []
    drafters = None if drafter is None else drafter.tolist()
    for row, (nodes, parents) in enumerate(zip(known.nodes, known.parents, strict=True)):
        number = {node: i for i, node in enumerate(nodes)}
        tokens = list(known.tokens[row]) if known.tokens is not None else [-1] * len(nodes)
        guessed_by = [] if drafters is None else [drafters[row][node] for node in nodes]
        removed = () if known.cut is None else known.cut[row]
        cut = [(number.get(parent, -1), -1 if drafters is None else drafters[row][col]) for col, parent in removed]
        forced = known.forced is not None and known.forced[row]
        above = [number.get(parent, -1) for parent in parents]
        trees.append(HostTree(tokens, above, number, guessed_by, cut, forced))
    return trees


@dataclass(frozen=True, slots=True)
class Accepted:
    """One sequence's run: the nodes of its host tree that are final (root first), and the tokens it emits.

    Of the guesses `num_drafted`, a grammar has removed `num_cut` before they were read; with `forced` all are its own.
    """

    nodes: list[int]
    tokens: list[int]
    num_drafted: int
    offered: int
    guessed: Mapping[int, int] = field(default_factory=dict)  # by drafter of a mix: guesses in the tree
    drafters: Sequence[int] = ()  # of a mix's run: who drafted the row, and who guessed each node after the root
    tree: HostTree | None = None  # of which `nodes` are
    num_cut: int = 0
    forced: bool = False

    @property
    def length(self) -> int:
        """How many guesses were accepted."""
        return len(self.nodes) - 1

    @property
    def origins(self) -> list[Origin]:
        """Of its tokens: accepted guesses, then the token behind them."""
        drawn = Origin.RECOVERED if self.offered > self.length else Origin.BONUS
        return [Origin.DRAFTED] * self.length + [drawn if self.num_drafted else Origin.TARGET]

    def outcome(self, seq_id: int, num_emitted: int) -> RowOutcome:
        """This run, to be counted; forced tokens apart from guesses."""
        if self.forced:
            return RowOutcome(seq_id, 0, 0, 0, num_emitted, num_forced=self.num_drafted)
        row = RowOutcome(seq_id, self.num_drafted, self.offered, self.length, num_emitted, num_cut=self.num_cut)
        if not self.drafters:
            return row
        right = Counter(self.drafters[1:])
        by_drafter = {drafter: (count, right[drafter]) for drafter, count in self.guessed.items()}
        return replace(row, drafter=self.drafters[0], by_drafter=by_drafter)


def accept(
    verdict: Verdict, trees: Sequence[HostTree], drawn: Int[Tensor, "batch nodes"] | None = None
) -> list[Accepted]:
    """Bring the verdict to the host: the round's one synchronisation. `drawn` are guesses that it has not seen yet."""
    packed = (verdict.packed if drawn is None else torch.cat([verdict.packed, drawn], dim=1)).tolist()
    runs = []
    for (length, next_token, *rest), tree in zip(packed, trees, strict=True):
        path = rest[: length + 1]
        tree = tree if drawn is None else tree.with_tokens(rest[verdict.path.shape[1] :])
        nodes = [tree.number[node] for node in path]
        tokens = [tree.tokens[n] for n in nodes[1:]] + [next_token]
        cut_there = [parent for parent, _ in tree.cut]
        rejected = nodes[-1] in tree.parents or nodes[-1] in cut_there
        num_drafted = tree.num_guesses + len(tree.cut)
        run = Accepted(
            nodes, tokens, num_drafted, length + rejected, tree=tree, num_cut=len(tree.cut), forced=tree.forced
        )
        if tree.drafters:
            pairs = zip(tree.drafters[1:], tree.tokens[1:], strict=False)
            guessed = Counter(drafter for drafter, token in pairs if token >= 0)
            guessed.update(drafter for _, drafter in tree.cut)
            run = replace(run, guessed=guessed, drafters=[tree.drafters[n] for n in nodes])
        runs.append(run)
    return runs
