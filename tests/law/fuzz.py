"""Engines built by hand over the reference pair, in any format, and what their caches hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

import torch

from forerun.accept.delta import Delta
from forerun.config import CPU_QUANTIZATIONS, EngineOptions, KernelChoice, Quantization, Speculation
from forerun.control.controller import Controller
from forerun.draft.base import Drafter
from forerun.draft.model.model import ModelDrafter
from forerun.engine.engine import Engine
from forerun.engine.request_check import RequestChecker
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from kit.checkpoints import SMALL, TARGET
from kit.quantized_folders import KINDS, write_quantized
from kit.unchecked import unchecked


class Numbers(TypedDict):
    """The number format of a model as LLM's options."""

    dtype: str
    quantize: Quantization | None
    kernels: KernelChoice


def number_format(name: str) -> Numbers:
    """ "float32", "bfloat16", "int8", "int4": by the compiled kernels where there are any; "int8 by torch" without.

    Of a folder of KINDS it is what the folder says.
    """
    numbers, _, torch = name.partition(" by ")
    quantize = next((each for each in CPU_QUANTIZATIONS if each == numbers), None)
    dtype = "auto" if quantize or name in KINDS else numbers
    return Numbers(dtype=dtype, quantize=quantize, kernels="torch" if torch else "auto")


@cache
def quantised(folder: Path, kind: str) -> TemporaryDirectory[str]:
    """The model of a folder in one of KINDS, for as long as tests run."""
    into = TemporaryDirectory()
    write_quantized(folder, Path(into.name), kind)
    return into


@dataclass(slots=True)
class Bench:
    """The reference pair, loaded once; engines of any size over it."""

    target: Blueprint
    draft: Blueprint
    runner: Runner
    reader: Runner

    @classmethod
    def of(cls, target: Path = TARGET, small: Path = SMALL, dtype: str = "float32") -> Bench:
        folders = [quantised(each, dtype).name if dtype in KINDS else str(each) for each in (target, small)]
        large, drafting = (Blueprint.of(folder, **number_format(dtype)) for folder in folders)
        return cls(large, drafting, large.load(1 << 14), drafting.load(1 << 14))

    def with_cache(self, runner: Runner, num_tokens: int) -> Runner:
        """The same weights over a cache of its own."""
        return Runner.of(runner.decoder, num_tokens, 16)

    def model_drafter(self, num_tokens: int = 4096) -> ModelDrafter:
        return ModelDrafter(self.with_cache(self.reader, num_tokens), self.target.config.vocab_size)

    def engine(
        self,
        drafter: Drafter | None = None,
        num_tokens: int = 8192,
        controller: Controller | None = None,
        options: EngineOptions | None = None,
    ) -> Engine:
        runner = self.with_cache(self.runner, num_tokens)
        return Engine(runner, drafter, options=options, controller=controller, num_ids=self.target.config.vocab_size)

    def requests(self) -> RequestChecker:
        c = self.target.config
        return RequestChecker(self.target.tokenizer(), c.vocab_size, c.max_positions, c.eos_ids, Speculation())


@cache
def bench_of(dtype: str) -> Bench:
    """The reference pair in a number format, loaded once for all tests; what they read is in caches of their own."""
    return Bench.of(dtype=dtype)


def run(
    engine: Engine,
    sequences: Sequence[object],
    on_delta: Callable[[Delta], None] = lambda _: None,
    after_round: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Run sequences to their ends; all their tokens. `on_delta` is called with every delta."""
    with unchecked():
        for sequence in sequences:
            engine.submit(sequence)  # type: ignore[arg-type]
        while engine.has_work:
            for delta in engine.step():
                on_delta(delta)
            after_round()
    return [sequence.tokens for sequence in sequences]  # type: ignore[attr-defined]


def run_checked(bench: Bench, engine: Engine, sequences: Sequence[object]) -> list[list[int]]:
    """`run`, with a check after each round that the cache holds what reading the committed tokens in one pass gives."""

    def check() -> None:
        assert not engine.runner.tails
        engine.runner.cache.check()
        for text in engine.sequences.values():
            if text.id in engine.runner.cache and text.num_read:
                reread = read_again(bench, engine.runner, text.tokens[: text.num_read])
                assert torch.equal(rows_of(engine.runner, text.id), reread)

    return run(engine, sequences, after_round=check)


def read_again(bench: Bench, runner: Runner, tokens: Sequence[int]) -> torch.Tensor:
    """The keys and values of a text read in one pass."""
    fresh = bench.with_cache(runner, 1024)
    if tokens:
        fresh.read([Read(0, list(tokens))])
        fresh.keep([0], [range(len(tokens))])
    else:
        fresh.cache.reserve([0], [0])
    return rows_of(fresh, 0)


def rows_of(runner: Runner, seq_id: int) -> torch.Tensor:
    """The committed keys and values of a sequence, as they are now: [2, layers, kv_heads, tokens, head_dim]."""
    first = runner.cache.start(seq_id)
    run = slice(first, first + runner.cache.length(seq_id))
    return torch.stack([runner.cache.keys[:, :, run], runner.cache.values[:, :, run]])
