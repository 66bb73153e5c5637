"""A pass of fixed shape: its inputs are tables of few sizes, so that the pass can be captured as a CUDA graph.

Reads become rows of a table on the host (`Layout`); `Inputs` holds the tables on the device, in one buffer that one
copy fills; `run_pass` runs the decoder over them. Padding rows write to a slot that no sequence owns. Prompts, chains
and trees use the same pass, because each row finds its keys by its own path. `graphs.py` captures and replays passes.

The pass of a whole model fuses residual additions and norms. Trained heads compute other things before, between and
after their layers, and run the layers alone (`FixedExecutor`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.device import HostArray, overwrite
from forerun.models.backends.base import AttentionInputs, DecoderParts, Stream
from forerun.models.backends.gpu.capture import LOGITS_ROWS, Graphs
from forerun.models.backends.gpu.ops import SPLIT, TILE_ROWS, KeyMap, Ops, ops_for
from forerun.models.backends.torch_cpu.backend import TorchExecutor
from forerun.models.batch import SINGLE_QUERIES, TokenBatch
from forerun.models.decoder import Decoder, Outputs, TapStates
from forerun.models.layer import Mlp, counters_of
from forerun.models.rows import few_rows
from forerun.models.runner import Read, Runner, Tail

ALL_KEYS = 1 << 30  # `shared` of a tile whose rows have all their keys in the same slots
LEAST_PATH = 16
PADDED = 4  # most times its own size to which a chain graph pads a round
ALIGNED = 4  # fewest numbers of a column, so that every column begins at an aligned address


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a pass: rows, the longest path outside a sequence's run of slots, rows with logits, keys of a row.

    `captured`: whether passes of this shape are captured as graphs on a GPU.
    """

    rows: int
    path: int
    judged: int
    keys: int
    captured: bool = True


