"""A pass of fixed shape: its inputs are tables of a few sizes, so that the pass can be captured and replayed.

This module decides how reads become tables (`Layout`, on the host), where the tables live on the device (`Inputs`: one
buffer, one copy per pass), and in which order the parts of a decoder use them (`run_pass`). Padding rows write to a
slot that no sequence owns. The same pass serves prompts, chains and trees, because a row's keys are found by its own
path. `graphs.py` captures and replays passes.

A whole model's pass fuses sums and norms from its first layer to its head. Trained heads have computations of their own
before, between and behind their layers, and ask for the layers alone (`FixedExecutor`).
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
from forerun.models.backends.base import DecoderParts, Entered, Stream
from forerun.models.backends.gpu.ops import SPLIT, TILE_ROWS, KeyMap, Ops
from forerun.models.backends.torch_cpu.backend import TorchExecutor
from forerun.models.batch import EACH_ALONE, TokenBatch
from forerun.models.decoder import Decoder, States, Tapped
from forerun.models.layer import Mlp, counters_of

ALL_KEYS = 1 << 30  # a tile whose rows have all their keys in the same slots
LEAST_PATH = 16
PADDED = 4  # how many times its rows a small pass may be padded to
ALIGNED = 4  # numbers of a column, so that the next one begins where a kernel likes it, for any number of rows


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a pass: rows, the longest path away from a sequence's run, rows judged, keys of a row.

    `captured`: whether passes of this shape are captured on a GPU and replayed.
    """

    rows: int
    path: int
    judged: int
    keys: int
    captured: bool = True


