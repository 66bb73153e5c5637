"""Graphs: functions of static buffers on a GPU, captured once and replayed.

This module decides when a capture happens, and what becomes of a function that cannot be captured.
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
from forerun.device import Captures

logger = logging.getLogger(__name__)
BodyResult = TypeVar("BodyResult")
CAPTURES = Lock()  # one capture at a time: it fails where another thread captures
LOGITS_ROWS = 128  # that graphs share at least: 66 MB of a vocabulary of 128,000
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
        self.kept_logits: dict[tuple[int, int], Tensor] = {}
        self.enabled = enabled and device.type == "cuda"
        self.captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.refused: set[Hashable] = set()  # what could not be captured, and runs without
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.num_replays = 0

    def run(self, key: Hashable | None, body: Callable[[], BodyResult]) -> BodyResult:
        """What `body` gives; with a key the same tensors every time, which hold until anything else is run here."""
        if self.device.type != "cuda":
            return body()
        with torch.cuda.device(self.device):  # kernels are launched on the current one
            return self.replay(key, body) if self.enabled and key is not None else body()

    def logits(self, rows: int, vocab: int) -> Float[Tensor, "rows vocab"]:
        """The first rows of a static buffer that all graphs share, or of one for this size alone beyond `logits_rows`.

        It is laid out for all of these at once, since graphs find it where it lay when they were captured.
        """
        size = max(rows, self.logits_rows), vocab
        if size not in self.kept_logits:
            with torch.inference_mode(False):  # it may be written outside of that mode too
                self.kept_logits[size] = torch.zeros(*size, device=self.device)
        return self.kept_logits[size][:rows]

    def keep_logits(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """The logits in float32, in that buffer."""
        return self.logits(*logits.shape).copy_(logits)

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
