"""Graphs: functions of static buffers on a GPU, captured once and replayed; KeptShapes: the buffers of one kind.

This module decides when a capture happens, how many graphs are kept, and what becomes of a function that cannot be
captured. All graphs of a runner share one pool of memory, and the tables of one kind of graphs one buffer.
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
GraphKey = tuple[Any, ...]  # the shape of the buffers, and what else a graph was captured for
CAPTURES = Lock()  # one capture at a time: it fails where another thread captures
LOGITS_ROWS = 128  # that graphs share at least: 66 MB of a vocabulary of 128,000
MOST_SHAPES = 64  # of one kind of graphs that are kept: passes, verdicts, chains
OFTEN = 1000  # rounds of a shape that larger graphs serve, behind which it is worth one of its own
LEAST_BYTES = 1 << 16  # of the buffer that the tables of a kind lie in
WARM_UPS = 2  # runs before a capture, in which libraries choose and compile what they will launch


class Graphs:
    """Functions of static buffers, captured at first use and then replayed; where capture is off they just run."""

    def __init__(
        self,
        device: torch.device,
        enabled: bool = True,
        logits_rows: int = LOGITS_ROWS,
        counters: Sequence[Tensor] = (),
    ) -> None:
        self.device = device
        self.logits_rows = logits_rows
        self.counters = counters  # of what is computed, in which runs before a capture do not count
        self.kept_logits: dict[int, Tensor] = {}
        self.copied: tuple[ReferenceType[Tensor], int] | None = None  # a copy of what is kept, and where it is kept
        self.enabled = enabled and device.type == "cuda"
        self.captured: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.refused: set[GraphKey] = set()  # what could not be captured, and runs without
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.num_replays = 0
        self.num_runs = 0

    def run(self, key: GraphKey | None, body: Callable[[], BodyResult]) -> BodyResult:
        """What `body` gives; with a key the same tensors every time, which hold until anything else is run here."""
        self.num_runs += 1
        if self.device.type != "cuda":
            return body()
        with torch.cuda.device(self.device):  # kernels are launched on the current one
            return self.replay(key, body) if self.enabled and key is not None else body()

    def logits(self, rows: int, vocab: int) -> Float[Tensor, "rows vocab"]:
        """The first rows of a static buffer that graphs share, which is laid out for `logits_rows` at once.

        Beyond these it is laid out anew. Graphs that were captured before go on with the one that they found.
        """
        kept = self.kept_logits.get(vocab)
        if kept is None or len(kept) < rows:
            with torch.inference_mode(False):  # it may be written outside of that mode too
                kept = self.kept_logits[vocab] = torch.zeros(max(rows, self.logits_rows), vocab, device=self.device)
        return kept[:rows]

    def keep_logits(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """The logits in float32, in that buffer."""
        return self.logits(*logits.shape).copy_(logits)

    def copy_logits(self, kept: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """A copy of a pass's logits. If they lie in that buffer it holds them until `put_logits` or another pass."""
        copied, buffer = kept.clone(), self.kept_logits.get(kept.shape[1])
        lies_there = buffer is not None and buffer.data_ptr() == kept.data_ptr()
        self.copied = (ref(copied), kept.data_ptr()) if lies_there else None  # other memory may be used again
        return copied

    def put_logits(self, logits: Float[Tensor, "rows vocab"], kept: Float[Tensor, "most vocab"]) -> None:
        """Set the first rows of that buffer; nothing is moved where they lie there, behind the pass that made them."""
        if self.copied is None or self.copied[0]() is not logits or self.copied[1] != kept.data_ptr():
            self.copied = None
            kept[: len(logits)] = logits

    def forget(self, shape: Hashable) -> None:
        """Drop what was captured over buffers of this shape; a graph that is still running ends first."""
        self.captured = {key: graph for key, graph in self.captured.items() if key[0] != shape}
        self.refused = {key for key in self.refused if key[0] != shape}
        if not self.captured:
            self.pool = None  # which ends with the last of its graphs

    def replay(self, key: GraphKey, body: Callable[[], BodyResult]) -> BodyResult:
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

    def try_capture(self, key: GraphKey, body: Callable[[], Any]) -> None:
        """Capture, or note that it fails. What fails without capture too raises."""
        began_s = time.perf_counter()
        self.stream = self.stream or torch.cuda.Stream(self.device)
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            counted = [counter.clone() for counter in self.counters]
            for _ in range(WARM_UPS):  # everything is compiled here
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
        """Record on this object's stream, which is the current one. All its graphs share one pool of memory."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = body()
        self.pool = self.pool or graph.pool()
        return graph, result


class KeptShapes(OrderedDict[ShapeKey, Static]):
    """The static tensors of one kind of graphs, by their shape; those used the longest ago come first.

    Beyond MOST_SHAPES these are dropped, with their graphs. A round that needs them again captures again.
    """

    def __init__(self, graphs: Graphs) -> None:
        super().__init__()
        self.graphs = graphs
        self.flat: Tensor | None = None
        self.num_missed = Counter[ShapeKey]()  # rounds of shapes that were not there
        self.stand_ins: dict[ShapeKey, ShapeKey] = {}  # what served them

    def choose(self, own: ShapeKey, holds: Callable[[ShapeKey], bool], size: Callable[[ShapeKey], Any]) -> ShapeKey:
        """The shape that a round is padded to: its own, or if that is not there the smallest one that `holds` it.

        A capture takes as long as many rounds, so a shape that others can serve gets one when it was missed OFTEN.
        """
        if own in self:
            return own
        if own not in self.stand_ins:
            there = [shape for shape in self if holds(shape)]
            if not there:
                return own
            self.stand_ins[own] = min(there, key=size)
        self.num_missed[own] += 1
        return own if self.num_missed[own] > OFTEN else self.stand_ins[own]

    def take(self, shape: ShapeKey, make: Callable[[], Static]) -> Static:
        """The tensors of this shape: those that are there, else what `make` gives."""
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
        """Room for the tables of one shape, in which those of others may lie too: each round sets all of its own.

        Where there is too little a larger buffer is made, and the old one goes with the last graph that reads it.
        """
        if self.flat is None or len(self.flat) < num_bytes:
            with torch.inference_mode(False):
                size = power_of_two(max(num_bytes, LEAST_BYTES))
                self.flat = torch.zeros(size, dtype=torch.uint8, device=self.graphs.device)
        return self.flat[:num_bytes]
