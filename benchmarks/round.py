"""The cost of a round without model passes: an engine and a model drafter whose passes return prepared logits.

    python -m benchmarks.round [ROUNDS [MEGABYTES]]

Everything except the passes is the engine's code: scheduler, draws, draft growth, sanitize, verify, accept, caches,
detokenising. Drafts are chains of depth 4. Probabilities fall like a language model's (rank ** -1.5), except in the
rows called "flat", whose logits are normal with deviation 1. Printed are milliseconds of one round without the time in
`Runner.read`: medians, and quartiles of the total. With MEGABYTES, each of the target's passes first sums that much
memory, like a real pass that reads its weights, so that the processor's caches hold other data.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import tokenizers
import torch
from benchmarks.markdown import show, show_header, spread_cells
from torch import Tensor
from typing_extensions import override

from forerun.bench.figures import Spread
from forerun.cache.paged import PagedCache
from forerun.config import EngineOptions, Speculation
from forerun.draft.model.model import ModelDrafter
from forerun.engine.engine import Engine
from forerun.engine.request_check import RequestChecker
from forerun.kernels.sampling import find_sampling_kernels
from forerun.models.decoder import Outputs
from forerun.models.runner import DeviceTokens, PartialPass, Read, Runner, Tail
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer

DEPTH, CONTEXTS, WARM_UP, LENGTH = 4, 48, 8, 8192
VERBS = ("plan", "draft", "run target", "verify", "accept")
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("temperature 1", {"temperature": 1.0}),
    ("temperature 0", {"temperature": 0.0}),
    ("temperature 1, flat", {"temperature": 1.0}),
    ("temperature 0.8, two penalties", {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5}),
    (
        "temperature 0.8, three penalties",
        {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    ),
    ("temperature 0.8, top-p 0.9", {"temperature": 0.8, "top_p": 0.9}),
    ("temperature 0.6, top-p 0.95, top-k 20", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
)


@dataclass
class Clock:
    """Seconds of the current round by verb, without the time of passes."""

    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    passes: float = 0.0

    @contextmanager
    def verb(self, name: str) -> Iterator[None]:
        started, passes = time.perf_counter(), self.passes
        yield
        self.spent[name] += time.perf_counter() - started - (self.passes - passes)


class ReadyRunner(Runner):
    """Returns logits from a table, by the token that is read, and updates its cache's tables as every runner does."""

    def __init__(self, table: Tensor, clock: Clock, batch: int, weights: Tensor | None = None) -> None:
        cache = PagedCache(layers=1, kv_heads=1, head_dim=1, num_tokens=batch * LENGTH, dtype=torch.float32)
        config = SimpleNamespace(vocab_size=table.shape[1], max_positions=LENGTH)
        super().__init__(SimpleNamespace(config=config, executor=SimpleNamespace(chain_drawer=lambda *_: None)), cache)  # type: ignore[arg-type]
        self.table, self.clock, self.weights = table, clock, weights

    @override
    def read(
        self,
        reads: Sequence[Read],
        taps: Sequence[int] = (),
        drawn: DeviceTokens | None = None,
        partial: PartialPass | None = None,
        inputs: Tensor | None = None,
    ) -> Outputs:
        started = time.perf_counter()
        if self.weights is not None:
            self.weights.sum()
        self.cache.reserve([r.seq_id for r in reads], [len(r.tokens) for r in reads])
        for read in reads:
            self.tails.setdefault(read.seq_id, Tail(0)).grow(read.parents, len(read.tokens))
        judged = [read.tokens[i] % CONTEXTS for read in reads for i in read.judged]
        states = Outputs(self.table[torch.tensor(judged, dtype=torch.long)], torch.empty(0, 1), None)
        self.clock.passes += time.perf_counter() - started
        return states


class TimedEngine(Engine):
    """An engine that times its verbs with a clock; the rest of a round is counted as verify."""

    clock: Clock

    @override
    def plan(self, alone=None, drafts=True):  # type: ignore[no-untyped-def]
        with self.clock.verb("plan"):
            return super().plan(alone, drafts)

    @override
    def draft(self, plan):  # type: ignore[no-untyped-def]
        with self.clock.verb("draft"):
            return super().draft(plan)

    @override
    def run_target(self, plan, draft):  # type: ignore[no-untyped-def]
        with self.clock.verb("run target"):
            return super().run_target(plan, draft)

    @override
    def accept(self, target, verdict):  # type: ignore[no-untyped-def]
        with self.clock.verb("accept"):
            return super().accept(target, verdict)


def tables(vocab: int, flat: bool) -> tuple[Tensor, Tensor]:
    """Logits of a target and of a drafter that resembles it, by the last token."""
    random = torch.Generator().manual_seed(0)
    target = torch.randn(CONTEXTS, vocab, generator=random)
    if not flat:
        ranks = torch.stack([torch.randperm(vocab, generator=random) for _ in range(CONTEXTS)])
        target = -1.5 * (ranks + 1.0).log() + 0.1 * target
    return target, target + 0.3 * torch.randn(CONTEXTS, vocab, generator=random)


def words(vocab: int) -> Tokenizer:
    """A byte-level tokenizer of `vocab` invented words."""
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0")
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


def rounds(
    vocab: int, batch: int, params: dict[str, Any], flat: bool, count: int, weights: Tensor | None
) -> list[dict[str, float]]:
    """The seconds of each of `count` rounds, by verb and in total."""
    clock, text = Clock(), words(vocab)
    target, draft = tables(vocab, flat)
    speculation = Speculation(depth=DEPTH)
    engine = TimedEngine(
        ReadyRunner(target, clock, batch, weights),
        ModelDrafter(ReadyRunner(draft, clock, batch), vocab),
        options=EngineOptions(max_num_seqs=batch, speculation=speculation),
        num_ids=vocab,
        kernels=find_sampling_kernels(),
    )
    engine.clock = clock
    requests = RequestChecker(text, vocab, LENGTH, eos_ids=(), default=speculation, drafter_names=("model",))
    for i in range(batch):
        prompt = [(i * 31 + j * 7) % vocab for j in range(200)]
        for sequence in requests.sequences(Request.of(prompt, SamplingParams(seed=i, max_tokens=None, **params))):
            engine.submit(sequence)
    measured = []
    for number in range(count + WARM_UP):
        clock.spent.clear()
        started, passes = time.perf_counter(), clock.passes
        engine.step()
        total = time.perf_counter() - started - (clock.passes - passes)
        if number >= WARM_UP:
            verify = total - sum(clock.spent.values())
            measured.append({**clock.spent, "verify": verify, "total": total})
    return measured


def main(count: int = 60, megabytes: int = 0) -> None:
    weights = torch.ones(megabytes * 250_000) if megabytes else None
    print(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    show_header("vocabulary", "batch", "sampling", *VERBS, "total", "quartiles")
    for vocab in (4096, 151_936):
        for batch in (1, 8):
            for name, params in CASES:
                measured = rounds(vocab, batch, params, "flat" in name, count, weights)
                by_verb = [statistics.median(r[verb] for r in measured) * 1e3 for verb in VERBS]
                total = spread_cells(Spread.of(1e3 * r["total"] for r in measured))
                show(f"{vocab:,}", batch, name, *(f"{ms:.2f}" for ms in by_verb), *total)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
