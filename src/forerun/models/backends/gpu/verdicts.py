"""VerdictGraph: the sampling and verification of a round as one captured CUDA graph.

This module decides which rounds it serves, and in which sizes. Launched one by one, the small kernels of a verdict take
the host longer than a small target takes to compute. The graph gives the same bits as `verify`: it runs the same tensor
functions, `Draws.draw` and the rule, over tables that are filled in one copy.

`verify` handles the other rounds: requests with logits processors, which are Python; rejection modes, which need the
drafter's laws; grammars over draft tokens that the host does not know; rounds of more than MOST_ROWS nodes; and tables
that would be too large: over MOST_IDS biased ids, counted ids, end tokens or tokens of banned words in a row, or deep
drafts with so many counted ids that comparing them takes more than MOST_PAIRS rows of logits for each node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.device import PackedTables
from forerun.models.backends.gpu.capture import Graphs, KeptShapes
from forerun.models.rows import power_of_two
from forerun.models.runner import Judged, TreeRule
from forerun.sampling.constraint import constrained
from forerun.sampling.draws import Draws
from forerun.sampling.logprobs import ranked
from forerun.sampling.noise import Purpose, signed
from forerun.sampling.params import MOST_LOGPROBS
from forerun.sampling.tables import RoundTables, Steps
from forerun.sampling.transforms import PathState, Transforms, masks_of
from forerun.sampling.winners import FEW
from forerun.tree import DraftTree

MOST_ROWS = 192  # nodes of a round that a graph verifies
ROWS_AT_ONCE = 32  # rows that are sampled at a time, which bounds the memory of their tensors
WORK = 16  # memory for those, in units of their logits: at most 11 in tensors, and the work space of torch's sort
SPARE = 8  # a round is padded to a captured graph of up to this many times its rows
WIDER = 4  # and of up to this many times the width of its tables
LEAST_DEPTH = 4  # of a graph that verifies drafts
MOST_IDS = 16_384  # of a row, in any table
MOST_PAIRS = 4  # pairs of counted ids and draft tokens compared for each node, in multiples of the vocabulary
LEAST_PAIRS = 2**15  # allowed for any vocabulary
TableSizes = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
HEAT = Steps(greedy=True, sampled=True, heat=True)


def verdict_bytes(vocab: int) -> int:
    """Bytes of work space of the verdict graphs, without the logits; their tables take a few MB more."""
    return WORK * ROWS_AT_ONCE * max(vocab, LEAST_PAIRS // MOST_PAIRS) * torch.float32.itemsize


def kinds_of(steps: Steps) -> tuple[bool, ...]:
    """Which groups of sampling transforms are needed: few groups, so that there are few graphs."""
    edits = steps.counted + steps.fixed + steps.ends + steps.words
    return edits > 0, steps.masks > 0, steps.min_p or steps.top_k > 0, steps.top_p


def holds(steps: Steps, needed: Steps) -> bool:
    """Whether the transforms `steps` cover `needed`, with no further kinds, in tables that are not much wider."""
    return all(need <= width <= WIDER * need for width, need in zip(steps, needed, strict=True))


def fixed_steps(needed: Steps, depth: int, vocab: int) -> Steps | None:
    """The transforms of a new graph, in widths that serve other rounds too; None if no graph can compute them."""
    edits, _, cuts, _ = kinds_of(needed)
    kept = min(rounded(needed.top_k, 64), vocab) if cuts else 0
    steps = needed._replace(greedy=True, sampled=True, heat=True, min_p=cuts, top_k=kept)
    if edits:
        steps = steps._replace(
            repeats=True,
            counts=True,
            counted=rounded(needed.counted, 512),
            fixed=rounded(needed.fixed, 16),
            ends=rounded(needed.ends, 4),
            words=rounded(needed.words, 8),
            reach=rounded(needed.reach, 4),
        )
    widest = max(needed.fixed, needed.counted, needed.ends, needed.words * needed.reach)
    fits = widest <= MOST_IDS and depth * steps.counted <= max(LEAST_PAIRS, MOST_PAIRS * vocab)
    return steps if fits and not needed.processors else None


def rounded(width: int, least: int) -> int:
    """The width of a graph's table: a power of two, at least `least`."""
    return max(least, power_of_two(width))


