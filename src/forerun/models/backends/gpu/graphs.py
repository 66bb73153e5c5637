"""GraphRunner: a runner whose passes have fixed shapes; on a GPU each shape is captured once as a CUDA graph.

This module decides which shapes there are and which of them are captured. A replay costs the host one copy of small
tables and one launch, instead of a launch for every kernel. Without a GPU the same functions run uncaptured. A tree is
one pass over its nodes, each with its own path; `keep` compacts the keys and values of the accepted nodes. Passes that
verify drafts are captured for any number of sequences; a smaller round, as near the end of an answer, is padded to a
captured size. Passes with prompt chunks run uncaptured: their sizes vary, and their time is arithmetic, not launches.

The chains of a draft model and of trained heads are one graph each (`chain_graph.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.device import DeviceSpan, Download, upload
from forerun.models.backends.gpu.ahead import PAUSE, PassAhead
from forerun.models.backends.gpu.capture import KeptShapes
from forerun.models.backends.gpu.chain_graph import ChainGraph
from forerun.models.backends.gpu.fixed import LEAST_PATH, FixedRunner, Inputs, Layout, Shape, run_pass
from forerun.models.backends.gpu.ops import SPLIT
from forerun.models.backends.gpu.verdicts import VerdictGraph
from forerun.models.chains import Chains, ChainStart, IdMap, ParallelHeads, UnreadTexts, VerifiedChains
from forerun.models.decoder import Decoder, Outputs, TapStates
from forerun.models.rows import few_rows, power_of_two
from forerun.models.runner import DeviceTokens, Judged, PartialPass, Read, TreeRule
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree

SMALL_ROWS = 128  # up to here a pass is bound by memory bandwidth, and padding rows cost little
LEAST_ROWS = 16  # the smallest size
SHORT_READ, MOST_ROWS = 64, 2048  # a larger pass is captured up to MOST_ROWS, if no sequence reads over SHORT_READ
LARGER = 2  # a pass is padded to a captured size up to this many times its own, rather than captured
LARGE_STEP, JUDGED_STEP = 128, 64  # sizes of uncaptured passes are multiples of these: all rows, rows with logits


class GraphRunner(FixedRunner):
    """A runner of passes of fixed shape, captured as CUDA graphs on a GPU."""

    resumes = False
    draws_unseen = True

    def __init__(self, decoder: Decoder, cache: PagedCache, most_judged: int = 0) -> None:
        super().__init__(decoder, cache, most_judged)
        self.tables = KeptShapes[tuple[Shape, int], Inputs](self.graphs)
        self.chain_graphs: dict[IdMap, ChainGraph] = {}
        self.verdicts = VerdictGraph(self.graphs, self.device, decoder.config.vocab_size)
        self.ahead: PassAhead | None = None
        self.pause = 0  # rounds until a pass is launched ahead again

    @torch.inference_mode()
    def read(
        self,
        reads: Sequence[Read],
        taps: Sequence[int] = (),
        drawn: DeviceTokens | None = None,
        partial: PartialPass | None = None,
        inputs: Float[Tensor, "total hidden"] | None = None,
    ) -> Outputs:
        """One pass over all reads. Raises OutOfBlocks, with nothing changed, if the cache has no room.

        `hidden` is valid until the runner computes anything else; logits and tapped states are copies.
        """
        assert partial is None, "a pass of fixed shape begins at the first layer"
        self.cache.reserve([r.seq_id for r in reads], [len(r.tokens) for r in reads])
        layout, judged = self.lay_out(reads)
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            rows = None
            if drawn is None and inputs is None and (ahead.taps, ahead.num_runs) == (tuple(taps), self.graphs.num_runs):
                rows = ahead.rows_for([r.seq_id for r in reads], layout)
            if rows is not None:
                return self.states_of(ahead.outputs, rows, len(rows), ahead.span)
            self.pause = PAUSE
        width = 0 if inputs is None else inputs.shape[1]
        layout.sources += [] if drawn is None else [max(0, place) for place in drawn.source]
        tables = self.filled(layout, judged, max(len(r.tokens) for r in reads), width)
        if drawn is not None:
            write_drawn(drawn, tables)
        if tables.states is not None and inputs is not None:
            tables.states[: len(inputs)] = inputs
        return self.states_of(self.run(tables, tuple(taps)), range(len(layout.tokens)), len(judged))

    def filled(self, layout: Layout, judged: Sequence[int], longest_read: int, width: int = 0) -> Inputs:
        """Tables filled with these rows, with room for states of this width."""
        tables = self.tables_of(self.shape_of(layout, len(judged), longest_read, width), width)
        tables.fill(layout, judged, self.cache.blocks.block_size, self.spare_slot)
        return tables

    def states_of(
        self, outputs: Outputs, rows: Sequence[int], num_judged: int, span: DeviceSpan | None = None
    ) -> Outputs:
        """The outputs of these rows of a pass, with copies of the logits and of the tapped states."""
        together = None if outputs.tapped is None else outputs.tapped.stacked
        if [*rows] != [*range(len(rows))]:
            where = upload(rows, torch.int64, self.device)
            logits, hidden = outputs.logits.index_select(0, where), outputs.hidden.index_select(0, where)
            together = None if together is None else together.index_select(0, where)
        else:
            logits = self.graphs.copy_logits(outputs.logits[:num_judged])
            hidden = outputs.hidden[: len(rows)]
            together = None if together is None else together[: len(rows)].clone()
        return Outputs(logits, hidden, None if together is None else TapStates.of_stacked(together), span)

    @torch.inference_mode()
    def read_ahead(
        self, seq_ids: Sequence[int], verdict: Int[Tensor, "batch verdict"], taps: Sequence[int] = ()
    ) -> Download | None:
        """Launch the next pass, in which each of these sequences reads the token that `verdict` sampled for it.

        Returns the copy of the verdict to the host, which does not wait for that pass; None, with nothing done, if
        there is no room or a recent pass was unused. The next `read` uses the pass if it reads the same.
        """
        self.pause = max(0, self.pause - 1)
        lengths = [self.cache.length(seq_id) + 1 for seq_id in seq_ids]  # once the roots are kept
        if self.pause or not self.cache.can_reserve(seq_ids, [1] * len(lengths)):
            return None
        if any(length % self.cache.blocks.block_size == 0 for length in lengths):
            self.cache.reserve(seq_ids, [1] * len(lengths))
            self.cache.cut(seq_ids, [1] * len(lengths))  # the next `read` gets the same blocks, or the pass is unused
        layout, arriving = Layout(self.tile), Download(verdict)
        for seq_id, length in zip(seq_ids, lengths, strict=True):
            layout.add([0], range(1), self.cache.start(seq_id), length)
        tables, span = self.filled(layout, range(len(seq_ids)), 1), DeviceSpan.begin(self.device)
        tables.columns["tokens"][: len(seq_ids)] = verdict[:, 1].clamp_min(0)
        outputs = self.run(tables, tuple(taps))
        self.graphs.copied = None
        if span is not None:
            span.end()
        self.ahead = PassAhead(seq_ids, layout, tuple(taps), arriving, outputs, span, self.graphs.num_runs)
        return arriving

    def draw_chains(
        self,
        draws: Draws,
        starts: Sequence[ChainStart],
        logits: Float[Tensor, "starts vocab"] | None,
        ids: IdMap,
        states: bool = False,
        before: Float[Tensor, "starts hidden"] | None = None,
        texts: UnreadTexts | None = None,
        heads: ParallelHeads | None = None,
    ) -> Chains | None:
        """As in Runner: chains drafted by one graph, whose tokens the host does not know; `texts` are read first.

        None for layers that read states if their texts were read before (`before`).
        """
        assert not states, "a graph leaves no states"
        return None if before is not None else self.chains_of(ids).draw(draws, starts, logits, texts, heads)

    def begin_chains(
        self, judged: VerifiedChains, starts: Sequence[ChainStart], ids: IdMap, texts: UnreadTexts
    ) -> Download | None:
        """Launch the chains that follow the tokens accepted by a verdict; returns the copy of the verdict to the host,
        which does not wait for them. The next `draw_chains` uses them if it asks for the same."""
        return self.chains_of(ids).launch_next(judged, starts, texts)

    def chains_of(self, ids: IdMap) -> ChainGraph:
        """The graphs of chains with this mapping of ids."""
        if ids not in self.chain_graphs:
            self.chain_graphs[ids] = ChainGraph(self, ids)
        return self.chain_graphs[ids]

    def logits(self, hidden: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows vocab"]:
        return self.graphs.run(None, lambda: self.decoder.logits(hidden))

    def judge(
        self, draws: Draws, tree: DraftTree, logits: Float[Tensor, "nodes vocab"], rule: TreeRule
    ) -> Judged | None:
        """The verdict of a round by one graph; None for the few rounds that no graph can judge."""
        return self.verdicts.judge(draws, tree, logits, rule)

    def shape_of(self, layout: Layout, num_judged: int, longest_read: int, width: int) -> Shape:
        """The shape for a pass, with states of this width: one of few sizes if it is captured, else the smallest."""
        rows, longest = len(layout.tokens), layout.longest_path
        path = max(LEAST_PATH, power_of_two(longest)) if longest else 0
        keys = -(-(max(layout.positions) + 1) // SPLIT) * SPLIT
        if rows > SMALL_ROWS and (longest_read > SHORT_READ or rows > MOST_ROWS):
            few = min(-(-num_judged // JUDGED_STEP) * JUDGED_STEP, power_of_two(num_judged)) if num_judged else 0
            return Shape(-(-rows // LARGE_STEP) * LARGE_STEP, path, few, keys, captured=False)
        small = rows <= SMALL_ROWS
        size = max(LEAST_ROWS, power_of_two(rows)) if small else few_rows(rows)
        most = size if size == LEAST_ROWS else min(SMALL_ROWS, LARGER * size) if small else LARGER * size
        judged = 0 if not num_judged else size if small else few_rows(num_judged)
        exact = Shape(size, path, judged, self.most_keys if self.graphs.enabled else keys)

        def holds(kept: tuple[Shape, int]) -> bool:
            shape = kept[0]
            alike = replace(exact, rows=shape.rows, judged=shape.judged) == shape and kept[1] == width
            enough = size <= shape.rows <= most and judged <= shape.judged
            return alike and enough and (judged > 0) == (shape.judged > 0)

        return self.tables.choose((exact, width), holds, lambda kept: (kept[0].rows, kept[0].judged))[0]

    def tables_of(self, shape: Shape, width: int) -> Inputs:
        """Tables of this shape, with states if `width` is not 0; the same tensors every time for a captured shape."""

        def make(flat: Tensor | None = None) -> Inputs:
            sizes, dtype = (shape.rows, width), self.decoder.stream_dtype
            states = torch.zeros(sizes, dtype=dtype, device=self.device) if width else None
            return Inputs(shape, self.device, states, flat)

        if not (shape.captured and self.graphs.enabled):
            return make()
        num_bytes = Inputs.size_of(shape) * torch.int32.itemsize
        return self.tables.take((shape, width), lambda: make(self.tables.buffer(num_bytes).view(torch.int32)))

    def run(self, inputs: Inputs, taps: tuple[int, ...]) -> Outputs:
        """Run the pass over these tables, by a graph if the shape is captured."""

        def body() -> Outputs:
            keep = self.graphs.keep_logits if inputs.shape.captured else Tensor.float
            return run_pass(self.decoder, self.ops, inputs, self.cache, taps, keep)

        key = (inputs.shape, 0 if inputs.states is None else inputs.states.shape[1]), taps
        return self.graphs.run(key if inputs.shape.captured else None, body)


def write_drawn(drawn: DeviceTokens, tables: Inputs) -> None:
    """Write the tokens that only the device knows to the tables; padding tokens may become any id."""
    count = len(drawn.source)
    table = tables.columns["tokens"][:count]
    known = drawn.tokens.flatten().index_select(0, tables.columns["sources"][:count]).clamp_min_(0)
    if min(drawn.source) < 0:  # prompt tokens, which the host knows
        from_device = upload([place >= 0 for place in drawn.source], torch.bool, table.device)
        known = torch.where(from_device, known, table)
    table.copy_(known)
