"""The three verification rules: follow, token and block.

This file decides which draft tokens are accepted, and the distribution of the token after them. The rules are pure
functions of tensors: sampled tokens, the laws (probability distributions) `p` and `q` and the uniform numbers are
arguments, nothing synchronises with a device, and every function computes in the dtype of `p`. So the exactness tests
enumerate the same functions in float64 that serve requests in float32.

Laws are packed: `p` has one row per verified node, and `row[b, i]` is the row of node i of sequence b.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.annotations import Bool, Float, Int
from forerun.device import Download, running_sum
from forerun.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verification: the accepted path and the token after it, packed for one copy to the host.

    `path` holds the accepted nodes from the root down, then -1; `length` counts the accepted draft tokens (without the
    root); `next_token` is the recovered token after a rejection, the bonus token after a full path. `ranked` are the
    log-probabilities (`sampling.logprobs`) of the token after each node that was read, if they were computed.
    `download` is the copy to the host if it has been started.
    """

    packed: Int[Tensor, "batch verdict"]  # length, next token, path
    ranked: Float[Tensor, "rows numbers"] | None = None
    download: Download | None = None

    @classmethod
    def of(
        cls, path: Int[Tensor, "batch path"], length: Int[Tensor, " batch"], next_token: Int[Tensor, " batch"]
    ) -> Verdict:
        """The verdict with these parts."""
        return cls(torch.cat([length[:, None], next_token[:, None], path], dim=1))

    @property
    def path(self) -> Int[Tensor, "batch path"]:
        return self.packed[:, 2:]

    @property
    def length(self) -> Int[Tensor, " batch"]:
        return self.packed[:, 0]

    @property
    def next_token(self) -> Int[Tensor, " batch"]:
        return self.packed[:, 1]


@dataclass(frozen=True, slots=True)
class Walk:
    """An accepted path whose next token is still to be sampled: `node` is its last node."""

    path: Int[Tensor, "batch path"]
    length: Int[Tensor, " batch"]
    node: Int[Tensor, " batch"]


@dataclass(frozen=True, slots=True)
class AcceptLaw:
    """The acceptance probability of each node, and the distribution of the next token if the path ends there.

    `accept[b, i]` by the token rule: P(node i accepted | its parent accepted, its earlier siblings rejected); the path
    ends at the first failure. By the block rule: the success probability of node i's own coin; the path ends at the
    deepest success, whatever failed before it (`last_success`, which may differ by sequence). 0 for roots and padding.
    `after[row[b, i]]` is the law of the next token if the path ends at node i.
    """

    accept: Float[Tensor, "batch nodes"]
    after: Float[Tensor, "rows vocab"]
    row: Int[Tensor, "batch nodes"]
    last_success: bool | Bool[Tensor, "batch 1"]


def follow(tree: DraftTree, drawn: Int[Tensor, "batch nodes"]) -> Verdict:
    """Accept the draft tokens that equal the target's own samples.

    `drawn[b, i]` is the target's sample after node i, which does not depend on the draft tokens below i. Lossless for
    any draft of any length, since every output token is the target's own sample; no `q` is needed.
    """
    match = tree.tokens == drawn.gather(1, tree.parents.clamp_min(0))
    walked = _descend(tree, match)
    return Verdict.of(walked.path, walked.length, drawn.gather(1, walked.node[:, None])[:, 0])


def token_law(tree: DraftTree, p: Float[Tensor, "rows vocab"], row: Int[Tensor, "batch nodes"]) -> AcceptLaw:
    """Verify draft tokens one by one: speculative sampling; on trees, recursive rejection without replacement.

    A child t is accepted with probability min(1, P(t)/Q(t)); after a rejection, P becomes norm([P - Q]+), and t is
    removed from Q. P starts as `p`, Q as `tree.q`. For a child that was not sampled (`tree.q.row` is -1, or Q has no
    support left) Q is the point mass at the child. Lossless if the tokens were sampled from `tree.q`. Leviathan et al.
    2211.17192, Chen et al. 2302.01318; trees: RSD, Jeon et al. 2402.14160.
    """
    children = _packed_children(tree, p, row)
    residual, q = p, children.q
    accept = p.new_zeros(tree.tokens.numel() + 1)
    for rank in range(tree.width):
        token = children.token[:, rank, None]
        probability, after_rejection = _accept_or_residual(residual, q, token, children.drawn)
        accept.index_copy_(0, children.node[:, rank], probability)
        residual = torch.where(token >= 0, after_rejection, residual)
        q = _without_replacement(q, token) if rank + 1 < tree.width else q
    return AcceptLaw(accept[:-1].view_as(tree.parents), residual, row, last_success=False)