class VerdictShape(NamedTuple):
    """The sizes of a graph: rows of logits, sequences, columns of the tree, its depth, and the transforms' tables."""

    rows: int
    batch: int
    nodes: int
    depth: int
    steps: Steps = HEAT
    ranked: int = 0  # log-probabilities returned for each token, its own included

    def holds(self, other: VerdictShape) -> bool:
        """Whether rounds of shape `other` fit into this graph, without too much padding or unneeded work.

        Rounds without drafts are common and have graphs of their own.
        """
        large = (self.depth > 0) == (other.depth > 0) and all(
            size >= needed for size, needed in zip(self[:4], other[:4], strict=True)
        )
        rows = max(ROWS_AT_ONCE, SPARE * other.rows)
        small = self.rows <= rows and self.batch * self.nodes <= SPARE * rows
        ranks = self.ranked >= other.ranked and (self.ranked > 0) == (other.ranked > 0)
        return large and small and ranks and holds(self.steps, other.steps)

    def rounded(self, vocab: int) -> VerdictShape | None:
        """The shape of a new graph for such a round; None if no graph can verify it."""
        depth = max(LEAST_DEPTH, power_of_two(self.depth)) if self.depth else 0
        steps = fixed_steps(self.steps, depth, vocab)
        if steps is None:
            return None
        nodes = 1 + max(LEAST_DEPTH, power_of_two(self.nodes - 1)) if self.nodes > 1 else 1
        ranks = self.ranked and 1 + (FEW if self.ranked <= 1 + FEW else MOST_LOGPROBS)
        rows = min(power_of_two(self.rows), MOST_ROWS)
        return VerdictShape(rows, power_of_two(self.batch), nodes, depth, steps, ranks)


def row_sizes(rows: int, steps: Steps, vocab: int) -> TableSizes:
    """The sizes of these transforms' tables."""
    arrays = RoundTables((), vocab).arrays(steps)
    return {name: ((rows, *array.shape[1:]), array.dtype) for name, array in arrays.items()}


