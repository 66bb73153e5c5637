"""Generates draft trees from a model's logits, level by level, for many sequences with different budgets.

`grow` grows the trees of a round together: each level is one pass of the model over the new nodes of all sequences. A
chain is a tree of width 1. A draft model reads the nodes (`LevelReader`); heads and blocks compute the logits after any
of their tokens without another pass (`grow_by_heads`). `tree_shape.py` decides which nodes get children.

`unseen_chains` generates chains on a device without copying a token to the host. Budgets alone decide where the chains
end, so the host can prepare slots, positions and tables of all steps in advance. The tokens stay on the device, from
one step's sampling to the next step's pass and on to the target's pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.device import upload, upload_tensor
from forerun.draft.base import NO_DRAFT, Budget, Draft
from forerun.draft.model.drafted_text import DraftedText, starts_of
from forerun.draft.model.tree_shape import GrowingTree, Ranks
from forerun.models.chains import Chains, ChainStart, HeadInputs, IdMap, OfNextToken
from forerun.models.runner import DeviceTokens, Read
from forerun.sampling.draws import Draws, PathState
from forerun.tree import DraftLaw, DraftTree, HostTree, padded, survival_of


class NodeToExpand(NamedTuple):
    """A node about to get children of these ranks; `row` is the row of its tree in the round."""

    row: int
    node: int
    ranks: Ranks
    growing: GrowingTree

    def path(self) -> list[int]:
        """The draft tokens on the path to the node, without the root."""
        return self.growing.along(self.growing.tree.tokens, self.node)


# Returns the logits after the nodes of one level, which are ordered by row; None if the cache is full. A node that was
# read may be missing in the final tree.
ReadNodes = Callable[[Sequence[NodeToExpand]], Tensor | None]
Confidence = Callable[[Sequence[NodeToExpand]], Sequence[float]]


def grow(
    draws: Draws,
    budgets: Sequence[Budget],
    logits: Float[Tensor, "drafted vocab"] | None,
    read: ReadNodes,
    confidence: Confidence | None = None,
) -> Draft:
    """Grow one tree per sequence of `draws`, within its budget.

    `logits` are those after the roots of the rows with a depth above 0, in order; without them `read` is called for the
    roots too. Growing takes at most depth - 1 further passes. In coupled mode a tree has the `nodes` most likely paths,
    by survival under the round's noise, above the minimum. In rejection modes it has the distributions that its tokens
    were sampled from. The draft has survival estimates if any budget has a minimum or a width above 1.

    `confidence` returns, for each of these nodes, the drafter's own estimate of the probability that its first child is
    accepted. Without it the estimate is the probability with which the child is sampled.
    """
    coupled = not draws.rejection
    roots = [HostTree([row.tokens[-1]], [-1], survival=[1.0], law_rows=[-1]) for row in draws.rows]
    growing = [GrowingTree(budget, coupled, root) for budget, root in zip(budgets, roots, strict=True)]
    draws.prepare_noise(max((budget.depth for budget in budgets), default=0))
    laws: list[Tensor] = []
    # Survival is computed only if a tree's shape depends on it: for a large vocabulary it costs more than sampling.
    survival = any(budget.width > 1 or budget.min_survival > 0 for budget in budgets)
    places = next_places(growing)
    while places:
        logits = read(places) if logits is None else logits
        if logits is None:
            break
        draw_level(draws, places, logits, laws, confidence, survival)
        places, logits = next_places(growing), None
    return assemble(draws, growing, laws, survival)


def next_places(growing: Sequence[GrowingTree]) -> list[NodeToExpand]:
    """The nodes that get children on the next level, ordered by row."""
    return [
        NodeToExpand(row, node, ranks, each)
        for row, each in enumerate(growing)
        for node, ranks in each.extend().items()
    ]


def draw_level(
    draws: Draws,
    places: Sequence[NodeToExpand],
    logits: Float[Tensor, "places vocab"],
    laws: list[Tensor],
    confidence: Confidence | None,
    survival: bool,
) -> None:
    """Sample the children of these nodes and add them to their trees."""
    rows = [place.row for place in places]
    paths = [place.path() for place in places]
    width = 1 + max(place.ranks[-1] for place in places)
    offer = draws.offer(logits, rows, paths, width, survival=survival)
    chances = offer.survival
    if chances is not None and confidence is not None:
        firsts = confidence(places)
        chances = [with_first(row_chances, first) for row_chances, first in zip(chances, firsts, strict=True)]
    first_law, greedy = sum(map(len, laws)), draws.greedy if draws.rejection else ()
    if offer.law is not None:
        laws.append(offer.law)
    for i, (row, node, ranks, each) in enumerate(places):
        if offer.law is not None and has_all_siblings(ranks) and not greedy[row]:
            each.tree.law_rows[node] = first_law + i
        for rank in ranks:
            if (token := offer.tokens[i][rank]) >= 0:
                each.add(node, rank, token, 1.0 if chances is None else chances[i][rank])


def with_first(chances: Sequence[float], first: float) -> list[float]:
    """The probabilities of a node's children with the first replaced by `first` and the others rescaled."""
    scale = (1.0 - first) / (1.0 - chances[0]) if chances[0] < 1.0 else 0.0
    return [first, *(scale * chance for chance in chances[1:])]


