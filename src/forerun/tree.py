"""DraftTree: guessed continuations, the value that draft, verify and accept exchange.

This file decides how guesses are laid out: one token tree per sequence, as two integer tensors. Masks, depths,
positions and paths are all derived from them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
        """The same laws over the whole vocabulary."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(len(self.probs), vocab).scatter_(1, self.ids, self.probs)


@dataclass(frozen=True, slots=True)
class HostView:
    """The part of a tree on a device that the host knows without a copy: which nodes are read.

    `nodes[b]` are the columns of sequence b that the target reads, `parents[b]` the parent of each. `tokens[b]` are
    their tokens; None where guesses were drawn on the device: then what is read may turn out to be padding. Where a
    grammar has a say, `cut[b]` are the guesses that it has removed, each as its column and its parent's, and
    `forced[b]` says that all guesses are the grammar's own.
    """

    nodes: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]] | None = None
    cut: Sequence[Sequence[tuple[int, int]]] | None = field(default=None, kw_only=True)
    forced: Sequence[bool] | None = field(default=None, kw_only=True)

    @classmethod
    def chains(cls, counts: Sequence[int]) -> HostView:
        """Roots with so many guesses behind each, whose tokens the host does not know yet."""
        return cls([range(1 + n) for n in counts], [range(-1, n) for n in counts])


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guessed continuations, one token tree per sequence.

    Node 0 is the root: the sequence's last token (of the prompt, or drawn), not yet read by the target.
    `parents[:, i] < i`; -1 marks the root and padding, and padding has token -1. Siblings carry distinct tokens, in
    draw order. A chain of k tokens is parents = [-1, 0, 1, ..., k-1]: chains are not a special case.

    `depth` (longest path, in edges) and `width` (most children of one node) are upper bounds known to the host, so
    that walking never synchronises; `widths` are those of each row, settled before anything was drawn. `q` None: the
    guesses are judged by `follow`, in every verification mode.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    depth: int
    width: int = 1
    q: DraftLaw | None = None
    known: HostView | None = None
    widths: Sequence[int] | None = None

    @classmethod
    def bare(cls, roots: Int[Tensor, " batch"]) -> DraftTree:
        """No guesses: roots alone, as in plain decoding."""
        return cls(tokens=roots[:, None], parents=torch.full_like(roots, -1)[:, None], depth=0)

    @classmethod
    def of_roots(cls, roots: Sequence[int]) -> DraftTree:
        """No guesses, behind roots that the host knows."""
        known = HostView([[0]] * len(roots), [[-1]] * len(roots), [[root] for root in roots])
        return replace(cls.bare(torch.tensor(roots, dtype=torch.long)), known=known)

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
        nodes = max(map(len, texts), default=1)
        tokens = [[*text, *[-1] * (nodes - len(text))] for text in texts]
        parents = [[*range(-1, len(text) - 1), *[-1] * (nodes - len(text))] for text in texts]
        tokens_of, parents_of = torch.tensor(tokens, dtype=torch.long), torch.tensor(parents, dtype=torch.long)
        if not texts:
            tokens_of, parents_of = tokens_of.view(0, nodes), parents_of.view(0, nodes)
        return cls(tokens_of, parents_of, depth=nodes - 1)

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

    def host(self) -> HostView:
        """Which nodes are read, for the host; where that is not known yet and the tree is on a device, it waits."""
        if self.known is not None:
            return self.known
        # numpy refuses tensors of a device: where the tree is on the CPU nothing can wait here unseen.
        tokens, parents = (
            t.numpy().tolist() if t.device.type == "cpu" else t.tolist() for t in (self.tokens, self.parents)
        )
        nodes = [[i for i, token in enumerate(row) if token >= 0] for row in tokens]
        above, own = (
            [[row[i] for i in keep] for row, keep in zip(rows, nodes, strict=True)] for rows in (parents, tokens)
        )
        return HostView(nodes, above, own)

    def seen_paths(self) -> list[tuple[int, Sequence[int]]] | None:
        """The sequence of every node that is read and the guesses that lead to it, in the order of `read_nodes`.

        None where the host has not seen the guesses.
        """
        known, nodes = self.host(), list[tuple[int, Sequence[int]]]()
        if known.tokens is None:
            return None
        for row, (columns, parents, tokens) in enumerate(zip(known.nodes, known.parents, known.tokens, strict=True)):
            paths: dict[int, tuple[int, ...]] = {}
            for column, parent, token in zip(columns, parents, tokens, strict=True):
                paths[column] = (*paths[parent], token) if parent in paths else ()
            nodes += [(row, path) for path in paths.values()]
        return nodes

    def to(self, device: torch.device) -> DraftTree:
        """The tree on a device, with its host view."""
        if self.known is not None and self.tokens.device == device:
            return self
        known = self.host()
        if self.tokens.device == device:
            return replace(self, known=known)
        tokens, parents = (upload_tensor(t, device) for t in (self.tokens, self.parents))
        return replace(self, tokens=tokens, parents=parents, q=self.q and self.q.to(device), known=known)

    def read_nodes(self) -> Int[Tensor, " rows"]:
        """The nodes that the target reads, in order, numbered through all sequences: the valid ones, unless known."""
        if self.known is None:
            return self.valid.flatten().nonzero()[:, 0]
        columns = self.tokens.shape[1]
        flat = [row * columns + node for row, nodes in enumerate(self.known.nodes) for node in nodes]
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
        """The same guesses, to be judged by `follow`: for trees pruned after their tokens were drawn.

        Nodes that the host has seen are copied to it again; which of the unseen ones are read does not change.
        """
        unseen = self.known is not None and self.known.tokens is None
        return replace(self, q=None, known=self.known if unseen else None)
