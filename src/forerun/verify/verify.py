"""verify: turns the target's logits for a draft tree into a Verdict.

This file decides which rule judges a tree and with which noise. The engine computes the logits, and `accept` acts on
the verdict.
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
    """Which draft tokens are accepted, and the token after them.

    `logits` has one row per node that is read, batch-major, in node order. Sequences without draft tokens sampled from
    a declared `tree.q` are judged by `follow` under every rule, with the noise of plain decoding. `block` judges
    chains; on trees it is `token`. Each sequence's verdict is independent of the others. For `token` and `block` the
    draws must have been made for rejection, since drafter and verification must not share noise. `judge` does the same
    as `follow` in one call on a device, where it can.
    """
    if rule != "coupled" and tree.tokens.device != draws.device:
        tree = tree.to(draws.device)
    lawful = None if rule == "coupled" else tree.rows_with_law()
    if lawful is None and (packed := draws.verdict(tree, logits)) is not None:  # `follow`, compiled with its draws
        return Verdict(packed)
    if lawful is None and judge is not None and (judged := judge(draws, tree, logits, follow_packed)) is not None:
        return Verdict(judged.packed, judged.ranked)
    tree = tree if tree.tokens.device == draws.device else tree.to(draws.device)
    at = draws.nodes(tree)
    assert len(logits) == len(at.row), f"{len(logits)} rows of logits for {len(at.row)} nodes"
    valid = tree.valid
    if tree.unseen:
        read = tree.read_nodes()
        place = torch.arange(len(logits), device=read.device)
        row = torch.zeros_like(tree.tokens).flatten().index_copy_(0, read, place).view_as(tree.tokens)
    else:  # what is read are the valid nodes
        row = torch.where(valid, valid.flatten().long().cumsum(0).view_as(tree.tokens) - 1, 0)
    if lawful is None:
        return follow(tree, torch.where(valid, draws.draw(logits, at)[row], -1))
    assert draws.rejection, f"the {rule} rule needs draws made for rejection: coupled noise would be used twice"
    law = _accept_law(tree, draws.probs(logits, at), at, row, rule)
    walked = walk(tree, law, _coins(tree, draws, at, row))
    stop = row.gather(1, walked.node[:, None])[:, 0]
    rejected = Verdict.of(walked.path, walked.length, draws.recover(law.after[stop].log(), _select(at, stop)))
    drawn = _drawn_where(~lawful, logits, at, draws)
    if drawn is None:
        return rejected
    followed = follow(tree, torch.where(valid, drawn[row], -1))
    return Verdict(torch.where(lawful[:, None], rejected.packed, followed.packed))


def follow_packed(tree: DraftTree, drawn: Int[Tensor, "batch nodes"]) -> Int[Tensor, "batch verdict"]:
    """The verdict of `follow` as one tensor."""
    return follow(tree, drawn).packed


def _accept_law(
    tree: DraftTree, p: Float[Tensor, "rows vocab"], at: PathState, row: Int[Tensor, "batch nodes"], rule: Verification
) -> AcceptLaw:
    """The rule's AcceptLaw of each sequence, independent of the others: `block` judges those of width 1."""
    if rule == "block" and tree.width == 1:
        return block_law(tree, p, row)
    law = token_law(tree, p, row)
    widths = tree.widths or ()
    if rule == "token" or 1 not in widths:
        return law
    chains = upload([[width == 1] for width in widths], torch.bool, p.device)
    alone = replace(tree, parents=torch.where(chains, tree.parents, -1), width=1)
    block = block_law(alone, p, row)
    return AcceptLaw(
        accept=torch.where(chains, block.accept, law.accept),
        after=torch.where(chains[at.row], block.after, law.after),
        row=row,
        last_success=chains,
    )


def _drawn_where(
    wanted: Bool[Tensor, " batch"], logits: Float[Tensor, "rows vocab"], at: PathState, draws: Draws
) -> Int[Tensor, " rows"] | None:
    """The target's sample after the nodes of these sequences; None if the host knows that there are none."""
    if not draws.on_host:  # to know which nodes these are it would be waited for
        return draws.draw(logits, at)
    nodes = torch.from_numpy(np.flatnonzero(wanted[at.row].numpy()))
    if not len(nodes):
        return None
    drawn = torch.full_like(at.row, -1)
    return drawn.index_copy_(0, nodes, draws.draw(logits[nodes], _select(at, nodes)))


def _coins(
    tree: DraftTree, draws: Draws, at: PathState, row: Int[Tensor, "batch nodes"]
) -> Float[Tensor, "batch nodes"]:
    """Each node's uniform number, keyed by position and token, so that siblings have different ones."""
    above = row.gather(1, tree.parents.clamp_min(0))
    rows = len(at.row)
    home = torch.where(tree.valid, row, rows).flatten()
    parent, token = (row.new_empty(rows + 1).index_copy_(0, home, x.flatten())[:-1] for x in (above, tree.tokens))
    return draws.coins(_select(at, parent), token)[row]


def _select(at: PathState, rows: Int[Tensor, " picked"]) -> PathState:
    return PathState(at.row[rows], at.drawn[rows], at.position[rows])
