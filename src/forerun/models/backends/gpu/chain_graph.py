"""ChainGraph: the whole chains of a draft model, of layers that read states or of heads, as one captured graph.

Draw, read, draw, ... without a launch in between. Layers that read states begin with text: what the target has made of
it is mapped, read and kept in the same graph, and a guess is read beside what the layers made of its parent. Layers
over others read what these make of roots and guesses, in the same graph too. Heads that guess several places ahead need
no pass between two draws, and at most one over masked places before them. A graph does the same work for every round,
so nothing in it may depend on a request: what requests ask for is in tensors.
Chains may end at different depths: the deepest come first, and at every step the rows that have ended are padding. So a
graph also serves shorter chains and fewer rows than it was captured for. What it gives is the round's tree as the
device holds it, row by row.
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
    ReadingRunner,
    below_of,
    lay_out_steps,
    set_by_verdict,
    sources_of,
)
from forerun.models.backends.gpu.fixed import Inputs, Layout, Shape, run_pass
from forerun.models.backends.gpu.verdicts import fixed_steps, in_parts, kinds_of, row_sizes
from forerun.models.chains import (
    Chains,
    Foreseen,
    HeadsAhead,
    IdExchange,
    JudgedChains,
    MaskedPlaces,
    Start,
    UnreadTexts,
)
from forerun.models.decoder import States
from forerun.models.rows import half_step, power_of_two
from forerun.models.runner import Read, Tail
from forerun.sampling.draws import Draws
from forerun.sampling.noise import Purpose, signed
from forerun.sampling.tables import RoundTables
from forerun.sampling.transforms import PathState, Transforms
from forerun.tree import HostTree


class ChainGraph:
    """Draws chains with a runner, in graphs of a few sizes (powers of two)."""

    def __init__(self, runner: ReadingRunner, ids: IdExchange) -> None:
        self.runner = runner
        self.ids = ids
        self.buffers = KeptShapes[ChainShape, Buffers](runner.graphs)
        self.ahead: ChainsAhead | None = None
        self.pause = 0  # rounds until chains are launched ahead again

    @torch.inference_mode()
    def draw(
        self,
        draws: Draws,
        starts: Sequence[Start],
        logits: Float[Tensor, "starts vocab"] | None,
        texts: UnreadTexts | None,
        heads: HeadsAhead | None = None,
    ) -> Chains | None:
        """The chains, behind these logits or texts, which are kept, or by heads; None, with nothing changed, where the
        graph cannot draw this round or there is no room.

        Grammars have no say in it: the host would have to see the guesses. Nor is it known how likely these are, so
        chains that are to end where that is too little are left to others.
        """
        if draws.rejection or type(draws) is not Draws or any(start.min_survival for start in starts):
            return None
        unread: Sequence[Sequence[int]] = [()] * len(starts) if texts is None else texts.tokens
        order = sorted(range(len(starts)), key=lambda i: -starts[i].depth)
        rows = self.tables_of(draws, [starts[i] for i in order])
        steps, depth = rows.steps._replace(masks=0), starts[order[0]].depth
        most = half_step(depth) if heads is None else depth  # there are no more heads, perhaps
        shape = self.shape_of(ChainShape(len(draws.rows), most, steps, sum(map(len, unread))))
        if shape is None:
            return None
        runner, seq_ids = self.runner, [start.seq_id for start in starts]
        places = None if heads is None else heads.places
        steps_of = [s.depth - 1 if heads is None else 0 for s in starts] if places is None else map(len, places.tokens)
        counts = [len(text) + count for text, count in zip(unread, steps_of, strict=True)]
        if not self.reserve(starts, counts, below := below_of(texts)):
            return None
        begun = self.take(draws, starts, unread)
        if begun is not None:
            nodes, ends = begun
            runner.tails |= {seq_id: Tail(0) for seq_id in seq_ids}  # which hold the texts that were read
        else:
            buffers = self.buffers_of(shape, texts, heads)
            arrays = self.arrays(buffers, draws, starts, order, unread, places)
            if below is not None:
                arrays |= lay_out_steps(below, "below", buffers.below, [starts[i] for i in order])
            buffers.packed.fill(rows.arrays(shape.steps) | arrays)
            self.give(buffers, order, logits, heads)
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

    def tables_of(self, draws: Draws, starts: Sequence[Start]) -> RoundTables:
        """What the transforms of these chains read, in their order."""
        drafted = [draws.rows[start.row] for start in starts]
        return draws.tables if drafted == draws.rows else RoundTables(drafted, self.ids.vocab_size)

    def give(
        self,
        buffers: Buffers,
        order: Sequence[int],
        logits: Float[Tensor, "starts vocab"] | None,
        heads: HeadsAhead | None,
    ) -> None:
        """Set what chains begin with, in their order: logits, or states of heads."""
        if buffers.given is not None and logits is not None:
            in_order = order == [*range(len(order))]
            ordered = logits if in_order else logits[upload(order, torch.long, self.runner.device)]
            self.runner.graphs.put_logits(ordered, buffers.given)
        elif buffers.given is not None and heads is not None and heads.states is not None:
            torch.stack([heads.states[i] for i in order], out=buffers.given[: len(order)])

    @torch.inference_mode()
    def begin(self, judged: JudgedChains, starts: Sequence[Start], texts: UnreadTexts) -> Download | None:
        """Launch chains behind what a verdict accepts of the chains of these starts, all as deep as the deepest.

        All their nodes are read as text. What was refused lies behind the chains' own tokens, which no row of them sees
        and which the chains overwrite. None, with nothing done, where tables depend on the tokens themselves, there is
        no room, or too many chains were in vain.
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
        set_by_verdict(buffers, judged, starts, runner.device)
        nodes, ends = self.run(shape, buffers, draws.num_ids, texts, None)
        slots = {seq_id: runner.cache.start(seq_id) for seq_id in seq_ids}
        self.ahead = ChainsAhead(judged, deepest, lengths, slots, arriving, nodes, ends, runner.graphs.num_runs)
        runner.drop(seq_ids)
        return arriving

    def take(
        self, draws: Draws, starts: Sequence[Start], unread: Sequence[Sequence[int]]
    ) -> tuple[Int[Tensor, "2 rows nodes"], Float[Tensor, "rows outputs"] | None] | None:
        """What `begin` has launched, if it is what is asked for and is still there; None where it has to be made."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return None
        slots = [self.runner.cache.start(start.seq_id) for start in starts]
        lengths = [self.runner.length(start.seq_id) for start in starts]
        there = ahead.num_runs == self.runner.graphs.num_runs and slots == [ahead.slots.get(s.seq_id) for s in starts]
        rows = ahead.rows_for(draws, starts, unread, lengths) if there else None
        if rows is None:
            self.pause = CHAINS_PAUSE
            return None
        return ahead.outputs_of(rows, starts)

    def run(
        self, shape: ChainShape, buffers: Buffers, num_ids: int, texts: UnreadTexts | None, heads: HeadsAhead | None
    ) -> tuple[Int[Tensor, "2 rows nodes"], Float[Tensor, "rows outputs"] | None]:
        """What `body` gives over tables that are filled, replayed."""
        if buffers.features is not None and texts is not None:
            torch.cat(list(texts.features), out=buffers.features[: sum(map(len, texts.features))])
        key = shape, self.ids, num_ids
        return self.runner.graphs.run(key, lambda: self.body(shape, buffers, num_ids, texts, heads))

    def reserve(self, starts: Sequence[Start], counts: Sequence[int], below: ReadingRunner | None) -> bool:
        """Make room for so many tokens of each, and for roots and guesses below; False where there is none."""
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
        starts: Sequence[Start],
        order: Sequence[int],
        unread: Sequence[Sequence[int]],
        places: MaskedPlaces | None,
        ahead: bool = False,
    ) -> dict[str, HostArray | Sequence[int]]:
        """The tables of all steps: where tokens lie is known before they are.

        Chains that are launched `ahead` begin behind the first token of each text, or as many further as `advance` says
        by then, which only the device knows.
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
        self, buffers: Buffers, places: MaskedPlaces, starts: Sequence[Start], order: Sequence[int]
    ) -> tuple[Layout, list[int]]:
        """Rows of the masked places, and which of them make each chain's guesses, as many for each chain."""
        assert buffers.places is not None, "a pass over them"
        each = buffers.places.shape.judged // len(buffers.packed.lines["depths"])
        layout, firsts = self.runner.lay_out([Read(starts[i].seq_id, places.tokens[i], judged=[0]) for i in order])
        judged = []
        for first, i in zip(firsts, order, strict=True):
            count = places.num_guesses(starts[i].depth)
            judged += [first + places.first + guess for guess in range(count)] + [0] * (each - count)
        return layout, judged

    def shape_of(self, needed: ChainShape) -> ChainShape | None:
        """The shape of a captured graph, or of a new one if too much of a captured one would be padding."""
        fixed = fixed_steps(needed.steps, needed.depth, self.ids.vocab_size)
        if fixed is None:
            return None
        text = max(LEAST_TEXT, power_of_two(needed.text)) if needed.text else 0
        exact = ChainShape(power_of_two(needed.rows), needed.depth, fixed, text)
        return self.buffers.choose(exact, lambda shape: shape.holds(exact), ChainShape.size)

    def buffers_of(self, shape: ChainShape, texts: UnreadTexts | None, heads: HeadsAhead | None) -> Buffers:
        """The buffers of this shape, always the same as long as it is kept."""
        return self.buffers.take(shape, lambda: self.make_buffers(shape, texts, heads))

    def make_buffers(self, shape: ChainShape, texts: UnreadTexts | None, heads: HeadsAhead | None) -> Buffers:
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
            num_guesses = rows * heads.places.num_guesses(shape.depth)
            passes["places"] = Shape(power_of_two(rows * count), 0, num_guesses, keys)
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
        heads: HeadsAhead | None,
    ) -> tuple[Int[Tensor, "2 rows nodes"], Float[Tensor, "rows outputs"] | None]:
        """All steps: tokens and parents of the round's rows, and what layers made of their texts. Tensor code alone."""
        tables, logits, states, ends = buffers.packed.tables, buffers.given, None, None
        below, advance = below_of(texts), tables["advance"]
        if buffers.text is not None and buffers.features is not None and texts is not None:
            buffers.text.states = texts.fuse(buffers.features)
            if below is not None:
                of_roots = states_below(below, buffers.below[0], self.ids.own(tables["begins"]))
                together = torch.cat([buffers.text.states, of_roots])
                buffers.text.states = together[buffers.text.columns["sources"]]
            text = buffers.text.judged_later(advance) if texts.begins_chains else buffers.text
            passed = self.read(text)
            if texts.begins_chains:
                logits, states = self.ids.spread(passed.logits), passed.hidden[text.judged]
                ends = None if texts.roots is None else states[tables["chains"]]
        foreseen = self.foresee(shape, buffers, logits, heads)
        transforms = Transforms(shape.steps, lambda: tables, self.ids.vocab_size, num_ids)
        draws = Draws.of_tables(transforms, tables["keys"])
        row = torch.arange(shape.rows, device=tables["keys"].device)
        drawn = row.new_empty(shape.rows, 0)
        for level in range(shape.depth):
            if heads is not None:
                path = torch.cat([tables["begins"][:, None], drawn.clamp_min(0)], dim=1)
                logits = heads.logits(foreseen, path)
            assert logits is not None, "chains begin with logits, text or heads"
            at = PathState(row, drawn, tables["positions"] + advance + level)
            guesses = likeliest(draws, logits, at)
            drawn = torch.cat([drawn, guesses], dim=1)
            if level < len(buffers.passes):
                step, tokens = buffers.passes[level].moved(advance), self.ids.own(guesses[:, 0]).clamp_min(0)
                step.columns["tokens"].copy_(tokens)
                if below is not None:
                    step.states = states_below(below, buffers.below[1 + level], tokens)
                elif texts is not None and texts.beside is not None and states is not None:
                    step.states = texts.beside(states)
                passed = self.read(step)
                logits, states = self.ids.spread(passed.logits), passed.hidden
        return nodes_of(drawn, tables["roots"], tables["chains"], tables["depths"]), ends

    def foresee(self, shape: ChainShape, buffers: Buffers, first: Tensor | None, heads: HeadsAhead | None) -> Foreseen:
        """What heads guess from, with the masked places read, where there are any."""
        places = buffers.places
        if places is None or heads is None or heads.places is None:
            return Foreseen(first)
        state = heads.places.state
        places.states = None if state is None else state.repeat(places.shape.rows, 1)  # kernels read whole rows
        passed = self.read(places)
        logits, states = self.ids.spread(passed.logits), passed.hidden[places.judged]
        return Foreseen(first, logits.unflatten(0, (shape.rows, -1)), states.unflatten(0, (shape.rows, -1)))

    def read(self, inputs: Inputs) -> States:
        return run_pass(self.runner.decoder, self.runner.ops, inputs, self.runner.cache)