def has_all_siblings(ranks: Ranks) -> bool:
    """Whether every sampled sibling stays in the tree, so that rejection rules may use their distribution."""
    return len(ranks) == 1 + ranks[-1]


def assemble(draws: Draws, growing: Sequence[GrowingTree], laws: Sequence[Tensor], survival: bool) -> Draft:
    """The trees as one draft; `laws` are the distributions of the rejection modes, packed."""
    trees = [each.finished() for each in growing]
    tree = DraftTree.of_hosts(trees, max(each.budget.width for each in growing)).to(draws.device)
    if laws:
        law_rows = padded([tree.law_rows for tree in trees])
        tree = replace(tree, q=DraftLaw(upload_tensor(law_rows, draws.device), torch.cat(list(laws))))
    return Draft(tree, upload_tensor(survival_of(trees), draws.device) if survival else None)


ReadAll = Callable[[Sequence[Read]], Tensor | None]  # returns the requested logits; None if the cache is full


class LevelReader:
    """Reads nodes for `grow`, and numbers them in the sequences' tails.

    The root is the last node of a tail; without a tail it is the last token of the committed text, numbered -1.
    """

    def __init__(self, sequences: Mapping[int, DraftedText], read: ReadAll, ids: IdMap, seq_ids: Sequence[int]) -> None:
        self.sequences = sequences
        self.read = read
        self.ids = ids
        self.seq_ids = seq_ids
        self.numbers = {(row, 0): len(sequences[s].tail) - 1 for row, s in enumerate(seq_ids) if s in sequences}

    def __call__(self, places: Sequence[NodeToExpand]) -> Tensor | None:
        """The logits after the nodes, in their order; None if the cache is full."""
        model_ids = self.ids.model_id_list([each.tree.tokens[node] for _, node, _, each in places])
        parents = [self.numbers[row, each.tree.parents[node]] for row, node, _, each in places]
        reads = []
        for row, group in groupby(range(len(places)), key=lambda i: places[i].row):
            nodes = list(group)
            tokens = [max(0, model_ids[i]) for i in nodes]
            branches, budget = [parents[i] for i in nodes], places[nodes[0]].growing.budget
            if budget.width == 1:  # a read without parents continues the chain
                reads.append(Read(self.seq_ids[row], tokens, judged=range(len(nodes))))
            else:
                reads.append(Read(self.seq_ids[row], tokens, branches, range(len(nodes)), budget.depth - 1))
        logits = self.read(reads)
        if logits is None:
            return None
        for place, token, parent in zip(places, model_ids, parents, strict=True):
            drafted = self.sequences[self.seq_ids[place.row]]
            self.numbers[place.row, place.node] = drafted.add(parent, token)
        return logits


ReadUnseen = Callable[[Sequence[Read], DeviceTokens], Tensor | None]  # returns the logits; None if the cache is full


def unseen_chains(
    draws: Draws, starts: Sequence[ChainStart], logits: Float[Tensor, "starts vocab"], read: ReadUnseen
) -> Chains:
    """A chain for each start, to its depth, or shorter if the cache is full. `logits` are those after the roots."""
    batch, deepest = len(draws.rows), max(start.depth for start in starts)
    draft_tokens = torch.full((batch, deepest), -1, dtype=torch.long, device=draws.device)
    counts, law_rows, greedy = [0] * batch, [[-1] * (1 + deepest) for _ in range(batch)], draws.greedy
    chains = Chains([], {}, draft_tokens=draft_tokens)
    active = list(starts)
    roots, rows = draws.roots(), upload([start.row for start in active], torch.long, draws.device)
    at = PathState(roots.row[rows], roots.drawn[rows], roots.position[rows])
    for level in range(deepest):
        children = draws.children(logits, at, 1, survival=False)
        rows = upload([start.row for start in active], torch.long, draws.device)
        draft_tokens[rows, level] = children.tokens[:, 0]
        first_law = sum(map(len, chains.laws))
        for i, start in enumerate(active):
            counts[start.row] = level + 1
            if children.law is not None and not greedy[start.row]:
                law_rows[start.row][level] = first_law + i
        if children.law is not None:
            chains.laws.append(children.law)
        deeper = [i for i, start in enumerate(active) if start.depth > level + 1]
        if not deeper:
            break
        kept = upload(deeper, torch.long, draws.device)
        at = draws.advance(at, kept, children.tokens[kept, 0].clamp_min(0))
        active = [active[i] for i in deeper]
        source = [start.row * deepest + level for start in active]
        reads = [Read(start.seq_id, [-1], judged=[0]) for start in active]
        next_logits = read(reads, DeviceTokens(draft_tokens, source))
        if next_logits is None:
            break
        logits = next_logits
        chains.num_read |= {start.seq_id: level + 1 for start in active}
    chains.trees = [replace(HostTree.unseen(n), law_rows=laws) for n, laws in zip(counts, law_rows, strict=True)]
    return chains