@dataclass(slots=True)
class Layout:
    """The rows of one pass as host numbers, a column each; `starts` and the tile columns have an entry per tile."""

    tile: int  # most rows of a tile
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # where tokens are found that only the device knows
    prefixes: list[int] = field(default_factory=list)
    paths: list[Sequence[int]] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)

    def add(
        self, tokens: Sequence[int], nodes: range, run: int, length: int, paths: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Rows for nodes of a tail: a chain, unless paths lead to each of them from behind the committed text.

        The sequence's slots begin at `run`, `length` of them are committed, and node n lies in the n-th behind those.
        """
        begin, count, behind = len(self.tokens), len(nodes), run + length
        self.tokens += tokens
        self.slots += range(behind + nodes.start, behind + nodes.stop)
        if paths is None:  # by ranges: a prompt has many rows
            self.positions += range(length + nodes.start, length + nodes.stop)
            self.prefixes += range(length + nodes.start + 1, length + nodes.stop + 1)
            self.paths += [()] * count
        else:
            leads = [next((i for i, node in enumerate(path) if node != i), len(path)) for path in paths]
            self.positions += [length + len(path) - 1 for path in paths]
            self.prefixes += [length + lead for lead in leads]
            self.paths += [[behind + node for node in path[lead:]] for path, lead in zip(paths, leads, strict=True)]
        for first in range(begin, begin + count, self.tile):  # what rows of a tile see in the same slots is read once
            size = min(self.tile, begin + count - first)
            apart = any(self.paths[first : first + size])
            self.homes += [len(self.firsts)] * size
            self.starts.append(run)
            self.firsts.append(first)
            self.counts.append(size)
            self.shared.append(min(self.prefixes[first : first + size]) // SPLIT * SPLIT if apart else ALL_KEYS)

    @property
    def longest_path(self) -> int:
        """Most nodes of a row that lie away from where a chain's would."""
        return max(map(len, self.paths), default=0)


class Inputs:
    """The tables of a pass on the device: views of one buffer, which `fill` sets in one copy.

    With `states` these are read in place of the tokens' own, or beside them. The buffer may be part of a larger one,
    `flat`, which several passes share.
    """

    KEY_COLUMNS = ("positions", "prefixes", "homes", "firsts", "counts", "shared")  # those of a KeyMap
    COLUMNS = ("tokens", "starts", "sources", "slots", *KEY_COLUMNS)
    SLOTS, POSITIONS, PREFIXES = 3, 4, 5  # the numbers of columns

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
        """How many numbers there are."""
        return len(cls.COLUMNS) * max(ALIGNED, shape.rows) + shape.judged + shape.rows * shape.path

    def fill(self, layout: Layout, judged: Sequence[int], block_size: int, spare_slot: int) -> None:
        """Set all tables to a pass's rows, and padding behind them."""
        self.num_tiles = len(layout.firsts)
        overwrite(self.flat, torch.from_numpy(self.numbers(layout, judged, block_size, spare_slot)))

    def numbers(self, layout: Layout, judged: Sequence[int], block_size: int, spare_slot: int) -> HostArray:
        """What `fill` sets the buffer to."""
        numbers, rows, width = (
            array("i", bytes(4 * self.flat.shape[0])),
            len(layout.tokens),
            max(ALIGNED, self.shape.rows),
        )
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

    def moved(self, steps: Int[Tensor, " rows"]) -> Inputs:
        """A copy whose rows stand so many tokens later, each by its own; it shares the tensor of tokens."""
        moved, width = copy(self), max(ALIGNED, self.shape.rows)
        table = self.flat[self.SLOTS * width : (self.PREFIXES + 1) * width].view(3, width)[:, : self.shape.rows] + steps
        names = [self.COLUMNS[number] for number in range(self.SLOTS, self.PREFIXES + 1)]
        moved.columns = self.columns | dict(zip(names, table.to(torch.int32), strict=True))
        return moved

    def judged_later(self, steps: Int[Tensor, " judged"]) -> Inputs:
        """A copy in which other rows are judged: each so many rows behind."""
        moved = copy(self)
        moved.judged = self.judged + steps.to(torch.int32)
        return moved

    def later(self, numbers: HostArray, steps: int, rows: int, spare_slot: int) -> HostArray:
        """Numbers of chains of one token each, as they are so many steps later, when only the first `rows` go on."""
        numbers = numbers.copy()
        table = numbers[: self.judged_from].reshape(len(self.COLUMNS), -1)
        table[self.SLOTS : self.PREFIXES + 1, :rows] += steps
        table[:, rows:], numbers[self.judged_from + rows :] = 0, 0
        table[self.SLOTS, rows:], table[self.POSITIONS, rows:] = spare_slot, -1
        return numbers

    def key_map(self, block_size: int) -> KeyMap:
        """Where rows find their keys; each tile's sequence is one run of blocks."""
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
    """All rows of a pass, padding among them, as layers read them: `where` says which keys each of them sees."""

    where: KeyMap
    spare_slot: int

    @classmethod
    def of(cls, inputs: Inputs, cache: PagedCache) -> FixedBatch:
        columns, blocks = inputs.columns, cache.blocks
        where, spare_slot = inputs.key_map(blocks.block_size), blocks.num_blocks * blocks.block_size
        return cls(columns["tokens"], columns["positions"], columns["slots"], [], where, spare_slot)

    def all_seen(self) -> FixedBatch:
        """As for any batch; its reads are chains."""
        where = self.where
        run = where.tables[where.homes.long(), 0]  # each sequence has one of its own
        beside = torch.where(run[:, None] == run, where.positions, -1).amax(1)
        last = torch.where(where.positions < 0, -1, beside)
        return replace(self, where=replace(where, positions=last, prefixes=last + 1))

    def without_first(self, count: int) -> tuple[FixedBatch, list[int] | slice]:
        """As for any batch. The others' keys lie `count` slots further ahead, so that blocks begin where they do."""
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
    read: Entered | None = None,
    taps: Sequence[int] = (),
) -> tuple[Stream, Stream, dict[int, Stream]]:
    """The stream before what the last of these layers adds, what that is, not normed yet where the layer norms it, and
    the streams entering layers of `taps`.

    The first layer's attention reads `x`, normed, or `read` as it is.
    """
    c, where = parts.config, batch.where
    turns, at = (parts.rope.cos, parts.rope.sin), (batch.positions, batch.slots)
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
        query = ops.rotate_store(layer.qkv(normed), turns, at, layer, c, store)
        mixed = layer.out(ops.attend(query, *store, where, layer.window, layer.sinks, c.score_cap))
        x, behind = ops.add_norm(x, mixed, mlp.norm, c.norm_eps, layer.out_norm)
        delta, delta_gain = run_mlp(mlp, ops, normed if mlp.parallel else behind, batch.positions), mlp.out_norm
    assert delta is not None, "at least one layer"
    return x, delta, kept