def in_parts(at: PathState, work: Callable[[slice, PathState], Tensor]) -> Tensor:
    """The results of `work` on at most ROWS_AT_ONCE nodes at a time, concatenated."""
    parts = []
    for first in range(0, len(at.row), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        masks = None if at.masks is None else at.masks[part]
        parts.append(work(part, PathState(at.row[part], at.drawn[part], at.position[part], masks=masks)))
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Tables:
    """The static tensors of one verdict graph; all but the logits are filled in one copy.

    Tables: those of the sampling transforms (`RoundTables.arrays`); for each sequence the `keys` of its noise; for each
    row of logits its sequence (`seq`), `positions` and `node` (index among the nodes of all sequences), and grammar
    `masks`; for each node `tokens`, `parents` and the `row` of its logits, or the number of rows if it was not read.
    """

    packed: PackedTables
    logits: Float[Tensor, "rows vocab"]

    def __getitem__(self, name: str) -> Tensor:
        return self.packed.tables[name]


class VerdictGraph:
    """Samples the target's tokens of a round and applies the tree rule to them, in graphs of few shapes."""

    def __init__(self, graphs: Graphs, device: torch.device, vocab: int) -> None:
        self.graphs, self.device, self.vocab = graphs, device, vocab
        self.tables = KeptShapes[VerdictShape, Tables](graphs)

    def judge(
        self, draws: Draws, tree: DraftTree, logits: Float[Tensor, "nodes vocab"], rule: TreeRule
    ) -> Judged | None:
        """The verdict of `rule` on the target's token after each node; None if no graph can verify the round.

        Log-probabilities are included if requests ask for them. The result is valid until the next call. Raises
        RequestFailed if a grammar fails.
        """
        if type(draws) is not Draws or (draws.constrained and tree.unseen):
            return None
        if not 0 < len(logits) <= MOST_ROWS or logits.dtype == torch.float64:
            return None
        batch, nodes = tree.tokens.shape
        host = draws.tables
        counts = [row.params.logprobs for row in draws.rows]
        width = max((1 + top for top in counts if top is not None), default=0)
        shape = self.shape_of(VerdictShape(len(logits), batch, nodes, tree.depth, host.steps, width))
        if shape is None:
            return None
        tables = self.tables_of(shape)
        self.graphs.put_logits(logits, tables.logits)
        self.fill(tables, shape, draws, tree, host)
        if tree.unseen:
            tables["tokens"].view(shape.batch, shape.nodes)[:batch, :nodes] = tree.tokens
        judged = self.graphs.run((shape, draws.num_ids), lambda: verdict(tables, shape, draws.num_ids, rule))
        return Judged(
            judged.packed[:batch, : 3 + tree.depth], None if judged.ranked is None else judged.ranked[: len(logits)]
        )

    def shape_of(self, needed: VerdictShape) -> VerdictShape | None:
        """The smallest captured shape that holds the round, else a new one; None if no graph can verify it."""
        exact = needed.rounded(self.vocab)
        if exact is None:
            return None
        return self.tables.choose(
            exact, lambda shape: shape.holds(exact), lambda shape: (shape.rows, shape.steps, shape)
        )

    def tables_of(self, shape: VerdictShape) -> Tables:
        """The tensors of this shape; the same ones while the shape is kept."""

        def make() -> Tables:
            of_rows = dict.fromkeys(("seq", "positions", "node"), (shape.rows,)) | {"keys": (shape.batch,)}
            of_nodes = dict.fromkeys(("tokens", "parents", "row"), (shape.batch * shape.nodes,))
            sizes: TableSizes = {name: (size, np.dtype(np.int64)) for name, size in (of_rows | of_nodes).items()}
            sizes |= row_sizes(shape.batch, shape.steps, self.vocab)
            if shape.steps.masks:
                sizes["masks"] = (shape.rows, shape.steps.masks), np.dtype(np.int32)
            packed = PackedTables(sizes, self.device, self.tables.buffer)
            return Tables(packed, self.graphs.logits(shape.rows, self.vocab))

        return self.tables.take(shape, make)

    def fill(self, tables: Tables, shape: VerdictShape, draws: Draws, tree: DraftTree, rows: RoundTables) -> None:
        """Fill the tables with all that the host knows: not the logits, nor tokens sampled on the device."""
        seq, positions, node = list[int](), list[int](), list[int]()
        tokens, parents, row = ([filler] * (shape.batch * shape.nodes) for filler in (0, -1, shape.rows))
        for i, host in enumerate(tree.host()):
            places, start, after_root = host.places, i * shape.nodes, draws.root_places[i] + 1
            seq += [i] * len(places)
            positions += [after_root + depth for depth in host.depths()]
            for place, token, parent in zip(places, host.tokens, host.parents, strict=True):
                at = start + place
                tokens[at], parents[at], row[at] = token, -1 if parent < 0 else places[parent], len(node)
                node.append(at)
        arrays = rows.arrays(shape.steps) | {"seq": seq, "positions": positions, "node": node, "tokens": tokens}
        arrays |= {"parents": parents, "row": row, "keys": [signed(key) for key in draws.host_keys(Purpose.COUPLED)]}
        if shape.steps.masks:
            arrays["masks"] = masks_of(draws.rows, tree.seen_paths() or (), self.vocab).numpy()
        tables.packed.fill(arrays)


def verdict(tables: Tables, shape: VerdictShape, num_ids: int, rule: TreeRule) -> Judged:
    """Sample the target's tokens and apply the rule. It only calls tensor operations, so it can be captured."""
    tokens, parents, row = (tables[name].view(shape.batch, shape.nodes) for name in ("tokens", "parents", "row"))
    read = (row < shape.rows) & (tokens >= 0)
    tree = DraftTree(torch.where(read, tokens, -1), torch.where(read, parents, -1), shape.depth)
    transforms = Transforms(shape.steps, lambda: tables.packed.tables, tables.logits.shape[1], num_ids)
    draws = Draws.of_tables(transforms, tables["keys"])
    at = nodes_of(tables, shape.steps, tree)
    drawn = in_parts(at, lambda part, at: draws.draw(tables.logits[part], at))
    after = torch.cat([drawn, torch.full_like(drawn[:1], -1)])[row]

    def ranks(part: slice, at: PathState) -> Tensor:
        real = tables.logits[part][:, :num_ids]
        real = real if at.masks is None else constrained(real, at.masks)
        return ranked(real, drawn[part].clamp_min(0), min(shape.ranked - 1, num_ids))

    return Judged(rule(tree, torch.where(read, after, -1)), in_parts(at, ranks) if shape.ranked else None)


def nodes_of(tables: Tables, steps: Steps, tree: DraftTree) -> PathState:
    """The sampling state of all rows of logits, as `Draws.nodes` gives it."""
    seq, reads_paths = tables["seq"], steps.words or steps.counted
    paths = tree.path_tokens().flatten(0, 1)[tables["node"]] if reads_paths else seq.new_empty(len(seq), 0)
    return PathState(seq, paths, tables["positions"], masks=tables["masks"] if steps.masks else None)
