"""What commands that answer share: loading the model with a bar, saying what was run, and streaming one answer.

This file decides what Ctrl-C means: the answer ends after the round under way.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from rich.console import Console

from forerun.card import AnswerTiming, Setting
from forerun.engine.delta import Delta
from forerun.engine.sequence import Origin
from forerun.llm import LLM
from forerun.options import ModelOptions
from forerun.progress import LoadingBar
from forerun.sampling.params import SamplingParams


def build_llm(options: ModelOptions, console: Console) -> LLM:
    """The model and its drafter, loaded; a bar is shown where that takes long."""
    with LoadingBar(console) as bar:
        return LLM(
            options.model,
            options.draft,
            dtype=options.dtype,
            quantize=options.quantize,
            kernels=options.kernels,
            speculation=options.speculation(),
            verification=options.verification,
            max_model_len=options.max_model_len,
            max_num_seqs=1,
            threads=options.threads,
            device=options.device,
            one_gemm=options.one_gemm,
            progress=bar,
        )


def setting_of(llm: LLM, options: ModelOptions, seed: int) -> Setting:
    """What an answer of this model with these options is shown to come from."""
    return Setting(
        model=llm.name or options.model,
        draft=llm.draft_name or options.draft,
        depth=options.speculation().depth,
        verification=options.verification,
        seed=seed,
        format=llm.format,
        kernels=llm.kernels,
        num_threads=torch.get_num_threads(),
        fingerprint=llm.fingerprint,
    )


@dataclass(slots=True)
class Answer:
    """One streamed answer, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_s: float = 0.0
    total_s: float = 0.0

    @property
    def timing(self) -> AnswerTiming:
        """How long it took."""
        return AnswerTiming(len(self.token_ids), self.first_s, self.total_s)


@dataclass(slots=True)
class Interrupt:
    """Whether Ctrl-C was pressed."""

    asked: bool = False


@contextmanager
def patient_interrupt() -> Iterator[Interrupt]:
    """Within it the first Ctrl-C is only noted, so that a round is never torn; a second one acts at once."""
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        interrupt.asked = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def answer(
    llm: LLM,
    prompt: str | Sequence[int],
    params: SamplingParams,
    show: Callable[[str, Origin], None],
    bar: LoadingBar,
) -> Answer:
    """Streams one answer through `show`. After Ctrl-C it ends with the finish reason "cancelled"."""
    result = Answer()
    started_s = time.perf_counter()
    deltas = cast(Generator[Delta, None, None], llm.stream(prompt, params, progress=bar))
    with patient_interrupt() as interrupt, closing(deltas), bar:
        for delta in deltas:
            bar.stop()
            result.total_s = time.perf_counter() - started_s
            result.first_s = result.first_s or result.total_s
            result.token_ids += delta.token_ids
            result.origins += delta.origins
            for segment in delta.segments:
                result.text += segment.text
                show(segment.text, segment.origin)
            result.finish_reason, result.stop_reason = delta.finish_reason, delta.stop_reason
            if interrupt.asked and result.finish_reason is None:
                result.finish_reason = "cancelled"
                break
    return result