@dataclass(slots=True)
class Layout:
    """The rows of one pass as columns of host numbers; `starts`, `firsts`, `counts` and `shared` have one per tile.

    The columns are those of `KeyMap`, and `slots`, the cache slots that the rows write.
    """

    tile: int  # most rows of a tile
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # of tokens that only the device knows, their index there
    prefixes: list[int] = field(default_factory=list)
    paths: list[Sequence[int]] = field(default_factory=list)
    tile_of: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)

    def add(
        self, tokens: Sequence[int], nodes: range, run: int, length: int, paths: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Add rows for these nodes of a sequence's tail: a chain, or a tree whose `paths` lead to each node.

        The sequence's slots begin at `run`; `length` of them are committed, and node n uses the n-th slot after those.
        A path lists nodes from the committed text on.
        """
        begin, count, tail = len(self.tokens), len(nodes), run + length
        self.tokens += tokens
        self.slots += range(tail + nodes.start, tail + nodes.stop)
        if paths is None:  # by ranges, since a prompt has many rows
            self.positions += range(length + nodes.start, length + nodes.stop)
            self.prefixes += range(length + nodes.start + 1, length + nodes.stop + 1)
            self.paths += [()] * count
        else:
            leads = [next((i for i, node in enumerate(path) if node != i), len(path)) for path in paths]
            self.positions += [length + len(path) - 1 for path in paths]
            self.prefixes += [length + lead for lead in leads]
            self.paths += [[tail + node for node in path[lead:]] for path, lead in zip(paths, leads, strict=True)]
        for first in range(begin, begin + count, self.tile):  # keys that the rows of a tile share are read once
            size = min(self.tile, begin + count - first)
            apart = any(self.paths[first : first + size])
            self.tile_of += [len(self.firsts)] * size
            self.starts.append(run)
            self.firsts.append(first)
            self.counts.append(size)
            self.shared.append(min(self.prefixes[first : first + size]) // SPLIT * SPLIT if apart else ALL_KEYS)

    @property
    def longest_path(self) -> int:
        """Most nodes of a row whose slots are not those of a chain."""
        return max(map(len, self.paths), default=0)


class Inputs:
    """The tables of a pass on the device: views of one buffer, which `fill` sets in one copy.

    With `states`, the layers read these instead of the tokens' embeddings, or with them. The buffer may be part of a
    larger one, `flat`, which several passes share.
    """

    KEY_COLUMNS = ("positions", "prefixes", "tile_of", "firsts", "counts", "shared")  # those of a KeyMap
    COLUMNS = ("tokens", "starts", "sources", "slots", *KEY_COLUMNS)
    SLOTS, POSITIONS, PREFIXES = 3, 4, 5  # indexes of these columns

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        states: Float[Tensor, "rows inputs"] | None = None,
        flat: Int[Tensor, " numbers"] | None = None,
    ) -> None:
        self.shape = shape
        self.states = states
        rows, sizes = shape.rows, [max(ALIGNED, shape.rows)] * len(self.COLUMNS)
        size, self.judged_from = self.size_of(shape), sum(sizes)
        self.flat = torch.zeros(size, dtype=torch.int32, device=device) if flat is None else flat
        self.num_tiles = 0
        *columns, judged, paths = self.flat.split([*sizes, shape.judged, rows * shape.path])
        self.columns = {name: column[:rows] for name, column in zip(self.COLUMNS, columns, strict=True)}
        self.judged = judged
        self.paths = paths.view(rows, shape.path)

    @classmethod
    def size_of(cls, shape: Shape) -> int:
        """Number of int32 values in the tables of this shape."""
        return len(cls.COLUMNS) * max(ALIGNED, shape.rows) + shape.judged + shape.rows * shape.path

    def fill(self, layout: Layout, judged: Sequence[int], block_size: int, spare_slot: int) -> None:
        """Set all tables to the rows of a pass, followed by padding."""
        self.num_tiles = len(layout.firsts)
        overwrite(self.flat, torch.from_numpy(self.numbers(layout, judged, block_size, spare_slot)))

    def numbers(self, layout: Layout, judged: Sequence[int], block_size: int, spare_slot: int) -> HostArray:
        """The values to which `fill` sets the buffer."""
        numbers = array("i", bytes(4 * self.flat.shape[0]))
        rows, width = len(layout.tokens), max(ALIGNED, self.shape.rows)
        for i, name in enumerate(self.COLUMNS):
            column = [run // block_size for run in layout.starts] if name == "starts" else getattr(layout, name)
            numbers[i * width : i * width + len(column)] = array("i", column)
        for i, padding in ((self.SLOTS, spare_slot), (self.POSITIONS, -1)):
            numbers[i * width + rows : i * width + width] = array("i", [padding]) * (width - rows)
        numbers[self.judged_from : self.judged_from + len(judged)] = array("i", judged)
        for row, path in enumerate(layout.paths if self.shape.path else ()):
            first = self.judged_from + self.shape.judged + row * self.shape.path
            numbers[first : first + len(path)] = array("i", path)
        return np.frombuffer(numbers, np.int32)

    def advanced(self, steps: Int[Tensor, " rows"]) -> Inputs:
        """A copy in which each row's position and slot are `steps` further on; it shares the tensor of tokens."""
        advanced, width = copy(self), max(ALIGNED, self.shape.rows)
        table = self.flat[self.SLOTS * width : (self.PREFIXES + 1) * width].view(3, width)[:, : self.shape.rows] + steps
        names = [self.COLUMNS[number] for number in range(self.SLOTS, self.PREFIXES + 1)]
        advanced.columns = self.columns | dict(zip(names, table.to(torch.int32), strict=True))
        return advanced

    def judged_further(self, steps: Int[Tensor, " judged"]) -> Inputs:
        """A copy with logits of other rows: each `steps` rows further on."""
        further = copy(self)
        further.judged = self.judged + steps.to(torch.int32)
        return further

    def numbers_after(self, numbers: HostArray, steps: int, rows: int, spare_slot: int) -> HostArray:
        """The values for chains of one token each, `steps` steps later, when only the first `rows` chains go on."""
        numbers = numbers.copy()
        table = numbers[: self.judged_from].reshape(len(self.COLUMNS), -1)
        table[self.SLOTS : self.PREFIXES + 1, :rows] += steps
        table[:, rows:], numbers[self.judged_from + rows :] = 0, 0
        table[self.SLOTS, rows:], table[self.POSITIONS, rows:] = spare_slot, -1
        return numbers

    def key_map(self, block_size: int) -> KeyMap:
        """The KeyMap of these tables; each sequence occupies one run of blocks."""
        num_blocks = -(-self.shape.keys // block_size)
        blocks = torch.arange(num_blocks, dtype=torch.int32, device=self.flat.device)
        return KeyMap(
            **{name: self.columns[name] for name in self.KEY_COLUMNS},
            tables=self.columns["starts"][:, None] + blocks,
            paths=self.paths,
            block_size=block_size,
            num_keys=self.shape.keys,
            num_runs=None if self.shape.captured or self.shape.path else self.num_tiles,
        )


@dataclass(frozen=True, slots=True)
class FixedBatch(TokenBatch):
    """The rows of a pass, with padding, as layers read them; `where` locates the keys of each row."""

    where: KeyMap
    spare_slot: int

    @classmethod
    def of(cls, inputs: Inputs, cache: PagedCache) -> FixedBatch:
        columns, blocks = inputs.columns, cache.blocks
        where, spare_slot = inputs.key_map(blocks.block_size), blocks.num_blocks * blocks.block_size
        return cls(columns["tokens"], columns["positions"], columns["slots"], [], where, spare_slot)

    def bidirectional(self) -> FixedBatch:
        """As in TokenBatch; all reads must be chains."""
        where = self.where
        run = where.tables[where.tile_of.long(), 0]  # identifies the sequence
        longest = torch.where(run[:, None] == run, where.positions, -1).amax(1)
        last = torch.where(where.positions < 0, -1, longest)
        return replace(self, where=replace(where, positions=last, prefixes=last + 1))

    def without_first(self, count: int) -> tuple[FixedBatch, list[int] | slice]:
        """As in TokenBatch. The remaining keys move `count` slots to the front, so that blocks stay aligned."""
        where, positions = self.where, (self.positions - count).clamp_min(-1)
        slots = torch.where(positions < 0, self.spare_slot, self.slots - count)
        shared = torch.where(where.shared >= ALL_KEYS, ALL_KEYS, (where.shared - SPLIT).clamp_min(0))
        shifted = replace(
            where,
            positions=positions,
            prefixes=(where.prefixes - count).clamp_min(0),
            paths=(where.paths - count).clamp_min(0),
            shared=shared,
        )
        return replace(self, positions=positions, slots=slots, where=shifted), slice(None)


def run_layers(
    parts: DecoderParts | Decoder,
    ops: Ops,
    batch: FixedBatch,
    cache: PagedCache,
    layers: range,
    x: Stream,
    read: AttentionInputs | None = None,
    taps: Sequence[int] = (),
) -> tuple[Stream, Stream, dict[int, Stream]]:
    """Run these layers; returns the residual stream before the last MLP's output is added, that output (before its
    output norm, if the layer has one), and the streams entering the layers in `taps`.

    The first layer's attention reads `x`, normed, or `read` unchanged.
    """
    c, where = parts.config, batch.where
    rope, at = (parts.rope.cos, parts.rope.sin), (batch.positions, batch.slots)
    delta: Stream | None = None
    delta_gain: Tensor | None = None
    kept: dict[int, Tensor] = {}
    for i in layers:
        layer, mlp = parts.layers[i].attention, parts.layers[i].mlp
        x, normed = (x, read) if read is not None else ops.add_norm(x, delta, layer.norm, c.norm_eps, delta_gain)
        read = None
        if i in taps:
            kept[i] = x
        store = (cache.keys[i], cache.values[i])
        query = ops.rotate_store(layer.qkv(normed), rope, at, layer, c, store)
        mixed = layer.out(ops.attend(query, *store, where, layer.window, layer.sinks, c.score_cap))
        x, after = ops.add_norm(x, mixed, mlp.norm, c.norm_eps, layer.out_norm)
        delta, delta_gain = run_mlp(mlp, ops, normed if mlp.parallel else after, batch.positions), mlp.out_norm
    assert delta is not None, "at least one layer"
    return x, delta, kept


def run_mlp(mlp: Mlp, ops: Ops, x: Stream, positions: Int[Tensor, " total"]) -> Stream:
    """The output of an MLP, dense or of experts."""
    dense = None if mlp.dense is None else mlp.dense.down(ops.activate(mlp.dense.gate_up(x), mlp.dense))
    if mlp.router is not None:
        return ops.experts(x, mlp.router.linear(x), positions, mlp, dense)
    assert dense is not None, "a layer without a router has a dense MLP"
    return dense


def run_pass(
    decoder: Decoder,
    ops: Ops,
    inputs: Inputs,
    cache: PagedCache,
    taps: Sequence[int] = (),
    keep: Callable[[Tensor], Tensor] = Tensor.float,
) -> Outputs:
    """One pass of the decoder over the tables; the logits go through `keep`.

    It only calls tensor operations and never reads a value, so it can be captured. Outputs of padding rows are garbage.
    """
    batch, c = FixedBatch.of(inputs, cache), decoder.config
    if not decoder.has_plain_forward:
        hidden = decoder.forward(batch, cache, inputs=inputs.states, taps=taps).last
        judged = hidden[inputs.judged]
        logits = decoder.logits(judged) if len(judged) else hidden.new_empty(0, c.vocab_size)
        return Outputs(keep(logits), hidden, None)
    x = decoder.embedding[batch.tokens] if inputs.states is None else inputs.states
    x, delta, kept = run_layers(decoder, ops, batch, cache, range(len(decoder.layers)), x, taps=taps)
    x, normed = ops.add_norm(x, delta, decoder.norm, c.norm_eps, decoder.layers[-1].mlp.out_norm)
    kept |= {len(decoder.layers): x, -1: normed}
    judged = normed[inputs.judged]
    logits = decoder.head(judged) if inputs.shape.judged else x.new_empty(0, c.vocab_size)
    tapped = TapStates.of_stacked(torch.stack([kept[t] for t in taps], dim=1)) if taps else None
    return Outputs(keep(logits), x, tapped)


def tile_rows(heads: int, kv_heads: int) -> int:
    """Rows in a tile of the attention kernel, each with all query heads that share a key head."""
    group = heads // kv_heads
    return max(1, TILE_ROWS // group)


class FixedExecutor(TorchExecutor):
    """Runs a decoder's layers over the rows of a pass of fixed shape, with padding."""

    def __init__(self, parts: DecoderParts, ops: Ops) -> None:
        super().__init__(parts, SINGLE_QUERIES)
        self.ops = ops

    @property
    def num_experts_read(self) -> int:
        """As in Executor; reading it waits for the device."""
        return int(torch.cat(counters).sum()) if (counters := counters_of(self.parts.layers)) else 0

    def run(
        self, layers: range, x: Stream, batch: TokenBatch, cache: PagedCache, read: AttentionInputs | None = None
    ) -> Stream:
        assert isinstance(batch, FixedBatch), "passes are of fixed shape"
        x, delta, _ = run_layers(self.parts, self.ops, batch, cache, layers, x, read)
        gain = self.parts.layers[layers[-1]].mlp.out_norm
        return self.ops.add_norm(x, delta, None, self.parts.config.norm_eps, gain)[0]

    def norm_rows(self, x: Stream, gain: Float[Tensor, " hidden"]) -> Stream:
        return self.ops.add_norm(x.contiguous(), None, gain, self.parts.config.norm_eps)[1]

    def write_kv(self, read: AttentionInputs, batch: TokenBatch, cache: PagedCache) -> None:
        assert isinstance(batch, FixedBatch), "passes are of fixed shape"
        c, rope, at = self.parts.config, self.parts.rope, (batch.positions, batch.slots)
        for i, layer in enumerate(self.parts.layers):
            store, qkv = (cache.keys[i], cache.values[i]), layer.attention.qkv(read)
            self.ops.rotate_store(qkv, (rope.cos, rope.sin), at, layer.attention, c, store)


class FixedRunner(Runner):
    """A runner of passes of fixed shape: what its graphs of passes, chains and verdicts share."""

    def __init__(self, decoder: Decoder, cache: PagedCache, most_judged: int = 0) -> None:
        super().__init__(decoder, cache)
        c, rows = decoder.config, max(LOGITS_ROWS, few_rows(most_judged))
        self.ops = ops_for(self.device)
        self.graphs = Graphs(self.device, logits_rows=rows, counters=counters_of(decoder.layers))
        self.tile = tile_rows(c.heads, c.kv_heads)
        self.spare_slot = cache.blocks.num_blocks * cache.blocks.block_size  # after all blocks: the cache's padding
        self.most_keys = -(-min(c.max_positions, self.spare_slot) // SPLIT) * SPLIT

    def lay_out(self, reads: Sequence[Read]) -> tuple[Layout, list[int]]:
        """The reads as rows, and the rows that need logits. The cache must have room for them."""
        layout, judged = Layout(self.tile), []
        for read in reads:
            judged += [len(layout.tokens) + i for i in read.judged]
            tail = self.tails.setdefault(read.seq_id, Tail(0))
            nodes = tail.grow(read.parents, len(read.tokens))
            paths = None if tail.is_chain else [tail.path(n) for n in nodes]
            layout.add(read.tokens, nodes, self.cache.start(read.seq_id), self.cache.length(read.seq_id), paths)
        return layout, judged