def run_mlp(mlp: Mlp, ops: Ops, x: Stream, positions: Int[Tensor, " total"]) -> Stream:
    """What an MLP adds to rows, dense or of experts."""
    every = None if mlp.every is None else mlp.every.down(ops.activate(mlp.every.gate_up(x), mlp.every))
    if mlp.router is not None:
        return ops.experts(x, mlp.router.linear(x), positions, mlp, every)
    assert every is not None, "a layer without a router has a dense MLP"
    return every


def run_pass(
    decoder: Decoder,
    ops: Ops,
    inputs: Inputs,
    cache: PagedCache,
    taps: Sequence[int] = (),
    keep: Callable[[Tensor], Tensor] = Tensor.float,
) -> States:
    """One pass of the decoder over the tables, whose logits become what `keep` makes of them.

    Tensor code alone: nothing here looks at a value. Padding is garbage.
    """
    batch, c = FixedBatch.of(inputs, cache), decoder.config
    if not decoder.layers_alone:
        hidden = decoder.forward(batch, cache, inputs=inputs.states, taps=taps).last
        judged = hidden[inputs.judged]
        logits = decoder.logits(judged) if len(judged) else hidden.new_empty(0, c.vocab_size)
        return States(keep(logits), hidden, None)
    x = decoder.embedding[batch.tokens] if inputs.states is None else inputs.states
    x, delta, kept = run_layers(decoder, ops, batch, cache, range(len(decoder.layers)), x, taps=taps)
    x, normed = ops.add_norm(x, delta, decoder.norm, c.norm_eps, decoder.layers[-1].mlp.out_norm)
    kept |= {len(decoder.layers): x, -1: normed}
    judged = normed[inputs.judged]
    logits = decoder.head(judged) if inputs.shape.judged else x.new_empty(0, c.vocab_size)
    tapped = Tapped.side_by_side(torch.stack([kept[t] for t in taps], dim=1)) if taps else None
    return States(keep(logits), x, tapped)


def tile_rows(heads: int, kv_heads: int) -> int:
    """Rows that one tile of the attention kernel holds, with all heads that share a key head."""
    group = heads // kv_heads
    return max(1, TILE_ROWS // group)


class FixedExecutor(TorchExecutor):
    """A decoder's layers over all rows of a pass of fixed shape, padding among them."""

    def __init__(self, parts: DecoderParts, ops: Ops) -> None:
        super().__init__(parts, EACH_ALONE)
        self.ops = ops

    @property
    def num_experts_read(self) -> int:
        """As in every executor; asking waits for the device."""
        return int(torch.cat(counters).sum()) if (counters := counters_of(self.parts.layers)) else 0

    def run(
        self, layers: range, x: Stream, batch: TokenBatch, cache: PagedCache, read: Entered | None = None
    ) -> Stream:
        assert isinstance(batch, FixedBatch), "passes are of fixed shape"
        x, delta, _ = run_layers(self.parts, self.ops, batch, cache, layers, x, read)
        gain = self.parts.layers[layers[-1]].mlp.out_norm
        return self.ops.add_norm(x, delta, None, self.parts.config.norm_eps, gain)[0]

    def norm_rows(self, x: Stream, gain: Float[Tensor, " hidden"]) -> Stream:
        return self.ops.add_norm(x.contiguous(), None, gain, self.parts.config.norm_eps)[1]

    def remember(self, read: Entered, batch: TokenBatch, cache: PagedCache) -> None:
        assert isinstance(batch, FixedBatch), "passes are of fixed shape"
        c, rope, at = self.parts.config, self.parts.rope, (batch.positions, batch.slots)
        for i, layer in enumerate(self.parts.layers):
            store, qkv = (cache.keys[i], cache.values[i]), layer.attention.qkv(read)
            self.ops.rotate_store(qkv, (rope.cos, rope.sin), at, layer.attention, c, store)
