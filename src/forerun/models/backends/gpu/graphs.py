"""GraphRunner: a runner whose passes have fixed shapes; on a GPU each shape is captured once as a graph and replayed.

This module decides which shapes there are, and which of them are captured. A replay costs the host one copy of small
tables and one launch, instead of a launch for every kernel. Without a GPU the same functions simply run. A tree is one
pass over its nodes, each with its own path; `keep` moves the accepted nodes' keys and values together. Rounds of
guesses are captured however many sequences there are; a round that shrinks, as drafts do near the end of an answer, is
padded to a size that was captured before. Prompt chunks, whose sizes vary and whose cost is arithmetic, run without
capture.

A draft model's whole chains are one graph (`ChainGraph`): draw, read, draw, ... without a launch in between. A graph
does the same work for every round, so nothing in it may depend on a request: parameters, texts, keys and positions are
tensors, and rounds with requests' own processors are drawn step by step. Chains may end at different depths: the
deepest come first, and at every step the rows that have ended are padding. So a graph also serves shorter chains and
fewer rows than it was captured for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.blocks import OutOfBlocks
from forerun.cache.paged import PagedCache
from forerun.device import PackedTables, upload
from forerun.models.backends.gpu.capture import LOGITS_ROWS, Graphs
from forerun.models.backends.gpu.fixed import LEAST_PATH, PADDED, Inputs, Layout, Shape, run_pass, tile_rows
from forerun.models.backends.gpu.ops import SPLIT, ops_for
from forerun.models.backends.gpu.verdicts import VerdictGraph, fixed_steps, holds, in_parts, row_sizes
from forerun.models.chains import Chains, IdExchange, Start, UnreadTexts
from forerun.models.decoder import Decoder, States
from forerun.models.rows import power_of_two
from forerun.models.runner import DeviceTokens, Judged, PartialPass, Read, Runner, Tail, TreeRule
from forerun.sampling.draws import Draws
from forerun.sampling.noise import Purpose, signed
from forerun.sampling.tables import RoundTables, Steps
from forerun.sampling.transforms import PathState, Transforms
from forerun.tree import DraftTree, HostTree

SMALL_ROWS = 128  # a pass of so many rows waits for memory: more rows, up to here, cost little
LEAST_ROWS = 16  # the smallest size
SHORT_READ, MOST_ROWS = 64, 2048  # a larger pass is captured where no sequence reads more, up to so many rows
CAPTURED_STEP, LARGE_STEP = 64, 128  # the rows of larger passes are multiples of these: captured ones, and others
LONGER = 2  # how many times its depth a round may be padded to, rather than that another graph is captured


class GraphRunner(Runner):
    """Reads as Runner does, with the decoder's matrix products as its loader made them for this device."""

    resumes = False
    draws_unseen = True

    def __init__(self, decoder: Decoder, cache: PagedCache, most_judged: int = 0) -> None:
        super().__init__(decoder, cache)
        self.ops = ops_for(self.device)
        self.graphs = Graphs(self.device, logits_rows=max(LOGITS_ROWS, self.whole_steps(most_judged)))
        self.tables: dict[tuple[Shape, int], Inputs] = {}
        self.chain_graph: ChainGraph | None = None
        self.verdicts = VerdictGraph(self.graphs, self.device, decoder.config.vocab_size)
        c = decoder.config
        self.tile = tile_rows(c.heads, c.kv_heads)
        num_slots = cache.blocks.num_blocks * cache.blocks.block_size
        self.spare_slot = num_slots  # behind all blocks, in the padding of the cache
        self.most_keys = -(-min(c.max_positions, num_slots) // SPLIT) * SPLIT

    @torch.inference_mode()
    def read(
        self,
        reads: Sequence[Read],
        taps: Sequence[int] = (),
        drawn: DeviceTokens | None = None,
        begun: PartialPass | None = None,
        inputs: Float[Tensor, "total hidden"] | None = None,
    ) -> States:
        """One pass over all reads. Raises OutOfBlocks, with nothing changed, where the cache has no room."""
        assert begun is None, "a pass of fixed shape begins at the first layer"
        self.cache.reserve([r.seq_id for r in reads], [len(r.tokens) for r in reads])
        layout, judged = self.lay_out(reads)
        shape = self.shape_of(layout, len(judged), max(len(read.tokens) for read in reads))
        tables = self.tables_of(shape, 0 if inputs is None else inputs.shape[1])
        tables.fill(layout, judged, self.cache.blocks.block_size, self.spare_slot)
        if drawn is not None:
            place(drawn, tables.columns["tokens"])
        if tables.states is not None and inputs is not None:
            tables.states[: len(inputs)] = inputs
        outputs = self.run(tables, tuple(taps))
        total, tapped = len(layout.tokens), outputs.tapped
        return States(
            logits=outputs.logits[: len(judged)].clone(),
            hidden=outputs.hidden[:total].clone(),
            tapped=tapped and replace(tapped, states=[each[:total].clone() for each in tapped.states]),
        )

    def draw_chains(
        self,
        draws: Draws,
        starts: Sequence[Start],
        logits: Float[Tensor, "starts vocab"] | None,
        ids: IdExchange,
        states: bool = False,
        before: Float[Tensor, "starts hidden"] | None = None,
        texts: UnreadTexts | None = None,
    ) -> Chains | None:
        """Chains drawn by a graph, whose guesses the host does not see; None for layers that read states.

        A runner's ids are always the same ones.
        """
        assert not states, "a graph leaves no states"
        if before is not None or texts is not None:
            return None
        assert logits is not None, "roots are read"
        if self.chain_graph is None:
            self.chain_graph = ChainGraph(self, ids)
        assert self.chain_graph.ids is ids, "a graph is captured with its ids"
        return self.chain_graph.draw(draws, starts, logits)

    def logits(self, hidden: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows vocab"]:
        """Those of states that a pass gave."""
        return self.graphs.run(None, lambda: self.decoder.logits(hidden))

    def judge(
        self, draws: Draws, tree: DraftTree, logits: Float[Tensor, "nodes vocab"], rule: TreeRule
    ) -> Judged | None:
        """The verdict by one graph; None for the few rounds that no graph can judge."""
        return self.verdicts.judge(draws, tree, logits, rule)

    def lay_out(self, reads: Sequence[Read]) -> tuple[Layout, list[int]]:
        """The reads as rows, and which of them are judged; their room is reserved already."""
        layout, judged = Layout(self.tile), []
        for read in reads:
            judged += [len(layout.tokens) + i for i in read.judged]
            tail = self.tails.setdefault(read.seq_id, Tail(0))
            nodes = tail.grow(read.parents, len(read.tokens))
            paths = [range(n + 1) if tail.depths[n] == n else tail.path(n) for n in nodes]
            length = self.cache.length(read.seq_id)
            layout.add(read.tokens, paths, nodes.start, self.cache.start(read.seq_id), length)
        return layout, judged

    def shape_of(self, layout: Layout, num_judged: int, longest_read: int) -> Shape:
        """A shape that holds a pass: of few sizes where passes are captured, else the smallest."""
        rows, longest = len(layout.tokens), layout.longest_path
        path = max(LEAST_PATH, power_of_two(longest)) if longest else 0
        keys = -(-layout.num_keys // SPLIT) * SPLIT
        judged = self.whole_steps(num_judged)
        if rows > SMALL_ROWS and (longest_read > SHORT_READ or rows > MOST_ROWS):
            size, few = -(-rows // LARGE_STEP) * LARGE_STEP, power_of_two(num_judged) if num_judged else 0
            return Shape(size, path, min(judged, few), keys, captured=False)
        size = self.captured_rows(rows, path, num_judged > 0)
        judged = judged if size > SMALL_ROWS or not judged else size
        return Shape(size, path, judged, self.most_keys if self.graphs.enabled else keys)

    @staticmethod
    def whole_steps(rows: int) -> int:
        """As many rows, or a few more, as larger passes that are captured have."""
        return -(-rows // CAPTURED_STEP) * CAPTURED_STEP

    def captured_rows(self, rows: int, path: int, judges: bool) -> int:
        """The size of a captured pass, or a new one if too much of every captured one would be padding."""
        if rows > SMALL_ROWS:
            return self.whole_steps(rows)
        least, most = max(LEAST_ROWS, power_of_two(rows)), min(SMALL_ROWS, PADDED * rows)
        there = (s.rows for s, _ in self.tables if s.path == path and (s.judged > 0) == judges)
        return min((size for size in there if least <= size <= most), default=least)

    def tables_of(self, shape: Shape, width: int) -> Inputs:
        """Tables of this shape, with states where these have a width; always the same tensors where a graph uses
        them."""
        if (shape, width) in self.tables:
            return self.tables[shape, width]
        states = torch.zeros(shape.rows, width, dtype=self.decoder.stream, device=self.device) if width else None
        tables = Inputs(shape, self.device, states)
        if shape.captured and self.graphs.enabled:
            self.tables[shape, width] = tables
        return tables

    def run(self, inputs: Inputs, taps: tuple[int, ...]) -> States:
        """The pass over these tables, replayed where its shape is captured."""

        def body() -> States:
            keep = self.graphs.keep_logits if inputs.shape.captured else Tensor.float
            return run_pass(self.decoder, self.ops, inputs, self.cache, taps, keep)

        key = (inputs.shape, taps, 0 if inputs.states is None else inputs.states.shape[1])
        return self.graphs.run(key if inputs.shape.captured else None, body)


def place(drawn: DeviceTokens, tokens: Tensor) -> None:
    """Overwrite the tokens that only the device knows; padding tokens may become any id."""
    source = upload(drawn.source, torch.long, tokens.device)
    known = drawn.tokens.flatten()[source.clamp_min(0)].clamp_min(0).to(tokens.dtype)
    table = tokens[: len(source)]
    table.copy_(torch.where(source >= 0, known, table))


class ChainShape(NamedTuple):
    """The sizes of a graph: rows, depth, and the tables of its transforms."""

    rows: int
    depth: int
    steps: Steps

    def holds(self, rows: int, depth: int, steps: Steps) -> bool:
        """Whether such chains fit, without too much padding."""
        fits = rows <= self.rows <= PADDED * rows and depth <= self.depth <= LONGER * depth
        return fits and holds(self.steps, steps)


@dataclass(frozen=True, slots=True)
class Buffers:
    """The tensors of one graph: the first logits, and tables that are filled in one copy.

    These are the transforms' by name (`RoundTables.arrays`), each row's `keys` and `positions`, and those of each pass.
    """

    packed: PackedTables
    logits: Float[Tensor, "rows vocab"]
    passes: Sequence[Inputs]


class ChainGraph:
    """Draws chains with a model, in graphs of a few numbers of rows (powers of two) and depths."""

    def __init__(self, runner: GraphRunner, ids: IdExchange) -> None:
        self.runner = runner
        self.ids = ids
        self.buffers: dict[ChainShape, Buffers] = {}

    def draw(self, draws: Draws, starts: Sequence[Start], logits: Float[Tensor, "starts vocab"]) -> Chains | None:
        """The chains; None, with nothing changed, where the graph cannot draw this round or there is no room.

        Grammars have no say in it: the host would have to see the guesses.
        """
        if draws.rejection or type(draws) is not Draws:
            return None
        order = sorted(range(len(starts)), key=lambda i: -starts[i].depth)
        if order != [*range(len(starts))]:
            starts, logits = [starts[i] for i in order], logits[upload(order, torch.long, logits.device)]
        rows = RoundTables([draws.rows[start.row] for start in starts], self.ids.vocab_size)
        shape = self.shape_of(len(starts), starts[0].depth, rows.steps._replace(masks=0))
        if shape is None:
            return None
        try:
            self.runner.cache.reserve([s.seq_id for s in starts], [s.depth - 1 for s in starts])
        except OutOfBlocks:
            return None
        buffers = self.fill(shape, draws, starts, rows)
        buffers.logits[: len(starts)] = logits
        key = ("chains", shape, draws.num_ids)
        guesses = self.runner.graphs.run(key, lambda: self.body(shape, buffers, draws.num_ids))
        return self.spread(draws, starts, guesses)

    def fill(self, shape: ChainShape, draws: Draws, starts: Sequence[Start], rows: RoundTables) -> Buffers:
        """Set the tables of all steps, the deepest chains first: where tokens lie is known before they are."""
        buffers, arrays = self.buffers_of(shape), rows.arrays(shape.steps)
        keys = draws.host_keys(Purpose.COUPLED)
        arrays["keys"] = np.array([signed(keys[start.row]) for start in starts])
        arrays["positions"] = np.array([draws.root_places[start.row] + 1 for start in starts])
        block_size, spare_slot = self.runner.cache.blocks.block_size, self.runner.spare_slot
        for level, step in enumerate(buffers.passes, start=1):
            reads = [Read(start.seq_id, [0], judged=[0]) for start in starts if start.depth > level]
            numbers = step.numbers(*self.runner.lay_out(reads), block_size, spare_slot)
            arrays[f"pass {level}"] = np.array(numbers, dtype=np.int32)
        buffers.packed.fill(arrays)
        return buffers

    def shape_of(self, rows: int, depth: int, steps: Steps) -> ChainShape | None:
        """The shape of a captured graph, or of a new one if too much of a captured one would be padding."""
        there = [shape for shape in self.buffers if shape.holds(rows, depth, steps)]
        if there:
            return min(there, key=lambda shape: shape.rows * shape.depth)
        fixed = fixed_steps(steps, depth, self.ids.vocab_size)
        return None if fixed is None else ChainShape(power_of_two(rows), depth, fixed)

    def buffers_of(self, shape: ChainShape) -> Buffers:
        """The buffers of this shape, always the same."""
        if shape not in self.buffers:
            device, vocab, rows = self.runner.device, self.ids.vocab_size, (shape.rows,)
            step, names = Shape(shape.rows, 0, shape.rows, self.runner.most_keys), range(1, shape.depth)
            sizes = row_sizes(shape.rows, shape.steps, vocab)
            sizes |= {name: (rows, np.dtype(np.int64)) for name in ("keys", "positions")}
            sizes |= {f"pass {level}": ((Inputs.size_of(step),), np.dtype(np.int32)) for level in names}
            packed = PackedTables(sizes, device)
            passes = [Inputs(step, device, flat=packed.tables[f"pass {level}"]) for level in names]
            self.buffers[shape] = Buffers(packed, self.runner.graphs.logits(shape.rows, vocab), passes)
        return self.buffers[shape]

    def body(self, shape: ChainShape, buffers: Buffers, num_ids: int) -> Int[Tensor, "rows depth"]:
        """All steps. Tensor code alone."""
        logits, tables = buffers.logits, buffers.packed.tables
        transforms = Transforms(shape.steps, lambda: tables, self.ids.vocab_size, num_ids)
        draws = Draws.of_tables(transforms, tables["keys"])
        row = torch.arange(shape.rows, device=logits.device)
        drawn = row.new_empty(shape.rows, 0)
        for level in range(shape.depth):
            at = PathState(row, drawn, tables["positions"] + level)
            guesses = likeliest(draws, logits, at)
            drawn = torch.cat([drawn, guesses], dim=1)
            if level < len(buffers.passes):
                step = buffers.passes[level]
                step.columns["tokens"].copy_(self.ids.own(guesses[:, 0]).clamp_min(0))
                logits = self.ids.spread(run_pass(self.runner.decoder, self.runner.ops, step, self.runner.cache).logits)
        return drawn

    def spread(self, draws: Draws, starts: Sequence[Start], guesses: Tensor) -> Chains:
        """The rows of the graph as rows of the round, each with the length that was asked for."""
        batch, deepest, device = len(draws.rows), starts[0].depth, draws.device
        read = {s.seq_id: s.depth - 1 for s in starts if s.depth > 1}
        depth_of = {start.row: start.depth for start in starts}
        trees = [HostTree.unseen(depth_of.get(row, 0)) for row in range(batch)]
        if [start.row for start in starts] == [*range(batch)] and starts[-1].depth == deepest:
            return Chains(trees, read, guesses=guesses[:batch, :deepest])
        index = upload([start.row for start in starts], torch.long, device)
        depths = upload([start.depth for start in starts], torch.long, device)
        guesses_at = torch.full((batch, deepest), -1, dtype=torch.long, device=device)
        inside = torch.arange(deepest, device=device) < depths[:, None]
        guesses_at[index] = torch.where(inside, guesses[: len(starts), :deepest], -1)
        return Chains(trees, read, guesses=guesses_at)


def likeliest(draws: Draws, logits: Float[Tensor, "rows vocab"], at: PathState) -> Int[Tensor, "rows 1"]:
    """One guess after each node."""
    return in_parts(at, lambda part, at: draws.children(logits[part], at, 1, survival=False).tokens)
