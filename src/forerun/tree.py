"""DraftTree: guessed continuations, the value that draft, verify and accept exchange; HostTree: one row on the host.

This file decides how guesses are laid out: one token tree per sequence, as two integer tensors. Masks, depths,
positions and paths are all derived from them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Bool, Float, Int
from forerun.device import is_cpu, upload, upload_tensor


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """The laws that drafted tokens were drawn from, packed.

    `row[b, i]` is the row of `probs` that the *children* of node i were drawn from, without replacement and in
    sibling order; -1 where they were chosen deterministically. `ids` gives the token ids of the columns where the
    support is not the whole vocabulary.
    """

    row: Int[Tensor, "batch nodes"]
    probs: Float[Tensor, "rows support"]
    ids: Int[Tensor, "rows support"] | None = None

    def to(self, device: torch.device) -> DraftLaw:
        """The laws on a device."""
        ids = None if self.ids is None else upload_tensor(self.ids, device)
        return DraftLaw(upload_tensor(self.row, device), upload_tensor(self.probs, device), ids)

    def dense(self, vocab: int) -> Float[Tensor, "rows vocab"]:
        """The laws with a column for every id of the vocabulary."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(len(self.probs), vocab).scatter_(1, self.ids, self.probs)


@dataclass(slots=True)
class HostTree:
    """One sequence's tree on the host: its nodes in order, the root first, each behind its parent.

    Where guesses were drawn on a device and not fetched yet all tokens are -1; a node may turn out to be padding.
    `columns` says where the nodes stand in the DraftTree, if not in their own order.

    What else may be known of each node, by number: `survival`, the drafter's P(path accepted), 1 at the root; and
    `law_rows`, where the law that its children were drawn from is packed (`DraftLaw.row`). By column of the DraftTree:
    `drafters`, which of a mix guessed it, and at the root which drafted the row, -1 for none. Where a grammar has a
    say, `cut` are the guesses that it has removed, each as its parent's number, -1 if that is removed too, and its
    column; `forced` says that all guesses are the grammar's own.
    """

    tokens: list[int]
    parents: list[int]
    columns: Sequence[int] = ()
    survival: list[float] = field(default_factory=list)
    law_rows: list[int] = field(default_factory=list)
    drafters: list[int] = field(default_factory=list)
    cut: Sequence[tuple[int, int]] = ()
    forced: bool = False

    @classmethod
    def of_root(cls, root: int) -> HostTree:
        """A root with nothing behind it yet, to which guesses are added."""
        return cls([root], [-1], survival=[1.0])

    @classmethod
    def unseen(cls, num_guesses: int) -> HostTree:
        """A chain whose tokens only a device knows."""
        return cls([-1] * (1 + num_guesses), [*range(-1, num_guesses)])

    @classmethod
    def in_columns(cls, columns: Sequence[int], parents: list[int], tokens: list[int]) -> HostTree:
        """The nodes in these columns of a DraftTree; `parents` are columns too."""
        if columns[-1] == len(columns) - 1:
            return cls(tokens, parents)
        number = {column: node for node, column in enumerate(columns)}
        return cls(tokens, [number.get(parent, -1) for parent in parents], columns)

    @property
    def places(self) -> Sequence[int]:
        """The column of each node."""
        return self.columns or range(len(self.tokens))

    @property
    def bare(self) -> bool:
        """Whether it is a root alone, of which nothing was removed, as in plain decoding."""
        return len(self.tokens) == 1 and not self.cut and not self.drafters

    @property
    def num_guesses(self) -> int:
        """Nodes that hold a guess."""
        return len(self.tokens) - 1 - self.tokens.count(-1)

    @property
    def branches(self) -> bool:
        """Whether it is more than a chain."""
        return self.parents != [*range(-1, len(self.parents) - 1)]

    def add(self, token: int, parent: int, survival: float) -> int:
        """Append a guess; its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.survival.append(survival)
        return len(self.tokens) - 1

    def extend(self, tokens: Sequence[int], survival: Sequence[float] = ()) -> None:
        """Append a chain behind the root."""
        self.tokens += tokens
        self.parents += range(len(tokens))
        self.survival += survival

    def depths(self) -> list[int]:
        """Edges between each node and the root."""
        if not self.branches:
            return [*range(len(self.parents))]
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def depth(self) -> int:
        """Edges of its longest path."""
        return max(self.depths())

    def paths(self) -> list[tuple[int, ...]]:
        """The guesses that lead to each node."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        return paths

    def numbers(self, columns: list[int]) -> list[int]:
        """The numbers of the nodes in these columns."""
        return [self.columns.index(column) for column in columns] if self.columns else columns

    def some(self, nodes: Sequence[int]) -> HostTree:
        """A tree of some of the nodes, the root among them and each with its parent, in columns of their own."""
        number = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return replace(
            self,
            tokens=[self.tokens[node] for node in nodes],
            parents=[number[self.parents[node]] for node in nodes],
            columns=(),
            survival=[self.survival[node] for node in nodes] if self.survival else [],
            law_rows=[self.law_rows[node] for node in nodes] if self.law_rows else [],
        )

    def with_tokens(self, tokens: Sequence[int]) -> HostTree:
        """Fills in the tokens, which are given by column; a node without a token gets no parent."""
        drawn, above = [tokens[column] for column in self.places], self.parents
        if min(drawn) < 0:
            above = [parent if token >= 0 else -1 for parent, token in zip(above, drawn, strict=True)]
        return HostTree(drawn, above, self.columns, self.survival, self.law_rows, self.drafters, self.cut, self.forced)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guessed continuations, one token tree per sequence.

    Node 0 is the root: the sequence's last token (of the prompt, or drawn), not yet read by the target.
    `parents[:, i] < i`; -1 marks the root and padding, and padding has token -1. Siblings carry distinct tokens, in
    draw order. A chain of k tokens is parents = [-1, 0, 1, ..., k-1]: chains are not a special case.

    `depth` (longest path, in edges) and `width` (most children of one node) are upper bounds known to the host, so
    that walking never synchronises; `widths` are those of each row, settled before anything was drawn. `q` None: the
    guesses are judged by `follow`, in every verification mode. `known` is what the host knows without a copy, of trees
    on a device too: the nodes that the target reads. `sound`: the chains that a runner drew (`drawn`), unchanged;
    nothing is looked for in them.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    depth: int
    width: int = 1
    q: DraftLaw | None = None
    known: Sequence[HostTree] | None = None
    widths: Sequence[int] | None = None
    sound: bool = field(default=False, init=False)  # so `replace` gives trees that are looked through

    @classmethod
    def drawn(cls, nodes: Int[Tensor, "2 batch nodes"], known: Sequence[HostTree]) -> DraftTree:
        """Tokens and parents of chains that are as `known` says, of tokens that exist."""
        tree = cls(nodes[0], nodes[1], nodes.shape[2] - 1, known=known)
        object.__setattr__(tree, "sound", True)
        return tree

    @classmethod
    def bare(cls, roots: Int[Tensor, " batch"]) -> DraftTree:
        """No guesses: roots alone, as in plain decoding."""
        return cls(tokens=roots[:, None], parents=torch.full_like(roots, -1)[:, None], depth=0)

    @classmethod
    def of_roots(cls, roots: Sequence[int]) -> DraftTree:
        """No guesses, behind roots that the host knows."""
        tokens = torch.from_numpy(np.array(roots, np.int64).reshape(-1, 1))
        return cls(tokens, torch.full_like(tokens, -1), 0, known=[HostTree([root], [-1]) for root in roots])

    @classmethod
    def chains(
        cls, roots: Int[Tensor, " batch"], guesses: Int[Tensor, "batch depth"], q: DraftLaw | None = None
    ) -> DraftTree:
        """One chain per sequence; a guess of -1 ends its chain."""
        batch, depth = guesses.shape
        alive = (guesses >= 0).long().cumprod(1)
        guesses = torch.where(alive.bool(), guesses, -1)
        steps = torch.arange(depth, device=guesses.device).expand(batch, depth)
        parents = torch.where(alive.bool(), steps, -1)
        tokens = torch.cat([roots[:, None], guesses], dim=1)
        return cls(tokens, torch.cat([torch.full_like(roots, -1)[:, None], parents], dim=1), depth=depth, q=q)

    @classmethod
    def of_texts(cls, texts: Sequence[Sequence[int]]) -> DraftTree:
        """One chain per sequence from host tokens, the root first: for drafters that work on the host."""
        parents = padded([range(-1, len(text) - 1) for text in texts])
        return cls(padded(texts), parents, depth=parents.shape[1] - 1)

    @classmethod
    def of_hosts(cls, trees: Sequence[HostTree], width: int) -> DraftTree:
        """The trees, none of whose nodes has more than `width` children, in the order of their nodes."""
        tokens, parents = padded([tree.tokens for tree in trees]), padded([tree.parents for tree in trees])
        depth = tokens.shape[1] - 1 if width == 1 else max((tree.depth() for tree in trees), default=0)
        return cls(tokens, parents, depth, width, known=trees)

    @property
    def valid(self) -> Bool[Tensor, "batch nodes"]:
        """True for the root and for guesses, False for padding."""
        return self.tokens >= 0

    def depths(self) -> Int[Tensor, "batch nodes"]:
        """Edges between a node and its root; 0 for padding."""
        up, depth = self.parents, torch.zeros_like(self.parents)
        for _ in range(self.depth):
            depth = depth + (up >= 0)
            up = torch.where(up >= 0, self.parents.gather(1, up.clamp_min(0)), up)
        return depth

    def paths(self) -> Int[Tensor, "batch nodes path"]:
        """For each node the nodes from its root down to itself, by depth; -1 beyond its own depth."""
        batch, nodes = self.parents.shape
        node = torch.arange(nodes, device=self.parents.device).expand(batch, nodes)
        upward = [node]
        for _ in range(self.depth):
            last = upward[-1]
            upward.append(torch.where(last >= 0, self.parents.gather(1, last.clamp_min(0)), last))
        climb = torch.stack(upward, dim=2)  # [batch, nodes, depth+1], from the node up to its root, then -1
        depth = (climb[:, :, 1:] >= 0).sum(2, keepdim=True)
        order = depth - torch.arange(self.depth + 1, device=node.device)
        return torch.where(order >= 0, climb.gather(2, order.clamp_min(0)), -1)

    def path_tokens(self) -> Int[Tensor, "batch nodes depth"]:
        """For each node the tokens from below its root down to itself; -1 beyond its own depth."""
        batch, nodes = self.tokens.shape
        below = self.paths()[:, :, 1:].reshape(batch, -1)
        tokens = torch.where(below >= 0, self.tokens.gather(1, below.clamp_min(0)), -1)
        return tokens.view(batch, nodes, self.depth)

    def children(self) -> Int[Tensor, "batch nodes width"]:
        """For each node its children in draw order; -1 where there are fewer."""
        batch, nodes = self.parents.shape
        siblings = self.parents[:, :, None] == torch.arange(nodes, device=self.parents.device)  # [batch, child, parent]
        rank = (siblings.long().cumsum(1) - 1).gather(2, self.parents.clamp_min(0)[:, :, None])[:, :, 0]
        table = self.parents.new_full((batch, nodes * self.width + 1), -1)
        slot = torch.where(self.parents >= 0, self.parents * self.width + rank, nodes * self.width)
        table.scatter_(1, slot, torch.arange(nodes, device=table.device).expand(batch, nodes))
        return table[:, :-1].view(batch, nodes, self.width)

    @property
    def unseen(self) -> bool:
        """Whether the guesses were drawn on a device and the host has not seen them, so that some may be padding."""
        return bool(self.known and self.known[0].tokens[0] < 0)

    def host(self) -> Sequence[HostTree]:
        """Which nodes are read, for the host; where that is not known yet and the tree is on a device, it waits."""
        if self.known is not None:
            return self.known
        # numpy refuses tensors of a device: where the tree is on the CPU nothing can wait here unseen.
        tokens, parents = (
            t.numpy().tolist() if t.device.type == "cpu" else t.tolist() for t in (self.tokens, self.parents)
        )
        trees = []
        for row_tokens, row_parents in zip(tokens, parents, strict=True):
            columns = [i for i, token in enumerate(row_tokens) if token >= 0]
            kept = ([row[i] for i in columns] for row in (row_parents, row_tokens))
            trees.append(HostTree.in_columns(columns, *kept))
        return trees

    def fetched(self) -> Sequence[HostTree]:
        """The trees with all of their tokens, waited for if the host has not seen them."""
        return (replace(self, known=None) if self.unseen else self).host()

    def seen_paths(self) -> list[tuple[int, Sequence[int]]] | None:
        """The sequence of every node that is read and the guesses that lead to it, in the order of `read_nodes`.

        None where the host has not seen the guesses.
        """
        if self.unseen:
            return None
        return [(row, path) for row, tree in enumerate(self.host()) for path in tree.paths()]

    def to(self, device: torch.device) -> DraftTree:
        """The tree on a device, with what the host knows of it."""
        if self.known is not None and self.tokens.device == device:
            return self
        known = self.host()
        if self.tokens.device == device:
            return replace(self, known=known)
        tokens, parents = upload_tensor(torch.stack([self.tokens, self.parents]), device)  # in one copy
        return replace(self, tokens=tokens, parents=parents, q=self.q and self.q.to(device), known=known)

    def read_nodes(self) -> Int[Tensor, " rows"]:
        """The nodes that the target reads, in order, numbered through all sequences: the valid ones, unless known."""
        if self.known is None:
            return self.valid.flatten().nonzero()[:, 0]
        columns = self.tokens.shape[1]
        flat = [row * columns + column for row, tree in enumerate(self.known) for column in tree.places]
        return upload(flat, torch.long, self.tokens.device)

    def select(self, rows: Sequence[int]) -> DraftTree:
        """The trees of some of the sequences."""
        index = upload(rows, torch.long, self.tokens.device)
        q = None if self.q is None else replace(self.q, row=self.q.row[index])
        widths = None if self.widths is None else [self.widths[row] for row in rows]
        return replace(self, tokens=self.tokens[index], parents=self.parents[index], q=q, known=None, widths=widths)

    def rows_with_law(self) -> Bool[Tensor, " batch"] | None:
        """The sequences of which any guess was drawn from a declared law; None where the host sees that none was."""
        if self.q is None:
            return None
        law = self.q.row.gather(1, self.parents.clamp_min(0))
        drawn = ((self.parents >= 0) & (law >= 0)).any(1)
        return None if is_cpu(drawn.device) and not drawn.numpy().any() else drawn

    def without_law(self) -> DraftTree:
        """The tree without laws, to be judged by `follow`, as one is that is pruned after its tokens were drawn.

        Nodes that the host has seen are copied to it again; which of the unseen ones are read does not change.
        """
        return replace(self, q=None, known=self.known if self.unseen else None)


def survival_of(trees: Sequence[HostTree]) -> Float[Tensor, "batch nodes"]:
    """The survival of all nodes, where they stand in the DraftTree `of_hosts`; 0 at padding."""
    return padded([tree.survival for tree in trees], 0.0, np.float32)


def padded(
    rows: Sequence[Sequence[int | float]], filler: int | float = -1, dtype: type[np.generic] = np.int64
) -> Tensor:
    """Rows of values by node as a tensor [batch, nodes] on the host, the shorter ones filled up."""
    nodes = max(map(len, rows), default=1)
    filled = [[*row, *[filler] * (nodes - len(row))] for row in rows]
    return torch.from_numpy(np.array(filled, dtype).reshape(len(rows), nodes))  # in half the time of torch.tensor