def states_below(below: ReadingRunner, step: Inputs, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows hidden"]:
    """What the layers below make of these tokens, one of each chain."""
    step.columns["tokens"].copy_(tokens)
    return run_pass(below.decoder, below.ops, step, below.cache).hidden


def nodes_of(
    guesses: Int[Tensor, "chains depth"],
    roots: Int[Tensor, " rows"],
    chains: Int[Tensor, " rows"],
    depths: Int[Tensor, " rows"],
) -> Int[Tensor, "2 rows nodes"]:
    """Tokens and parents of the round's rows, as in a DraftTree: a chain ends where its depth says, or at no token."""
    mine, steps = guesses[chains], torch.arange(guesses.shape[1], device=guesses.device)
    inside = ((mine >= 0) & (steps < depths[:, None])).long().cumprod(1) > 0
    no_parent = torch.full_like(roots, -1)[:, None]
    tokens = torch.cat([roots[:, None], torch.where(inside, mine, -1)], dim=1)
    return torch.stack([tokens, torch.cat([no_parent, torch.where(inside, steps, -1)], dim=1)])


def likeliest(draws: Draws, logits: Float[Tensor, "rows vocab"], at: PathState) -> Int[Tensor, "rows 1"]:
    """One guess after each node."""
    return in_parts(at, lambda part, at: draws.children(logits[part], at, 1, survival=False).tokens)
