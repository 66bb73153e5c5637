"""ChainGraph: drafts entire chains in one captured graph, by a draft model, by layers that read states, or by heads.

The graph alternates sampling and passes, without launches by the host. Layers that read states (EAGLE, MTP) first read
their unread text with the target's states, and then each draft token with their own output at its parent. Layers on top
of other layers read the output states of these, in the same graph. Heads that predict several positions need no pass
between two tokens, and at most one pass, over mask tokens, before the first. Tensors hold what depends on a request.

The deepest chains come first, and in each step the rows of finished chains are padding. So a graph also serves shorter
chains and fewer rows than it was captured for. Its result is the round's tree on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.blocks import OutOfBlocks
from forerun.device import Download, HostArray, PackedTables, upload
from forerun.models.backends.gpu.ahead import CHAINS_PAUSE, ChainsAhead
from forerun.models.backends.gpu.capture import KeptShapes
from forerun.models.backends.gpu.chain_tables import (
    LEAST_TEXT,
    Buffers,
    ChainShape,
    apply_verdict,
    below_of,
    lay_out_steps,
    sources_of,
)
from forerun.models.backends.gpu.fixed import FixedRunner, Inputs, Layout, Shape, run_pass
from forerun.models.backends.gpu.verdicts import fixed_steps, in_parts, kinds_of, row_sizes
from forerun.models.chains import (
    Chains,
    ChainStart,
    HeadInputs,
    IdMap,
    MaskedPositions,
    ParallelHeads,
    UnreadTexts,
    VerifiedChains,
)
from forerun.models.decoder import Outputs
from forerun.models.rows import half_step, power_of_two
from forerun.models.runner import Read, Tail
from forerun.sampling.draws import Draws
from forerun.sampling.noise import Purpose, signed
from forerun.sampling.tables import RoundTables
from forerun.sampling.transforms import PathState, Transforms
from forerun.tree import HostTree


class ChainGraph:
    """Drafts chains with a runner, in graphs of few sizes (powers of two)."""

    def __init__(self, runner: FixedRunner, ids: IdMap) -> None:
        self.runner = runner
        self.ids = ids
        self.buffers = KeptShapes[ChainShape, Buffers](runner.graphs)
        self.ahead: ChainsAhead | None = None
        self.pause = 0  # rounds until chains may be launched ahead again

    @torch.inference_mode()
    def draw(
        self,
        draws: Draws,
        starts: Sequence[ChainStart],
        logits: Float[Tensor, "starts vocab"] | None,
        texts: UnreadTexts | None,
        heads: ParallelHeads | None = None,
    ) -> Chains | None:
        """Draft chains after logits, after texts (which stay in the cache) or by heads; None if that is not possible.

        It is not possible in rejection modes, with a `min_survival`, since survival is not computed, without room in
        the cache, or if no graph fits. Grammars do not mask draft tokens, since the host does not know the tokens.
        """
        if draws.rejection or type(draws) is not Draws or any(start.min_survival for start in starts):
            return None
        unread: Sequence[Sequence[int]] = [()] * len(starts) if texts is None else texts.tokens
        order = sorted(range(len(starts)), key=lambda i: -starts[i].depth)
        rows = self.tables_of(draws, [starts[i] for i in order])
        steps, depth = rows.steps._replace(masks=0), starts[order[0]].depth
        most = half_step(depth) if heads is None else depth  # there may be no more heads than `depth`
        shape = self.shape_of(ChainShape(len(draws.rows), most, steps, sum(map(len, unread))))
        if shape is None:
            return None
        runner, seq_ids = self.runner, [start.seq_id for start in starts]
        places = None if heads is None else heads.places
        steps_of = [s.depth - 1 if heads is None else 0 for s in starts] if places is None else map(len, places.tokens)
        counts = [len(text) + count for text, count in zip(unread, steps_of, strict=True)]
        if not self.reserve(starts, counts, below := below_of(texts)):
            return None
        launched = self.take_launched(draws, starts, unread)
        if launched is not None:
            nodes, ends = launched
            runner.tails |= {seq_id: Tail(0) for seq_id in seq_ids}  # the texts were read by the launched graph
        else:
            buffers = self.buffers_of(shape, texts, heads)
            arrays = self.arrays(buffers, draws, starts, order, unread, places)
            if below is not None:
                arrays |= lay_out_steps(below, "below", buffers.below, [starts[i] for i in order])
            buffers.packed.fill(rows.arrays(shape.steps) | arrays)
            self.fill_first(buffers, order, logits, heads)
            nodes, ends = self.run(shape, buffers, draws.num_ids, texts, heads)
        if texts is not None:
            runner.keep(seq_ids, [range(len(text) - (below is not None)) for text in unread])
        if below is not None:
            below.drop(seq_ids)
        if texts is not None and texts.roots is not None and ends is not None:
            at = [start.row for start in starts]
            ends = ends[: len(at)] if at == [*range(len(at))] else ends[upload(at, torch.long, runner.device)]
            texts.roots.copy_(ends)
        depth_of = {start.row: start.depth for start in starts}
        trees = [HostTree.unseen(depth_of.get(row, 0)) for row in range(len(draws.rows))]
        num_read = {s.seq_id: s.depth - 1 for s in starts if s.depth > 1 and texts is None and heads is None}
        return Chains(trees, num_read, nodes=nodes[:, : len(trees), : 1 + depth].clone())

    def tables_of(self, draws: Draws, starts: Sequence[ChainStart]) -> RoundTables:
        """The tables of the sampling transforms for these chains, in their order."""
        drafted = [draws.rows[start.row] for start in starts]
        return draws.tables if drafted == draws.rows else RoundTables(drafted, self.ids.vocab_size)

    def fill_first(
        self,
        buffers: Buffers,
        order: Sequence[int],
        logits: Float[Tensor, "starts vocab"] | None,
        heads: ParallelHeads | None,
    ) -> None:
        """Set `buffers.first`, in the order of the chains: the logits, or the states that heads read."""
        if buffers.first is not None and logits is not None:
            in_order = order == [*range(len(order))]
            ordered = logits if in_order else logits[upload(order, torch.long, self.runner.device)]
            self.runner.graphs.put_logits(ordered, buffers.first)
        elif buffers.first is not None and heads is not None and heads.states is not None:
            torch.stack([heads.states[i] for i in order], out=buffers.first[: len(order)])

    @torch.inference_mode()
    def launch_next(self, judged: VerifiedChains, starts: Sequence[ChainStart], texts: UnreadTexts) -> Download | None:
        """Launch the chains that follow the accepted tokens of these verified chains, all as deep as the deepest.

        All verified nodes are read as text. Rejected ones lie after the accepted ones, where no row sees them before
        the new chains overwrite them. Returns the copy of the verdict to the host; None, with nothing done, if
        sampling depends on the tokens themselves, there is no room, or recent chains were unused.
        """
        self.pause = max(0, self.pause - 1)
        runner, draws, seq_ids = self.runner, judged.draws, [start.seq_id for start in starts]
        depth = max(start.depth for start in starts)
        rows, lengths = self.tables_of(draws, starts), [runner.length(seq_id) for seq_id in seq_ids]
        edits, masks, *_ = kinds_of(rows.steps)
        if self.pause or edits or masks or max(lengths) + 2 * depth > runner.window:
            return None
        deepest = [start._replace(depth=depth) for start in starts]
        shape = self.shape_of(ChainShape(len(draws.rows), half_step(depth), rows.steps, sum(map(len, texts.tokens))))
        if shape is None or not self.reserve(starts, [2 * depth] * len(starts), None):
            return None
        arriving = Download(torch.cat([judged.verdict, judged.nodes], dim=1))
        buffers = self.buffers_of(shape, texts, None)
        arrays = self.arrays(buffers, draws, deepest, range(len(starts)), texts.tokens, None, ahead=True)
        buffers.packed.fill(rows.arrays(shape.steps) | arrays)
        apply_verdict(buffers, judged, starts, runner.device)
        nodes, ends = self.run(shape, buffers, draws.num_ids, texts, None)
        slots = {seq_id: runner.cache.start(seq_id) for seq_id in seq_ids}
        self.ahead = ChainsAhead(judged, deepest, lengths, slots, arriving, nodes, ends, runner.graphs.num_runs)
        runner.drop(seq_ids)
        return arriving

    def take_launched(
        self, draws: Draws, starts: Sequence[ChainStart], unread: Sequence[Sequence[int]]
    ) -> tuple[Int[Tensor, "2 rows nodes"], Float[Tensor, "rows outputs"] | None] | None:
        """The result of `launch_next`, if it is what this round needs and was not overwritten; else None."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return None
        slots = [self.runner.cache.start(start.seq_id) for start in starts]
        lengths = [self.runner.length(start.seq_id) for start in starts]
        valid = ahead.num_runs == self.runner.graphs.num_runs and slots == [ahead.slots.get(s.seq_id) for s in starts]
        rows = ahead.rows_for(draws, starts, unread, lengths) if valid else None
        if rows is None:
            self.pause = CHAINS_PAUSE
            return None
        return ahead.outputs_of(rows, starts)

    def run(
        self, shape: ChainShape, buffers: Buffers, num_ids: int, texts: UnreadTexts | None, heads: ParallelHeads | None
    ) -> tuple[Int[Tensor, "2 rows nodes"], Float[Tensor, "rows outputs"] | None]:
        """Run `body` over the filled tables, by the graph of this shape."""
        if buffers.features is not None and texts is not None:
            torch.cat(list(texts.features), out=buffers.features[: sum(map(len, texts.features))])
        key = shape, self.ids, num_ids
        return self.runner.graphs.run(key, lambda: self.body(shape, buffers, num_ids, texts, heads))

    def reserve(self, starts: Sequence[ChainStart], counts: Sequence[int], below: FixedRunner | None) -> bool:
        """Reserve cache room for so many tokens of each start, and for roots and draft tokens in the layers below;
        False if there is none."""
        seq_ids, depths = [start.seq_id for start in starts], [start.depth for start in starts]
        if below is not None and not below.cache.can_reserve(seq_ids, depths):
            return False
        try:
            if any(counts):
                self.runner.cache.reserve(seq_ids, counts)
        except OutOfBlocks:
            return False
        if below is not None:
            below.cache.reserve(seq_ids, depths)
        return True

    def arrays(
        self,
        buffers: Buffers,
        draws: Draws,
        starts: Sequence[ChainStart],
        order: Sequence[int],
        unread: Sequence[Sequence[int]],
        places: MaskedPositions | None,
        ahead: bool = False,
    ) -> dict[str, HostArray | Sequence[int]]:
        """The tables of all passes: the cache slots of the draft tokens are known before the tokens.

        Chains that are launched `ahead` start after the first token of each text plus `advance` tokens, which only the
        device knows.
        """
        deepest_first, keys = [starts[i] for i in order], draws.host_keys(Purpose.COUPLED)
        chains, depths = np.zeros((2, len(buffers.packed.lines["depths"])), dtype=np.int64)
        for chain, start in enumerate(deepest_first):
            chains[start.row], depths[start.row] = chain, start.depth
        arrays: dict[str, HostArray | Sequence[int]] = {
            "keys": [signed(keys[start.row]) for start in deepest_first],
            "positions": [draws.root_places[start.row] + 1 + ahead for start in deepest_first],
            "begins": [draws.rows[start.row].tokens[-1] for start in deepest_first],
            "roots": [row.tokens[-1] for row in draws.rows],
            "chains": chains,
            "depths": depths,
        }
        runner, block_size, spare_slot = self.runner, self.runner.cache.blocks.block_size, self.runner.spare_slot
        if buffers.text is not None:
            ends = [0 if ahead else len(text) - 1 for text in unread]
            reads = [Read(s.seq_id, text, judged=[end]) for s, text, end in zip(starts, unread, ends, strict=True)]
            layout, lasts = runner.lay_out(reads)
            for start in starts if ahead else ():
                runner.tails[start.seq_id] = Tail(0, [-1], [0])
            if buffers.below:
                layout.sources = sources_of(unread, order, buffers.text.shape.rows)
            judged = [lasts[i] for i in order] if buffers.text.shape.judged else []
            arrays["text"] = buffers.text.numbers(layout, judged, block_size, spare_slot)
        if buffers.places is not None and places is not None:
            layout, judged = self.lay_out_places(buffers, places, starts, order)
            arrays["places"] = buffers.places.numbers(layout, judged, block_size, spare_slot)
        going_on = [start._replace(depth=start.depth - 1) for start in deepest_first if start.depth > 1]
        return arrays | lay_out_steps(runner, "pass", buffers.passes, going_on)

    def lay_out_places(
        self, buffers: Buffers, places: MaskedPositions, starts: Sequence[ChainStart], order: Sequence[int]
    ) -> tuple[Layout, list[int]]:
        """The rows of the mask tokens, and those that predict each chain's tokens, equally many for each chain."""
        assert buffers.places is not None, "a pass over them"
        each = buffers.places.shape.judged // len(buffers.packed.lines["depths"])
        layout, firsts = self.runner.lay_out([Read(starts[i].seq_id, places.tokens[i], judged=[0]) for i in order])
        judged = []
        for first, i in zip(firsts, order, strict=True):
            count = places.num_predicted(starts[i].depth)
            judged += [first + places.first + i for i in range(count)] + [0] * (each - count)
        return layout, judged

    def shape_of(self, needed: ChainShape) -> ChainShape | None:
        """The shape of a captured graph that fits without too much padding, else of a new one; None if no graph can
        draft these chains."""
        fixed = fixed_steps(needed.steps, needed.depth, self.ids.vocab_size)
        if fixed is None:
            return None
        text = max(LEAST_TEXT, power_of_two(needed.text)) if needed.text else 0
        exact = ChainShape(power_of_two(needed.rows), needed.depth, fixed, text)
        return self.buffers.choose(exact, lambda shape: shape.holds(exact), ChainShape.size)

    def buffers_of(self, shape: ChainShape, texts: UnreadTexts | None, heads: ParallelHeads | None) -> Buffers:
        """The buffers of this shape; the same tensors while the shape is kept."""
        return self.buffers.take(shape, lambda: self.make_buffers(shape, texts, heads))

    def make_buffers(self, shape: ChainShape, texts: UnreadTexts | None, heads: ParallelHeads | None) -> Buffers:
        device, vocab, rows, keys = self.runner.device, self.ids.vocab_size, shape.rows, self.runner.most_keys
        passes, below = {}, below_of(texts)
        if texts is not None:
            passes["text"] = Shape(shape.text, 0, rows if texts.begins_chains else 0, keys)
        if below is not None:
            passes |= {f"below {level}": Shape(rows, 0, 0, below.most_keys) for level in range(shape.depth)}
            counters = self.runner.graphs.counters, below.graphs.counters
            self.runner.graphs.counters = [*dict.fromkeys(itertools.chain(*counters))]
        if heads is None:
            passes |= {f"pass {level}": Shape(rows, 0, rows, keys) for level in range(shape.depth - 1)}
        elif heads.places is not None and (count := heads.places.count(shape.depth)):
            num_predicted = rows * heads.places.num_predicted(shape.depth)
            passes["places"] = Shape(power_of_two(rows * count), 0, num_predicted, keys)
        sizes = row_sizes(rows, shape.steps, vocab)
        names = "keys", "positions", "begins", "roots", "chains", "depths", "advance"
        sizes |= dict.fromkeys(names, ((rows,), np.dtype(np.int64)))
        sizes |= {name: ((Inputs.size_of(each),), np.dtype(np.int32)) for name, each in passes.items()}
        packed = PackedTables(sizes, device, self.buffers.buffer)
        inputs = {name: Inputs(each, device, flat=packed.tables[name]) for name, each in passes.items()}
        text, places = inputs.pop("text", None), inputs.pop("places", None)
        steps = {kind: [each for name, each in inputs.items() if name.startswith(kind)] for kind in ("pass", "below")}
        features = None if texts is None else texts.features[0].new_zeros(shape.text, *texts.features[0].shape[1:])
        first = None
        if heads is not None and heads.states is not None:
            first = heads.states[0].new_zeros(rows, len(heads.states[0]))
        elif texts is None:
            first = self.runner.graphs.logits(rows, vocab)
        return Buffers(packed, steps["pass"], first, text, features, places, steps["below"])

    def body(
        self,
        shape: ChainShape,
        buffers: Buffers,
        num_ids: int,
        texts: UnreadTexts | None,
        heads: ParallelHeads | None,
    ) -> tuple[Int[Tensor, "2 rows nodes"], Float[Tensor, "rows outputs"] | None]:
        """All steps: returns tokens and parents of the round's rows, and the layers' outputs at the ends of their
        texts. It only calls tensor operations, so it can be captured."""
        tables, logits, states, ends = buffers.packed.tables, buffers.first, None, None
        below, advance = below_of(texts), tables["advance"]
        if buffers.text is not None and buffers.features is not None and texts is not None:
            buffers.text.states = texts.fuse(buffers.features)
            if below is not None:
                of_roots = states_below(below, buffers.below[0], self.ids.model_ids(tables["begins"]))
                together = torch.cat([buffers.text.states, of_roots])
                buffers.text.states = together[buffers.text.columns["sources"]]
            text = buffers.text.judged_further(advance) if texts.begins_chains else buffers.text
            passed = self.read(text)
            if texts.begins_chains:
                logits, states = self.ids.target_logits(passed.logits), passed.hidden[text.judged]
                ends = None if texts.roots is None else states[tables["chains"]]
        head_inputs = self.head_inputs(shape, buffers, logits, heads)
        transforms = Transforms(shape.steps, lambda: tables, self.ids.vocab_size, num_ids)
        draws = Draws.of_tables(transforms, tables["keys"])
        row = torch.arange(shape.rows, device=tables["keys"].device)
        drawn = row.new_empty(shape.rows, 0)
        for level in range(shape.depth):
            if heads is not None:
                path = torch.cat([tables["begins"][:, None], drawn.clamp_min(0)], dim=1)
                logits = heads.logits(head_inputs, path)
            assert logits is not None, "chains begin with logits, text or heads"
            at = PathState(row, drawn, tables["positions"] + advance + level)
            latest = next_tokens(draws, logits, at)
            drawn = torch.cat([drawn, latest], dim=1)
            if level < len(buffers.passes):
                step, tokens = buffers.passes[level].advanced(advance), self.ids.model_ids(latest[:, 0]).clamp_min(0)
                step.columns["tokens"].copy_(tokens)
                if below is not None:
                    step.states = states_below(below, buffers.below[1 + level], tokens)
                elif texts is not None and texts.next_states is not None and states is not None:
                    step.states = texts.next_states(states)
                passed = self.read(step)
                logits, states = self.ids.target_logits(passed.logits), passed.hidden
        return nodes_of(drawn, tables["roots"], tables["chains"], tables["depths"]), ends

    def head_inputs(
        self, shape: ChainShape, buffers: Buffers, first: Tensor | None, heads: ParallelHeads | None
    ) -> HeadInputs:
        """The inputs of heads, after a pass over the mask tokens if there are any."""
        places = buffers.places
        if places is None or heads is None or heads.places is None:
            return HeadInputs(first)
        state = heads.places.state
        places.states = None if state is None else state.repeat(places.shape.rows, 1)  # kernels need contiguous rows
        passed = self.read(places)
        logits, states = self.ids.target_logits(passed.logits), passed.hidden[places.judged]
        return HeadInputs(first, logits.unflatten(0, (shape.rows, -1)), states.unflatten(0, (shape.rows, -1)))

    def read(self, inputs: Inputs) -> Outputs:
        return run_pass(self.runner.decoder, self.runner.ops, inputs, self.runner.cache)


