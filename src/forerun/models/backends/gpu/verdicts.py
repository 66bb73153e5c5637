"""VerdictGraph: a round's draws and verdict as one captured graph, for every parameter of sampling but processors.

This module decides which rounds are judged so, and in which sizes. Launched one by one, the small kernels of a verdict
take the host longer than a small target takes to compute. The graph gives to the bit what `verify` gives: it runs the
same functions of tensors, `Draws.draw` and the rule, over tables that are filled in one copy.

It leaves to `verify`: requests with their own logits processors, which are Python; guesses that are judged by the laws
they were drawn from; grammars over guesses that the host has not seen; rounds of more than MOST_ROWS nodes; and tables
that would be too large: more than MOST_IDS biased or counted ids, or end tokens, in a row, more than that many tokens
in its banned words, or deep drafts behind so many counted ids that comparing them takes more than MOST_PAIRS rows of
logits for each node.
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

MOST_ROWS = 192  # of a round that is judged by a graph
ROWS_AT_ONCE = 32  # are drawn, so that what that takes is bounded:
WORK = 16  # times their logits: at most 11 in tensors; as torch sorts it is 4, and the rest is for its inside
SPARE = 8  # how many times its rows a round may be padded to, rather than that another graph is captured,
LEAST_DEPTH = 4  # of a graph that judges guesses at all
WIDER = 4  # and how many times the width of its tables
MOST_IDS = 16_384  # of a row, in any table
MOST_PAIRS = 4  # of ids and guesses that are compared for each node, in parts of the vocabulary,
LEAST_PAIRS = 2**15  # or so many where it is small
TableSizes = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
HEAT = Steps(greedy=True, sampled=True, heat=True)


def verdict_bytes(vocab: int) -> int:
    """What the graphs of verdicts work in, beside the logits that they judge; tables take some MB."""
    return WORK * ROWS_AT_ONCE * max(vocab, LEAST_PAIRS // MOST_PAIRS) * torch.float32.itemsize


def kinds_of(steps: Steps) -> tuple[bool, ...]:
    """Which groups of transforms there are: few, so that there are few graphs."""
    edits = steps.counted + steps.fixed + steps.ends + steps.words
    return edits > 0, steps.masks > 0, steps.min_p or steps.top_k > 0, steps.top_p


def holds(steps: Steps, needed: Steps) -> bool:
    """Whether transforms can do what is needed, and no kind that is not, in tables that are not much wider."""
    return all(need <= mine <= WIDER * need for mine, need in zip(steps, needed, strict=True))


def fixed_steps(needed: Steps, depth: int, vocab: int) -> Steps | None:
    """The transforms of a new graph, in widths that serve other rounds too; None for those that no graph can make."""
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
    """The width of a graph's table: a power of two, and not the smallest ones."""
    return max(least, power_of_two(width))


class VerdictShape(NamedTuple):
    """The sizes of a graph: rows of logits, sequences, columns of the tree, its depth, and the transforms' tables."""

    rows: int
    batch: int
    nodes: int
    depth: int
    steps: Steps = HEAT
    ranked: int = 0  # how many log-probabilities are wanted of a token, itself among them

    def holds(self, other: VerdictShape) -> bool:
        """Whether rounds of another shape fit, without too much padding or work that nobody asks for.

        Rounds without guesses are common, and walk no paths.
        """
        large = (self.depth > 0) == (other.depth > 0) and all(
            mine >= needed for mine, needed in zip(self[:4], other[:4], strict=True)
        )
        rows = max(ROWS_AT_ONCE, SPARE * other.rows)
        small = self.rows <= rows and self.batch * self.nodes <= SPARE * rows
        ranks = self.ranked >= other.ranked and (self.ranked > 0) == (other.ranked > 0)
        return large and small and ranks and holds(self.steps, other.steps)

    def rounded(self, vocab: int) -> VerdictShape | None:
        """The shape of a new graph for such a round; None where no graph can judge it."""
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
    """What comes of work on some nodes at a time, together."""
    parts = []
    for first in range(0, len(at.row), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        masks = None if at.masks is None else at.masks[part]
        parts.append(work(part, PathState(at.row[part], at.drawn[part], at.position[part], masks=masks)))
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Tables:
    """The static tensors of one graph; all but logits are filled in one copy.

    By name: the transforms' (`RoundTables.arrays`); of each sequence `keys` of its noise; of each row of logits its
    sequence `seq`, its `positions` and its `node` among those of all sequences; of each node its `tokens`, its
    `parents` and the `row` of its logits, one past the last where none were read; and `masks` of rows.
    """

    packed: PackedTables
    logits: Float[Tensor, "rows vocab"]

    def __getitem__(self, name: str) -> Tensor:
        return self.packed.tables[name]


class VerdictGraph:
    """What a rule says of the tokens that a round's draws give, in graphs of a few shapes."""

    def __init__(self, graphs: Graphs, device: torch.device, vocab: int) -> None:
        self.graphs, self.device, self.vocab = graphs, device, vocab
        self.tables = KeptShapes[VerdictShape, Tables](graphs)

    def judge(
        self, draws: Draws, tree: DraftTree, logits: Float[Tensor, "nodes vocab"], rule: TreeRule
    ) -> Judged | None:
        """What `rule` says of the target's own token after each node; None for rounds that no graph can judge.

        Where requests want log-probabilities, it brings them along. The result holds until the next verdict. Raises
        RequestFailed where a grammar fails.
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
        """The narrowest shape there is that holds the round, else a new one; None where no graph can judge it."""
        exact = needed.rounded(self.vocab)
        if exact is None:
            return None
        return self.tables.choose(
            exact, lambda shape: shape.holds(exact), lambda shape: (shape.rows, shape.steps, shape)
        )

    def tables_of(self, shape: VerdictShape) -> Tables:
        """The tensors of this shape, always the same as long as it is kept."""

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
        """What the host knows of the round: all but logits, and tokens that it has not seen."""
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
    """The rule, of what is drawn. Tensor code alone."""
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
    """What `Draws.nodes` gives, of all rows of logits."""
    seq, reads_paths = tables["seq"], steps.words or steps.counted
    paths = tree.path_tokens().flatten(0, 1)[tables["node"]] if reads_paths else seq.new_empty(len(seq), 0)
    return PathState(seq, paths, tables["positions"], masks=tables["masks"] if steps.masks else None)