def block_law(tree: DraftTree, p: Float[Tensor, "rows vocab"], row: Int[Tensor, "batch nodes"]) -> AcceptLaw:
    """Verify a chain jointly: an unlikely draft token may be accepted because of the draft tokens after it.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)), the coin of node i succeeds with probability
    S_i / (S_i + 1 - w_i), where S_i = sum [w_i p_i - q_i]+, or w_i at the chain's end; the token after node i is
    sampled from norm([w_i p_i - q_i]+). Chains only. Never accepts fewer tokens on average than `token_law`, and is
    lossless under the same condition. Sun et al. 2403.10444, algorithm 2.
    """
    assert tree.width == 1, f"block verification judges chains, not a tree of width {tree.width}"
    children = _packed_children(tree, p, row)
    token = children.token
    px, qx = _at(p, token), _at(children.q, token)
    is_point = ~children.drawn | (qx <= 0)  # Q is the point mass at the child
    weight = _weights(tree, children, px, torch.where(is_point, 1.0, qx))
    w = _pack(weight, tree, row, len(p))[:, None]
    scaled = w * p
    residual = torch.where(is_point, _without(scaled, token), (scaled - children.q).clamp_min(0))
    mass = _total(residual)
    denominator = mass + 1 - w
    success = torch.where(denominator == 0, 1.0, mass / denominator).clamp_max(1)  # if p has NaN, nothing is accepted
    success = torch.where(token >= 0, success, w)
    after = torch.where(token >= 0, _normalised(residual, mass, p), p)
    accept = torch.where(tree.parents >= 0, success[:, 0][row.clamp_min(0)], 0.0)
    return AcceptLaw(accept, after, row, last_success=True)


def walk(tree: DraftTree, law: AcceptLaw, uniform: Float[Tensor, "batch nodes"]) -> Walk:
    """The accepted path: a node succeeds if its `uniform` number is below its acceptance probability.

    `uniform` is in [0, 1): probability 0 never succeeds, probability 1 always. Siblings are tried in draw order.
    """
    success = (uniform < law.accept) & (tree.parents >= 0)
    if law.last_success is not False:  # on a chain an accepted node accepts all nodes before it
        deepest = success.flip(1).long().cumsum(1).flip(1) > 0
        success = deepest if law.last_success is True else torch.where(law.last_success, deepest, success)
    return _descend(tree, success)


def _descend(tree: DraftTree, chosen: Bool[Tensor, "batch nodes"]) -> Walk:
    """The path from each root down, at every node to its first chosen child."""
    batch, nodes = tree.parents.shape
    node = torch.arange(nodes, device=tree.parents.device).expand(batch, nodes)
    below = node.new_full((batch, nodes + 1), nodes)  # column `nodes` stands for "no further"
    above = torch.where(chosen & (tree.parents >= 0), tree.parents, nodes)
    below.scatter_reduce_(1, above, node, "amin")
    below[:, nodes] = nodes
    reached = [node.new_zeros(batch, 1)]
    for _ in range(tree.depth):
        reached.append(below.gather(1, reached[-1]))
    path = torch.cat(reached, dim=1)
    length = (path < nodes).sum(1) - 1
    stop = path.gather(1, length[:, None])[:, 0]
    return Walk(torch.where(path < nodes, path, -1), length, stop)


@dataclass(frozen=True, slots=True)
class _PackedChildren:
    """For each packed row the children of its node, in draw order, and the law that they were sampled from."""

    node: Int[Tensor, "rows width"]  # index into the flattened nodes; missing children have the index after the last
    token: Int[Tensor, "rows width"]  # -1 for missing children
    q: Float[Tensor, "rows vocab"]
    drawn: Bool[Tensor, "rows 1"]  # whether the children were sampled; else they were chosen deterministically


