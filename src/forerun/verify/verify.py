"""verify: the target's logits on a draft, and the round's draws, become a Verdict.

Decides which rule judges a tree and with which noise. Knows nothing of where logits come from or of what is done with
what was accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.config import Verification
from forerun.kernels.sampling import SamplingKernels
from forerun.sampling.draws import Draws, PathState
from forerun.tree import DraftTree
from forerun.verify.rules import Verdict, block_law, follow, token_law, walk


def verify(tree: DraftTree, logits: Float[Tensor, "rows vocab"], draws: Draws, rule: Verification) -> Verdict:
    """Which guesses become final, and the token after them.

    `logits` has one row per node that is read, batch-major, in node order. Guesses without a law (`tree.q` None) are
    judged by `follow` under every rule. `block` judges chains; on trees it is `token`. For `token` and `block` the
    draws must have been made for rejection, since the drafter must not share the noise of its judge.
    """
    if draws.kernels is not None and draws.pathless and (rule == "coupled" or tree.q is None):
        return _follow_on_host(tree, logits, draws, draws.kernels)
    at = draws.nodes(tree)
    assert len(logits) == len(at.row), f"{len(logits)} rows of logits for {len(at.row)} nodes"
    valid = tree.valid
    if tree.known is None or tree.known.tokens is not None:  # what is read are the valid nodes
        row = torch.where(valid, valid.flatten().long().cumsum(0).view_as(tree.tokens) - 1, 0)
    else:
        read = tree.read_nodes()
        place = torch.arange(len(logits), device=read.device)
        row = torch.zeros_like(tree.tokens).flatten().index_copy_(0, read, place).view_as(tree.tokens)
    if rule == "coupled" or tree.q is None:
        return follow(tree, torch.where(valid, draws.draw(logits, at)[row], -1))
    assert draws.rejection, f"the {rule} rule needs draws made for rejection: coupled noise would be used twice"
    p = draws.probs(logits, at)
    law = block_law(tree, p, row) if rule == "block" and tree.width == 1 else token_law(tree, p, row)
    walked = walk(tree, law, _coins(tree, draws, at, row))
    stop = row.gather(1, walked.node[:, None])[:, 0]
    next_token = draws.recover(law.after[stop].log(), _select(at, stop))
    return Verdict.of(walked.path, walked.length, next_token)


def _follow_on_host(
    tree: DraftTree, logits: Float[Tensor, "rows vocab"], draws: Draws, kernels: SamplingKernels
) -> Verdict:
    """`follow`, by compiled kernels; the tree lies on the CPU, and its draws depend on no path."""
    tokens, parents, laws = tree.tokens.contiguous(), tree.parents.contiguous(), draws.judging_laws
    if laws is not None and logits.dtype == torch.float32:
        judged = kernels.judge(tokens, parents, draws.root_places, logits.contiguous(), laws, tree.depth)
        if judged is not None:
            return Verdict(judged)
    rows, positions = kernels.places(tokens, parents, draws.root_places)
    assert len(logits) == len(rows), f"{len(logits)} rows of logits for {len(rows)} nodes"
    return Verdict(kernels.follow(tokens, parents, draws.choose(logits, rows, positions), tree.depth))


def _coins(
    tree: DraftTree, draws: Draws, at: PathState, row: Int[Tensor, "batch nodes"]
) -> Float[Tensor, "batch nodes"]:
    """Each node's coin: keyed by where its token would stand, and by the token, so that siblings do not share one."""
    above = row.gather(1, tree.parents.clamp_min(0))
    rows = len(at.row)
    home = torch.where(tree.valid, row, rows).flatten()
    parent, token = (row.new_empty(rows + 1).index_copy_(0, home, x.flatten())[:-1] for x in (above, tree.tokens))
    return draws.coins(_select(at, parent), token)[row]


def _select(at: PathState, rows: Int[Tensor, " picked"]) -> PathState:
    return PathState(at.row[rows], at.drawn[rows], at.position[rows])
