"""Graphs: captures functions of static buffers as CUDA graphs and replays them; KeptShapes: their buffers by shape.

This module decides when a capture happens and how many graphs are kept; a function that cannot be captured runs
uncaptured. All graphs of a runner share one memory pool, and the tables of all graphs of a kind share one buffer.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.device import Captures
from forerun.models.rows import power_of_two

logger = logging.getLogger(__name__)
BodyResult = TypeVar("BodyResult")
ShapeKey = TypeVar("ShapeKey", bound=Hashable)
Static = TypeVar("Static")
GraphKey = tuple[Any, ...]  # the shape of the buffers, then other arguments that a graph is specific to
CAPTURES = Lock()  # one capture at a time: it fails while another thread captures
LOGITS_ROWS = 128  # fewest rows of the shared logits buffer: 66 MB for a vocabulary of 128,000
MOST_SHAPES = 64  # graphs kept of each kind: passes, verdicts, chains
OFTEN = 1000  # rounds padded to a larger graph before a shape gets a graph of its own
LEAST_BYTES = 1 << 16  # of the buffer for the tables of a kind of graphs
WARM_UPS = 2  # runs before a capture, in which libraries choose and compile their kernels


class Graphs:
    """Runs functions of static buffers: captured at the first use, then replayed; without capture they simply run."""

    def __init__(
        self,
        device: torch.device,
        enabled: bool = True,
        logits_rows: int = LOGITS_ROWS,
        counters: Sequence[Tensor] = (),
    ) -> None:
        self.device = device
        self.logits_rows = logits_rows
        self.counters = counters  # updated by the functions; restored after the warm-up runs of a capture
        self.kept_logits: dict[int, Tensor] = {}
        self.copied: tuple[ReferenceType[Tensor], int] | None = None  # a copy of kept logits, and their address
        self.enabled = enabled and device.type == "cuda"
        self.captured: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.refused: set[GraphKey] = set()  # functions that could not be captured
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.num_replays = 0
        self.num_runs = 0

    def run(self, key: GraphKey | None, body: Callable[[], BodyResult]) -> BodyResult:
        """Run `body` and return its result; with a key, by a graph, whose result is valid until the next run."""
        self.num_runs += 1
        if self.device.type != "cuda":
            return body()
        with torch.cuda.device(self.device):  # kernels are launched on the current one
            return self.replay(key, body) if self.enabled and key is not None else body()

    def logits(self, rows: int, vocab: int) -> Float[Tensor, "rows vocab"]:
        """The first `rows` rows of the static logits buffer that graphs share; it has at least `logits_rows` rows.

        If more are needed, a larger buffer replaces it; graphs captured earlier keep using the old one.
        """
        kept = self.kept_logits.get(vocab)
        if kept is None or len(kept) < rows:
            with torch.inference_mode(False):  # it may be written outside of that mode too
                kept = self.kept_logits[vocab] = torch.zeros(max(rows, self.logits_rows), vocab, device=self.device)
        return kept[:rows]

    def keep_logits(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """Copy the logits into the static buffer, as float32."""
        return self.logits(*logits.shape).copy_(logits)

    def copy_logits(self, kept: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """A copy of a pass's logits; if they lie in the static buffer, `put_logits` of the copy need not move them."""
        copied, buffer = kept.clone(), self.kept_logits.get(kept.shape[1])
        in_buffer = buffer is not None and buffer.data_ptr() == kept.data_ptr()
        self.copied = (ref(copied), kept.data_ptr()) if in_buffer else None  # other memory may be reused
        return copied

    def put_logits(self, logits: Float[Tensor, "rows vocab"], kept: Float[Tensor, "most vocab"]) -> None:
        """Write `logits` to the first rows of the static buffer, unless it still holds them from their own pass."""
        if self.copied is None or self.copied[0]() is not logits or self.copied[1] != kept.data_ptr():
            self.copied = None
            kept[: len(logits)] = logits

    def forget(self, shape: Hashable) -> None:
        """Drop the graphs captured for buffers of this shape; a running graph finishes first."""
        self.captured = {key: graph for key, graph in self.captured.items() if key[0] != shape}
        self.refused = {key for key in self.refused if key[0] != shape}
        if not self.captured:
            self.pool = None  # a pool is freed with its last graph

    def replay(self, key: GraphKey, body: Callable[[], BodyResult]) -> BodyResult:
        """Replay the graph of this key, after capturing it if needed; run `body` if it cannot be captured."""
        if key not in self.captured and key not in self.refused:
            self.try_capture(key, body)
        if key in self.refused:
            return body()
        graph, result = self.captured[key]
        graph.replay()
        self.num_replays += 1
        same: BodyResult = result
        return same

    def try_capture(self, key: GraphKey, body: Callable[[], Any]) -> None:
        """Capture `body`, or note that it cannot be captured. Errors of `body` itself are raised."""
        began_s = time.perf_counter()
        self.stream = self.stream or torch.cuda.Stream(self.device)
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            counted = [counter.clone() for counter in self.counters]
            for _ in range(WARM_UPS):  # kernels are compiled here
                body()
            for counter, before in zip(self.counters, counted, strict=True):
                counter.copy_(before)
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
        """Record `body` on this object's stream, which is the current one, with the shared memory pool."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = body()
        self.pool = self.pool or graph.pool()
        return graph, result


class KeptShapes(OrderedDict[ShapeKey, Static]):
    """The static tensors of one kind of graphs by shape, least recently used first.

    Beyond MOST_SHAPES the least recently used are dropped with their graphs, and captured again when needed.
    """

    def __init__(self, graphs: Graphs) -> None:
        super().__init__()
        self.graphs = graphs
        self.flat: Tensor | None = None
        self.num_missed = Counter[ShapeKey]()  # rounds of shapes without a graph
        self.stand_ins: dict[ShapeKey, ShapeKey] = {}  # the larger shapes that they were padded to

    def choose(self, exact: ShapeKey, holds: Callable[[ShapeKey], bool], size: Callable[[ShapeKey], Any]) -> ShapeKey:
        """The shape to pad a round to: `exact` if it is kept, else the smallest kept one that `holds` it, else `exact`.

        A capture takes as long as many rounds, so a shape that fits into a kept one is captured after OFTEN misses.
        """
        if exact in self:
            return exact
        if exact not in self.stand_ins:
            larger = [shape for shape in self if holds(shape)]
            if not larger:
                return exact
            self.stand_ins[exact] = min(larger, key=size)
        self.num_missed[exact] += 1
        return exact if self.num_missed[exact] > OFTEN else self.stand_ins[exact]

    def take(self, shape: ShapeKey, make: Callable[[], Static]) -> Static:
        """The tensors of this shape, made by `make` if they are not kept."""
        if shape not in self:
            while len(self) >= MOST_SHAPES:
                self.graphs.forget(self.popitem(last=False)[0])
            self[shape] = make()
            self.stand_ins.clear()
            del self.num_missed[shape]
            if len(self.num_missed) > MOST_SHAPES:
                self.num_missed.clear()
        self.move_to_end(shape)
        return self[shape]

    def buffer(self, num_bytes: int) -> Tensor:
        """Memory for the tables of one shape; other shapes share it, since each round fills all its tables.

        If it is too small, a larger buffer replaces it; the old one is freed with the last graph that reads it.
        """
        if self.flat is None or len(self.flat) < num_bytes:
            with torch.inference_mode(False):
                size = power_of_two(max(num_bytes, LEAST_BYTES))
                self.flat = torch.zeros(size, dtype=torch.uint8, device=self.graphs.device)
        return self.flat[:num_bytes]