def _packed_children(
    tree: DraftTree, p: Float[Tensor, "rows vocab"], row: Int[Tensor, "batch nodes"]
) -> _PackedChildren:
    batch, nodes = tree.parents.shape
    rows, vocab = p.shape
    first = torch.arange(batch, device=row.device)[:, None, None] * nodes
    children = tree.children()
    node = _pack(torch.where(children >= 0, children + first, -1), tree, row, rows)
    token = torch.where(node >= 0, tree.tokens.flatten()[node.clamp_min(0)], -1)
    node = torch.where(node >= 0, node, batch * nodes)
    if tree.q is None or len(tree.q.probs) == 0:
        return _PackedChildren(node, token, torch.zeros_like(p), torch.zeros_like(node[:, :1], dtype=torch.bool))
    source = _pack(tree.q.row, tree, row, rows)
    q = tree.q.dense(vocab).to(p.dtype)[source.clamp_min(0)]
    return _PackedChildren(node, token, q, source[:, None] >= 0)


def _pack(values: Tensor, tree: DraftTree, row: Int[Tensor, "batch nodes"], rows: int) -> Tensor:
    """Values of nodes [batch, nodes, ...] moved to their packed rows [rows, ...]; -1 in rows without a node."""
    target = torch.where(tree.valid, row, rows).flatten()
    packed = values.new_full((rows + 1, *values.shape[2:]), -1)
    return packed.index_copy_(0, target, values.flatten(0, 1))[:rows]


def _accept_or_residual(
    p: Float[Tensor, "rows vocab"],
    q: Float[Tensor, "rows vocab"],
    token: Int[Tensor, "rows 1"],
    drawn: Bool[Tensor, "rows 1"],
) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows vocab"]]:
    """P(token accepted), and the residual law after its rejection."""
    px, qx = _at(p, token), _at(q, token)
    is_point = ~drawn | (qx <= 0)  # Q is the point mass at the token
    probability = (px / torch.where(is_point, 1.0, qx)).clamp_max(1)
    residual = torch.where(is_point, _without(p, token), (p - q).clamp_min(0))
    return probability[:, 0], _normalised(residual, _total(residual), p)


def _weights(
    tree: DraftTree, children: _PackedChildren, px: Float[Tensor, "rows 1"], qx: Float[Tensor, "rows 1"]
) -> Float[Tensor, "batch nodes"]:
    """The block rule's w of every node; the minimum is taken at each step, not of the joint ratio."""
    child, empty = children.node[:, 0], px.new_ones(tree.parents.numel() + 1)
    own_p = empty.index_copy(0, child, px[:, 0])[:-1].view_as(tree.parents)  # p of node i's own token
    own_q = empty.index_copy(0, child, qx[:, 0])[:-1].view_as(tree.parents)
    weight = torch.ones_like(own_p)
    for _ in range(tree.depth):
        above = weight.gather(1, tree.parents.clamp_min(0))
        weight = torch.where(tree.parents >= 0, _min_ratio(above * own_p, own_q), 1.0)
    return weight


def _min_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator / denominator).clamp_max(1)


def _at(law: Float[Tensor, "rows vocab"], token: Int[Tensor, "rows 1"]) -> Float[Tensor, "rows 1"]:
    return law.gather(1, token.clamp_min(0))


def _without(law: Float[Tensor, "rows vocab"], token: Int[Tensor, "rows 1"]) -> Float[Tensor, "rows vocab"]:
    """The law with the token's probability set to 0; not normalised."""
    return law.scatter(1, token.clamp_min(0), torch.where(token >= 0, 0.0, _at(law, token)).to(law.dtype))


def _without_replacement(q: Float[Tensor, "rows vocab"], token: Int[Tensor, "rows 1"]) -> Float[Tensor, "rows vocab"]:
    """The law of the next sibling after `token`, sampled without replacement; all zero if no support is left."""
    rest = _without(q, token)
    return _normalised(rest, _total(rest), rest)


def _total(residual: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows 1"]:
    return running_sum(residual)[:, -1:]  # the bits of torch.sum depend on the other rows


def _normalised(
    residual: Float[Tensor, "rows vocab"], mass: Float[Tensor, "rows 1"], fallback: Float[Tensor, "rows vocab"]
) -> Float[Tensor, "rows vocab"]:
    """The normalised residual; `fallback` if rounding has left no mass, which happens only if nothing is rejected."""
    has_mass = mass > 0
    return torch.where(has_mass, residual / torch.where(has_mass, mass, 1.0), fallback)