# The inputs of heads for the next draft tokens of these sequences, at this level; a sequence may occur several times.
InputsOf = Callable[[Sequence[int], int], HeadInputs]
DrawInOneCall = Callable[[Sequence[ChainStart]], Chains | None]


def packed_inputs(
    granted: Mapping[int, Budget], logits: Float[Tensor, "places vocab"], states: Tensor | None = None
) -> InputsOf:
    """The inputs of heads from the logits and states at all draft tokens of these budgets, packed by sequence."""
    firsts = dict(zip(granted, accumulate((b.depth for b in granted.values()), initial=0), strict=False))

    def inputs(seq_ids: Sequence[int], level: int) -> HeadInputs:
        at = upload([[firsts[seq_id] + level] for seq_id in seq_ids], torch.long, logits.device)
        return HeadInputs(None, logits[at], None if states is None else states[at])

    return inputs


def grow_by_heads(
    draws: Draws,
    granted: Mapping[int, Budget],
    logits: OfNextToken,
    inputs: InputsOf,
    unseen: bool,
    draw: DrawInOneCall | None = None,
    confidence: OfNextToken | None = None,
) -> Draft:
    """Grow trees for these sequences by heads, without passes.

    With `unseen`, on a device, the tokens of chains are not copied to the host, if possible. `granted` and `confidence`
    are as in `grow`. The draft's `pass_s` is the time in `logits`.
    """
    if unseen and (draft := unseen_by_heads(draws, granted, logits, inputs, draw)) is not None:
        return draft
    pass_s = 0.0

    def of_places(of_next: OfNextToken, places: Sequence[NodeToExpand]) -> Tensor:
        rows = [draws.rows[place.row] for place in places]
        paths = [[row.tokens[-1], *place.path()] for row, place in zip(rows, places, strict=True)]
        head_inputs = inputs([row.seq_id for row in rows], len(paths[0]) - 1)
        return of_next(head_inputs, upload(paths, torch.long, draws.device))

    def read(places: Sequence[NodeToExpand]) -> Tensor:
        nonlocal pass_s
        started_s = time.perf_counter()
        next_logits = of_places(logits, places)
        pass_s += time.perf_counter() - started_s
        return next_logits

    def estimates(places: Sequence[NodeToExpand]) -> Sequence[float]:
        assert confidence is not None, "called without a confidence head"
        chances: list[float] = of_places(confidence, places).tolist()
        return chances

    budgets = [granted.get(seq_id, NO_DRAFT) for seq_id in draws.seq_ids]
    return replace(grow(draws, budgets, None, read, estimates if confidence else None), pass_s=pass_s)


def unseen_by_heads(
    draws: Draws, granted: Mapping[int, Budget], logits: OfNextToken, inputs: InputsOf, draw: DrawInOneCall | None
) -> Draft | None:
    """Chains by heads that are sampled on a device, in one call of `draw` if it supports them.

    None if the host needs each token: for trees, a minimum survival, and requests with logits processors.
    """
    if any(budget.width > 1 or budget.min_survival for budget in granted.values()):
        return None
    if any(row.params.logits_processors for row in draws.rows):
        return None
    starts = starts_of(draws, granted)
    if draw is not None and (chains := draw(starts)) is not None:
        return Draft(chains.tree(draws), None)
    deepest, roots = max(start.depth for start in starts), draws.roots_tokens[:, None]

    def read(reads: Sequence[Read], drawn: DeviceTokens) -> Tensor:
        at = upload([place // deepest for place in drawn.source], torch.long, draws.device)
        level = 1 + drawn.source[0] % deepest
        path = torch.cat([roots[at], drawn.tokens[at, :level].clamp_min(0)], dim=1)
        return logits(inputs([read.seq_id for read in reads], level), path)

    first = roots[upload([start.row for start in starts], torch.long, draws.device)]
    chains = unseen_chains(draws, starts, logits(inputs([*granted], 0), first), read)
    return Draft(chains.tree(draws), None)
