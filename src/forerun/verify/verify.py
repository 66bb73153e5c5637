"""verify: turns the target's logits for a draft tree into a Verdict.

This file decides which rule verifies a tree and which noise it uses. The engine computes the logits, and `accept` makes
the verdict final.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Bool, Float, Int
from forerun.config import Verification
from forerun.device import upload
from forerun.models.runner import Judged, TreeRule
from forerun.sampling.draws import Draws, PathState
from forerun.tree import DraftTree
from forerun.verify.rules import AcceptLaw, Verdict, block_law, follow, token_law, walk

TreeJudge = Callable[[Draws, DraftTree, Float[Tensor, "rows vocab"], TreeRule], Judged | None]


def verify(
    tree: DraftTree,
    logits: Float[Tensor, "rows vocab"],
    draws: Draws,
    rule: Verification,
    judge: TreeJudge | None = None,
) -> Verdict:
    """Decide which draft tokens are accepted, and sample the token after them.

    `logits` has one row per node that the target has read, batch-major, in node order. A sequence whose draft tokens
    were not sampled from a declared `tree.q` is verified by `follow` under every rule, with the noise of plain
    decoding. `block` applies to chains; on trees it is `token`. Each sequence's verdict is independent of the others.
    For `token` and `block` the draws must have been made with `rejection`, since drafter and verification must not
    share noise. `judge`, if given, computes `follow` in one call on a device, or returns None.
    """
    if rule != "coupled" and tree.tokens.device != draws.device:
        tree = tree.to(draws.device)
    has_law = None if rule == "coupled" else tree.rows_with_law()
    if has_law is None and (packed := draws.verdict(tree, logits)) is not None:  # `draw` and `follow`, compiled
        return Verdict(packed)
    if has_law is None and judge is not None and (judged := judge(draws, tree, logits, follow_packed)) is not None:
        return Verdict(judged.packed, judged.ranked)
    tree = tree if tree.tokens.device == draws.device else tree.to(draws.device)
    at = draws.nodes(tree)
    assert len(logits) == len(at.row), f"{len(logits)} rows of logits for {len(at.row)} nodes"
    valid = tree.valid
    if tree.unseen:
        read = tree.read_nodes()
        place = torch.arange(len(logits), device=read.device)
        row = torch.zeros_like(tree.tokens).flatten().index_copy_(0, read, place).view_as(tree.tokens)
    else:  # the nodes that are read are the valid ones
        row = torch.where(valid, valid.flatten().long().cumsum(0).view_as(tree.tokens) - 1, 0)
    if has_law is None:
        return follow(tree, torch.where(valid, draws.draw(logits, at)[row], -1))
    assert draws.rejection, f"the {rule} rule needs Draws(rejection=True): coupled noise would be used twice"
    law = _accept_law(tree, draws.probs(logits, at), at, row, rule)
    walked = walk(tree, law, _coins(tree, draws, at, row))
    stop = row.gather(1, walked.node[:, None])[:, 0]
    rejected = Verdict.of(walked.path, walked.length, draws.recover(law.after[stop].log(), _select(at, stop)))
    drawn = _drawn_where(~has_law, logits, at, draws)
    if drawn is None:
        return rejected
    followed = follow(tree, torch.where(valid, drawn[row], -1))
    return Verdict(torch.where(has_law[:, None], rejected.packed, followed.packed))


def follow_packed(tree: DraftTree, drawn: Int[Tensor, "batch nodes"]) -> Int[Tensor, "batch verdict"]:
    """The verdict of `follow` as one tensor."""
    return follow(tree, drawn).packed


def _accept_law(
    tree: DraftTree, p: Float[Tensor, "rows vocab"], at: PathState, row: Int[Tensor, "batch nodes"], rule: Verification
) -> AcceptLaw:
    """The AcceptLaw of each sequence by the rule: `block` for sequences of width 1, else `token`."""
    if rule == "block" and tree.width == 1:
        return block_law(tree, p, row)
    law = token_law(tree, p, row)
    widths = tree.widths or ()
    if rule == "token" or 1 not in widths:
        return law
    chains = upload([[width == 1] for width in widths], torch.bool, p.device)
    only_chains = replace(tree, parents=torch.where(chains, tree.parents, -1), width=1)
    block = block_law(only_chains, p, row)
    return AcceptLaw(
        accept=torch.where(chains, block.accept, law.accept),
        after=torch.where(chains[at.row], block.after, law.after),
        row=row,
        last_success=chains,
    )


def _drawn_where(
    selected: Bool[Tensor, " batch"], logits: Float[Tensor, "rows vocab"], at: PathState, draws: Draws
) -> Int[Tensor, " rows"] | None:
    """The target's sample after each node of the selected sequences; None if the host knows that there is none."""
    if not draws.on_host:  # selecting nodes would wait for the device
        return draws.draw(logits, at)
    nodes = torch.from_numpy(np.flatnonzero(selected[at.row].numpy()))
    if not len(nodes):
        return None
    drawn = torch.full_like(at.row, -1)
    return drawn.index_copy_(0, nodes, draws.draw(logits[nodes], _select(at, nodes)))


def _coins(
    tree: DraftTree, draws: Draws, at: PathState, row: Int[Tensor, "batch nodes"]
) -> Float[Tensor, "batch nodes"]:
    """A uniform number per node, keyed by its position and token, so that siblings have different ones."""
    parent_row = row.gather(1, tree.parents.clamp_min(0))
    rows = len(at.row)
    target = torch.where(tree.valid, row, rows).flatten()
    parent, token = (
        row.new_empty(rows + 1).index_copy_(0, target, values.flatten())[:-1] for values in (parent_row, tree.tokens)
    )
    return draws.coins(_select(at, parent), token)[row]


def _select(at: PathState, rows: Int[Tensor, " picked"]) -> PathState:
    return PathState(at.row[rows], at.drawn[rows], at.position[rows])
