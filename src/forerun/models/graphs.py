"""GraphRunner: a runner whose passes have fixed shapes; on a GPU each shape is captured once as a graph and replayed.

This module decides which shapes there are, and when one is captured. A replay costs the host one copy of small tables
and one launch, instead of a launch for every kernel. Without a GPU the same functions simply run. A tree is one pass
over its nodes, each with its own path; `keep` moves the accepted nodes' keys and values together. Rounds of guesses are
captured however many sequences there are; a round that shrinks, as drafts do near the end of an answer, is padded to a
size that was captured before. Prompt chunks, whose sizes vary and whose cost is arithmetic, run without capture.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.cache.paged import PagedCache
from forerun.device import Captures, upload
from forerun.models.chain_graph import ChainGraph
from forerun.models.chains import Chains, IdExchange, Start
from forerun.models.decoder import Decoder
from forerun.models.fixed import LEAST_PATH, PADDED, Inputs, Layout, Outputs, Shape, run_pass, tile_rows
from forerun.models.ops import SPLIT, ops_for, power_of_two
from forerun.models.runner import DeviceTokens, PartialPass, Read, Runner, States, Tail
from forerun.sampling.draws import Draws

logger = logging.getLogger(__name__)
BodyResult = TypeVar("BodyResult")
SMALL_ROWS = 128  # a pass of so many rows waits for memory: more rows, up to here, cost little
LEAST_ROWS = 16  # the smallest size
SHORT_READ, MOST_ROWS = 64, 2048  # a larger pass is captured where no sequence reads more, up to so many rows
CAPTURED_STEP, LARGE_STEP = 64, 128  # the rows of larger passes are multiples of these: captured ones, and others
CAPTURES = Lock()  # one capture at a time: it fails where another thread captures
WARM_UPS = 2  # runs before a capture, in which libraries choose and compile what they will launch


class Graphs:
    """Functions of static buffers, captured at first use and then replayed; where capture is off they just run."""

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.device = device
        self.enabled = enabled and device.type == "cuda"
        self.captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.refused: set[Hashable] = set()  # what could not be captured, and runs without
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.num_replays = 0

    def run(self, key: Hashable | None, body: Callable[[], BodyResult]) -> BodyResult:
        """What `body` gives; with a key the same tensors every time, which hold until anything else is run here."""
        if self.device.type == "cpu":
            return body()
        with torch.cuda.device(self.device):  # kernels are launched on the current one
            return self.replay(key, body) if self.enabled and key is not None else body()

    def replay(self, key: Hashable, body: Callable[[], BodyResult]) -> BodyResult:
        """Replay what was captured under this key, now if it was not; run what cannot be captured."""
        if key not in self.captured and key not in self.refused:
            self.try_capture(key, body)
        if key in self.refused:
            return body()
        graph, result = self.captured[key]
        graph.replay()
        self.num_replays += 1
        same: BodyResult = result
        return same

    def try_capture(self, key: Hashable, body: Callable[[], Any]) -> None:
        """Capture, or note that it fails. What fails without capture too raises."""
        began_s = time.perf_counter()
        self.stream = self.stream or torch.cuda.Stream(self.device)
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):  # everything is compiled here
                body()
            try:
                with CAPTURES:
                    self.captured[key] = self.capture(body)
            except RuntimeError as error:
                self.refused.add(key)
                logger.warning("A pass could not be captured as a graph and runs without, slower: %s", error)
        here.wait_stream(self.stream)
        Captures.num += 1
        Captures.taken_s += time.perf_counter() - began_s

    def capture(self, body: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Record on this object's stream, which is the current one. All its graphs share one pool of memory."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = body()
        self.pool = self.pool or graph.pool()
        return graph, result


class GraphRunner(Runner):
    """Reads as Runner does, with the decoder's matrix products as its loader made them for this device."""

    resumes = False
    draws_unseen = True

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        super().__init__(decoder, cache)
        self.ops = ops_for(self.device)
        self.graphs = Graphs(self.device)
        self.tables: dict[tuple[Shape, bool], Inputs] = {}
        self.chain_graph: ChainGraph | None = None
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
        tables = self.tables_of(shape, inputs is not None)
        tables.fill(layout, judged, self.cache.blocks.block_size, self.spare_slot)
        if drawn is not None:
            place(drawn, tables.columns["tokens"])
        if tables.states is not None and inputs is not None:
            tables.states[: len(inputs)] = inputs
        outputs = self.run(tables, tuple(taps))
        total = len(layout.tokens)
        logits = outputs.hidden.new_empty(0, self.decoder.config.vocab_size, dtype=torch.float32)
        return States(
            logits=logits if outputs.logits is None else outputs.logits[: len(judged)].clone(),
            hidden=outputs.hidden[:total].clone(),
            taps=None if outputs.taps is None else outputs.taps[:total].clone(),
        )

    def draw_chains(
        self,
        draws: Draws,
        starts: Sequence[Start],
        logits: Float[Tensor, "starts vocab"],
        ids: IdExchange,
        states: bool = False,
        before: Float[Tensor, "starts hidden"] | None = None,
    ) -> Chains | None:
        """The same as a graph, whose guesses the host does not see. A runner's ids are always the same ones."""
        assert before is None, "it reads tokens alone"
        assert not states, "a graph leaves no states"
        if self.chain_graph is None:
            self.chain_graph = ChainGraph(self, ids)
        assert self.chain_graph.ids is ids, "a graph is captured with its ids"
        return self.chain_graph.draw(draws, starts, logits)

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
        if rows > SMALL_ROWS and (longest_read > SHORT_READ or rows > MOST_ROWS):
            size = -(-rows // LARGE_STEP) * LARGE_STEP
            return Shape(size, path, power_of_two(num_judged) if num_judged else 0, keys, captured=False)
        size = self.captured_rows(rows, path, num_judged > 0)
        return Shape(size, path, size if num_judged else 0, self.most_keys if self.graphs.enabled else keys)

    def captured_rows(self, rows: int, path: int, judges: bool) -> int:
        """The size of a captured pass, or a new one if too much of every captured one would be padding."""
        if rows > SMALL_ROWS:
            return -(-rows // CAPTURED_STEP) * CAPTURED_STEP
        own, most = max(LEAST_ROWS, power_of_two(rows)), min(SMALL_ROWS, PADDED * rows)
        there = (s.rows for s, _ in self.tables if s.path == path and (s.judged > 0) == judges)
        return min((size for size in there if own <= size <= most), default=own)

    def tables_of(self, shape: Shape, of_states: bool) -> Inputs:
        """Tables of this shape, for tokens or states; always the same tensors where a graph uses them."""
        embedding = self.decoder.embedding if of_states else None
        if not (shape.captured and self.graphs.enabled):
            return Inputs(shape, self.device, embedding)
        if (shape, of_states) not in self.tables:
            self.tables[shape, of_states] = Inputs(shape, self.device, embedding)
        return self.tables[shape, of_states]

    def run(self, inputs: Inputs, taps: tuple[int, ...]) -> Outputs:
        """The pass over these tables, replayed where its shape is captured."""

        def body() -> Outputs:
            return run_pass(self.decoder, self.ops, inputs, self.cache, taps)

        key = (inputs.shape, taps, inputs.states is not None)
        return self.graphs.run(key if inputs.shape.captured else None, body)


def place(drawn: DeviceTokens, tokens: Tensor) -> None:
    """Overwrite the tokens that only the device knows; padding tokens may become any id."""
    source = upload(drawn.source, torch.long, tokens.device)
    known = drawn.tokens.flatten()[source.clamp_min(0)].clamp_min(0).to(tokens.dtype)
    own = tokens[: len(source)]
    own.copy_(torch.where(source >= 0, known, own))