def states_below(below: FixedRunner, step: Inputs, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows hidden"]:
    """The states of the layers below for these tokens, one of each chain."""
    step.columns["tokens"].copy_(tokens)
    return run_pass(below.decoder, below.ops, step, below.cache).hidden


def nodes_of(
    draft_tokens: Int[Tensor, "chains depth"],
    roots: Int[Tensor, " rows"],
    chains: Int[Tensor, " rows"],
    depths: Int[Tensor, " rows"],
) -> Int[Tensor, "2 rows nodes"]:
    """Tokens and parents of the round's rows, as in a DraftTree: a chain ends at its depth or before a token of -1."""
    drafted, steps = draft_tokens[chains], torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    inside = ((drafted >= 0) & (steps < depths[:, None])).long().cumprod(1) > 0
    no_parent = torch.full_like(roots, -1)[:, None]
    tokens = torch.cat([roots[:, None], torch.where(inside, drafted, -1)], dim=1)
    return torch.stack([tokens, torch.cat([no_parent, torch.where(inside, steps, -1)], dim=1)])


def next_tokens(draws: Draws, logits: Float[Tensor, "rows vocab"], at: PathState) -> Int[Tensor, "rows 1"]:
    """One draft token after each node."""
    return in_parts(at, lambda part, at: draws.children(logits[part], at, 1, survival=False).tokens)
