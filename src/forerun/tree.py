"""DraftTree: the draft trees of a batch, which draft, verify and accept exchange; HostTree: one of them on the host.

There is one token tree per sequence, stored as two integer tensors, tokens and parents. Masks, depths, positions and
paths are all derived from these two.
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
    """The laws (distributions) that draft tokens were sampled from, packed.

    `row[b, i]` is the row of `probs` that the *children* of node i were sampled from, without replacement and in
    sibling order; -1 if they were not sampled. `ids` are the token ids of the columns; None if there is a column for
    every token of the vocabulary.
    """

    row: Int[Tensor, "batch nodes"]
    probs: Float[Tensor, "rows support"]
    ids: Int[Tensor, "rows support"] | None = None

    def to(self, device: torch.device) -> DraftLaw:
        """A copy of the laws on a device."""
        ids = None if self.ids is None else upload_tensor(self.ids, device)
        return DraftLaw(upload_tensor(self.row, device), upload_tensor(self.probs, device), ids)

    def dense(self, vocab: int) -> Float[Tensor, "rows vocab"]:
        """The laws with a column for every id of the vocabulary."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(len(self.probs), vocab).scatter_(1, self.ids, self.probs)


@dataclass(slots=True)
class HostTree:
    """One sequence's tree on the host: its nodes in order, the root first, each after its parent.

    If only a device knows the draft tokens, all tokens are -1, and a node may turn out to be padding. `columns` are the
    nodes' columns in the DraftTree; empty if they equal the node numbers.

    Optional, by node number: `survival`, the drafter's estimate of P(path to the node accepted), 1 at the root;
    `law_rows`, the row of `DraftLaw` that its children were sampled from. By column of the DraftTree: `drafters`, the
    member of a mix that drafted the node, -1 for none; at the root, the member that drafted the sequence. With a
    grammar: `cut`, the draft tokens that it removed, each as (number of its parent, or -1 if that was removed too; its
    column); `forced`: all draft tokens are forced by the grammar.
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
        """A tree with a root only, to which draft tokens are added."""
        return cls([root], [-1], survival=[1.0])

    @classmethod
    def unseen(cls, num_drafted: int) -> HostTree:
        """A chain whose tokens only a device knows yet."""
        return cls([-1] * (1 + num_drafted), [*range(-1, num_drafted)])

    @classmethod
    def in_columns(cls, columns: Sequence[int], parents: list[int], tokens: list[int]) -> HostTree:
        """The nodes in these columns of a DraftTree; `parents` are columns too."""
        if columns[-1] == len(columns) - 1:
            return cls(tokens, parents)
        number = {column: node for node, column in enumerate(columns)}
        return cls(tokens, [number.get(parent, -1) for parent in parents], columns)

    @property
    def places(self) -> Sequence[int]:
        """The DraftTree column of each node."""
        return self.columns or range(len(self.tokens))

    @property
    def bare(self) -> bool:
        """Whether the tree is a root alone as in plain decoding, and nothing was removed from it."""
        return len(self.tokens) == 1 and not self.cut and not self.drafters

    @property
    def num_drafted(self) -> int:
        """Number of draft tokens."""
        return len(self.tokens) - 1 - self.tokens.count(-1)

    @property
    def branches(self) -> bool:
        """Whether the tree is not a chain."""
        return self.parents != [*range(-1, len(self.parents) - 1)]

    def add(self, token: int, parent: int, survival: float) -> int:
        """Append a draft token; returns its node number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.survival.append(survival)
        return len(self.tokens) - 1

    def extend(self, tokens: Sequence[int], survival: Sequence[float] = ()) -> None:
        """Append a chain after the root."""
        self.tokens += tokens
        self.parents += range(len(tokens))
        self.survival += survival

    def depths(self) -> list[int]:
        """Depth of each node: edges to the root."""
        if not self.branches:
            return [*range(len(self.parents))]
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def depth(self) -> int:
        """The depth of its deepest node."""
        return max(self.depths())

    def paths(self) -> list[tuple[int, ...]]:
        """For each node the draft tokens from below the root down to it."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        return paths

    def numbers(self, columns: list[int]) -> list[int]:
        """The node numbers of these columns."""
        return [self.columns.index(column) for column in columns] if self.columns else columns

    def subtree(self, nodes: Sequence[int]) -> HostTree:
        """The tree of these nodes, renumbered; they must include the root and the parent of each node."""
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
        """A copy with these tokens, by column of the DraftTree; nodes with token -1 are padding, without a parent."""
        new, parents = [tokens[column] for column in self.places], self.parents
        if min(new) < 0:
            parents = [parent if token >= 0 else -1 for parent, token in zip(parents, new, strict=True)]
        return HostTree(new, parents, self.columns, self.survival, self.law_rows, self.drafters, self.cut, self.forced)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The draft trees of a batch, one per sequence.

    Node 0 is the root: the sequence's last token (of the prompt, or sampled), which the target has not read.
    `parents[:, i] < i`; -1 marks the root and padding, and padding has token -1. Siblings have distinct tokens, in the
    order in which they were drawn. A chain of k tokens has parents [-1, 0, 1, ..., k-1]: chains are no special case.

    `depth` (longest path, in edges) and `width` (most children of one node) are upper bounds that the host knows
    without synchronising; `widths` are the widths of each row, fixed before sampling. If `q` is None, the draft tokens
    are judged by `follow`, in every verification mode. `known` is the host's copy of the nodes that the target reads,
    also for trees on a device. `sound`: unchanged chains of a runner (`drawn`), which need no check.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    depth: int
    width: int = 1
    q: DraftLaw | None = None
    known: Sequence[HostTree] | None = None
    widths: Sequence[int] | None = None
    sound: bool = field(default=False, init=False)  # so that trees made by `replace` are checked

    @classmethod
    def drawn(cls, nodes: Int[Tensor, "2 batch nodes"], known: Sequence[HostTree]) -> DraftTree:
        """Chains generated by a runner, with valid tokens; `known` is their host copy."""
        tree = cls(nodes[0], nodes[1], nodes.shape[2] - 1, known=known)
        object.__setattr__(tree, "sound", True)
        return tree

    @classmethod
    def bare(cls, roots: Int[Tensor, " batch"]) -> DraftTree:
        """Roots without draft tokens, as in plain decoding."""
        return cls(tokens=roots[:, None], parents=torch.full_like(roots, -1)[:, None], depth=0)

    @classmethod
    def of_roots(cls, roots: Sequence[int]) -> DraftTree:
        """Roots without draft tokens, from token ids on the host."""
        tokens = torch.from_numpy(np.array(roots, np.int64).reshape(-1, 1))
        return cls(tokens, torch.full_like(tokens, -1), 0, known=[HostTree([root], [-1]) for root in roots])

    @classmethod
    def chains(
        cls, roots: Int[Tensor, " batch"], draft_tokens: Int[Tensor, "batch depth"], q: DraftLaw | None = None
    ) -> DraftTree:
        """One chain per sequence; a chain ends before the first draft token that is -1."""
        batch, depth = draft_tokens.shape
        in_chain = (draft_tokens >= 0).long().cumprod(1).bool()
        steps = torch.arange(depth, device=draft_tokens.device).expand(batch, depth)
        parents = torch.where(in_chain, steps, -1)
        tokens = torch.cat([roots[:, None], torch.where(in_chain, draft_tokens, -1)], dim=1)
        return cls(tokens, torch.cat([torch.full_like(roots, -1)[:, None], parents], dim=1), depth=depth, q=q)

    @classmethod
    def of_texts(cls, texts: Sequence[Sequence[int]]) -> DraftTree:
        """One chain per sequence, from lists of its tokens, the root first; for drafters that work on the host."""
        parents = padded([range(-1, len(text) - 1) for text in texts])
        return cls(padded(texts), parents, depth=parents.shape[1] - 1)

    @classmethod
    def of_hosts(cls, trees: Sequence[HostTree], width: int) -> DraftTree:
        """The batch of these host trees, with the same node numbers; no node has more than `width` children."""
        tokens, parents = padded([tree.tokens for tree in trees]), padded([tree.parents for tree in trees])
        depth = tokens.shape[1] - 1 if width == 1 else max((tree.depth() for tree in trees), default=0)
        return cls(tokens, parents, depth, width, known=trees)

    @property
    def valid(self) -> Bool[Tensor, "batch nodes"]:
        """True for the root and for draft tokens, False for padding."""
        return self.tokens >= 0

    def depths(self) -> Int[Tensor, "batch nodes"]:
        """Depth of each node: edges to its root; 0 for padding."""
        up, depth = self.parents, torch.zeros_like(self.parents)
        for _ in range(self.depth):
            depth = depth + (up >= 0)
            up = torch.where(up >= 0, self.parents.gather(1, up.clamp_min(0)), up)
        return depth

    def paths(self) -> Int[Tensor, "batch nodes path"]:
        """For each node the nodes from its root down to itself, by depth; then -1."""
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
        """For each node the tokens after its root down to itself; then -1."""
        batch, nodes = self.tokens.shape
        below = self.paths()[:, :, 1:].reshape(batch, -1)
        tokens = torch.where(below >= 0, self.tokens.gather(1, below.clamp_min(0)), -1)
        return tokens.view(batch, nodes, self.depth)

    def children(self) -> Int[Tensor, "batch nodes width"]:
        """For each node its children in sibling order, then -1."""
        batch, nodes = self.parents.shape
        siblings = self.parents[:, :, None] == torch.arange(nodes, device=self.parents.device)  # [batch, child, parent]
        rank = (siblings.long().cumsum(1) - 1).gather(2, self.parents.clamp_min(0)[:, :, None])[:, :, 0]
        table = self.parents.new_full((batch, nodes * self.width + 1), -1)
        slot = torch.where(self.parents >= 0, self.parents * self.width + rank, nodes * self.width)
        table.scatter_(1, slot, torch.arange(nodes, device=table.device).expand(batch, nodes))
        return table[:, :-1].view(batch, nodes, self.width)

    @property
    def unseen(self) -> bool:
        """Whether only a device knows the draft tokens, so that some may turn out to be padding."""
        return bool(self.known and self.known[0].tokens[0] < 0)

    def host(self) -> Sequence[HostTree]:
        """The trees on the host; if they are known to a device only, this waits for it."""
        if self.known is not None:
            return self.known
        # `numpy` raises for tensors of a device, so a tree on the CPU certainly does not wait for one here.
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
        """The host trees with all tokens; waits for the device if the host does not know the tokens."""
        return (replace(self, known=None) if self.unseen else self).host()

    def seen_paths(self) -> list[tuple[int, Sequence[int]]] | None:
        """For each node, in the order of `read_nodes`: its row, and the draft tokens of the path to it.

        None if the host does not know the draft tokens.
        """
        if self.unseen:
            return None
        return [(row, path) for row, tree in enumerate(self.host()) for path in tree.paths()]

    def to(self, device: torch.device) -> DraftTree:
        """The tree on a device, with the host's copy in `known`."""
        if self.known is not None and self.tokens.device == device:
            return self
        known = self.host()
        if self.tokens.device == device:
            return replace(self, known=known)
        tokens, parents = upload_tensor(torch.stack([self.tokens, self.parents]), device)  # in one copy
        return replace(self, tokens=tokens, parents=parents, q=self.q and self.q.to(device), known=known)

    def read_nodes(self) -> Int[Tensor, " rows"]:
        """The nodes that the target reads, in order, as indices into the flattened tensors."""
        if self.known is None:
            return self.valid.flatten().nonzero()[:, 0]
        columns = self.tokens.shape[1]
        flat = [row * columns + column for row, tree in enumerate(self.known) for column in tree.places]
        return upload(flat, torch.long, self.tokens.device)

    def select(self, rows: Sequence[int]) -> DraftTree:
        """The trees of these rows of the batch."""
        index = upload(rows, torch.long, self.tokens.device)
        q = None if self.q is None else replace(self.q, row=self.q.row[index])
        widths = None if self.widths is None else [self.widths[row] for row in rows]
        return replace(self, tokens=self.tokens[index], parents=self.parents[index], q=q, known=None, widths=widths)

    def rows_with_law(self) -> Bool[Tensor, " batch"] | None:
        """Which rows have a draft token sampled from a declared law; None if the host knows that none has."""
        if self.q is None:
            return None
        law = self.q.row.gather(1, self.parents.clamp_min(0))
        drawn = ((self.parents >= 0) & (law >= 0)).any(1)
        return None if is_cpu(drawn.device) and not drawn.numpy().any() else drawn

    def without_law(self) -> DraftTree:
        """The tree without laws, to be judged by `follow`; needed for a tree that was pruned after sampling.

        `known` is dropped, unless only the device knows the tokens.
        """
        return replace(self, q=None, known=self.known if self.unseen else None)


def survival_of(trees: Sequence[HostTree]) -> Float[Tensor, "batch nodes"]:
    """The survival of all nodes, laid out as in `DraftTree.of_hosts`; 0 for padding."""
    return padded([tree.survival for tree in trees], 0.0, np.float32)


def padded(
    rows: Sequence[Sequence[int | float]], filler: int | float = -1, dtype: type[np.generic] = np.int64
) -> Tensor:
    """Rows of values by node as a tensor [batch, nodes] on the host, padded with `filler`."""
    nodes = max(map(len, rows), default=1)
    filled = [[*row, *[filler] * (nodes - len(row))] for row in rows]
    return torch.from_numpy(np.array(filled, dtype).reshape(len(rows), nodes))  # in half the time of torch.tensor
