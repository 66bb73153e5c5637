"""Ctrl-C anywhere: the stream that is read in the main thread ends, and no other stream loses or changes a token.

Interrupts are injected where Python delivers them, at the entry of functions and after calls, all through a round; and
they are real signals at random times. Other streams are unfinished when a stream is interrupted.
"""

import random
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from forerun import llm as llm_module
from forerun.accept.delta import Delta
from forerun.engine.sequence import ActiveSequences
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from kit.assertions import assert_empty
from kit.checkpoints import SMALL, TARGET
from kit.oracles import exact_parts
from kit.texts import PROMPTS
from kit.unchecked import unchecked

SOURCE = str(Path(llm_module.__file__).parent)
DRAFTS = (None, "ngram", f"model:{SMALL}", "early-exit:2", "mix[suffix,early-exit:1]")


def params_with(seed: int) -> SamplingParams:
    """Seed 0 has two samples, 1 prompt log-probabilities, 2 a stop string, for which text is held back over rounds."""
    return SamplingParams(
        temperature=seed % 3 / 2,
        seed=seed,
        max_tokens=8 + seed,
        logprobs=1,
        prompt_logprobs=1 if seed == 1 else None,
        stop=["the"] if seed == 2 else [],
        n=2 if seed == 0 else 1,
    )


@cache
def llm_with(draft: str | None) -> LLM:
    """An LLM for three sequences at a time, with prompts in chunks: one waits, and rounds mix prefill and decoding."""
    return LLM(str(TARGET), draft, dtype="float32", max_num_seqs=3, chunk_tokens=5)


@cache
def plain_answer(i: int) -> tuple[object, ...]:
    """The answer of plain decoding, for each sample: tokens, text, log-probabilities and finish reason."""
    (result,) = llm_with(None).generate(PROMPTS[i], params_with(i))
    return tuple((c.token_ids, c.text, c.logprobs, c.finish_reason) for c in result.outputs)


def joined(deltas: Sequence[Delta]) -> tuple[object, ...]:
    """Tokens, text, log-probabilities and finish reason of each sample of a stream."""
    found = []
    for sample in sorted({delta.sample for delta in deltas}):
        chosen = [delta for delta in deltas if delta.sample == sample]
        tokens = tuple(token for delta in chosen for token in delta.token_ids)
        logprobs = tuple(each for delta in chosen for each in delta.logprobs)
        found.append((tokens, "".join(delta.text for delta in chosen), logprobs, chosen[-1].finish_reason))
    return tuple(found)


class Interrupt:
    """Raises KeyboardInterrupt at the `at`-th place in forerun's code at which Python might, and counts places."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event in ("call", "c_return") and code.co_filename.startswith(SOURCE) and code.co_name != "<genexpr>":
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt

    def during(self, work: Callable[[], object]) -> bool:
        """Whether the work was interrupted."""
        sys.setprofile(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


def check_other_streams(llm: LLM, interrupt: Callable[[Callable[[], object]], object], num_before: int) -> None:
    """Interrupt a stream while three others are unfinished; assert that these give the plain answers."""
    streams = [llm.stream(PROMPTS[i], params_with(i)) for i in (0, 1, 2)]
    received: list[list[Delta]] = [[], [], []]
    for turn in range(num_before):
        received[turn % 3] += [delta for delta in [next(streams[turn % 3], None)] if delta is not None]
    victim = llm.stream(PROMPTS[3], params_with(3))
    interrupt(lambda: list(victim))
    assert isinstance(victim, Generator)
    victim.close()
    for deltas, stream in zip(received, streams, strict=True):
        deltas += stream
    for i, deltas in enumerate(received):
        assert joined(deltas) == plain_answer(i)
    assert_empty(llm)


@pytest.mark.parametrize("at", range(1, 9))
def test_an_interrupted_removal_of_a_sequence_can_be_repeated(at: int) -> None:
    """A sequence that is still registered is removed by the next attempt; nothing else may be left."""
    active = ActiveSequences()
    sequence: Any = SimpleNamespace(id=3, request_id=5)  # the attributes that ActiveSequences reads
    with unchecked():
        active.add(sequence, lambda delta: None)
        Interrupt(at).during(lambda: active.remove(sequence))
        for left in list(active.sequences.values()):
            active.remove(left)
    assert not active.readers
    assert not active.samples


FEW = [(draft, 0, 7) for draft in DRAFTS]
MANY = [(draft, seed, 150) for draft in DRAFTS for seed in range(1, 4)]


@pytest.mark.short("None-0-7", "early-exit:2-0-7")
@pytest.mark.parametrize(("draft", "seed", "num_trials"), [*FEW, *MANY])
def test_an_interrupt_anywhere_in_a_round_changes_no_other_stream(
    draft: str | None, seed: int, num_trials: int
) -> None:
    """At random places, half of them in the first quarter, where requests are submitted and prompts prefilled."""
    llm, rng, whole = llm_with(draft), random.Random(seed), Interrupt(0)
    with unchecked():
        check_other_streams(llm, whole.during, 3)
        assert whole.count > 1000
        for trial in range(num_trials):
            at = rng.randrange(1, whole.count if trial % 2 else whole.count // 4)
            check_other_streams(llm, Interrupt(at).during, rng.randrange(7))
        assert exact_parts(llm.generate(PROMPTS[4], params_with(4))[0]) == exact_parts(
            llm_with(None).generate(PROMPTS[4], params_with(4))[0]
        )
    assert llm.engine.drafter is llm.drafter


def signalled(delays_s: Sequence[float]) -> Callable[[Callable[[], object]], bool]:
    """Runs work under a real signal, which Python turns into KeyboardInterrupt at some point."""
    delays = iter(delays_s)

    def during(work: Callable[[], object]) -> bool:
        armed = True

        def ring(*_: object) -> None:
            if armed:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, next(delays))
            work()
            armed = False
        except KeyboardInterrupt:
            return True
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return False

    return during


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a signal lost in a finaliser
def test_real_signals_at_random_times_change_no_other_stream() -> None:
    llm, rng = llm_with(f"model:{SMALL}"), random.Random(0)
    caught: list[bool] = []
    with unchecked():
        started_s = time.perf_counter()
        list(llm.stream(PROMPTS[3], params_with(3)))
        taken_s = time.perf_counter() - started_s
        for trial in range(12):
            during = signalled([rng.uniform(1e-4, taken_s)])
            check_other_streams(llm, lambda work, during=during: caught.append(during(work)), trial % 7)
        while not any(caught) and taken_s > 1e-4:  # the time was taken while the machine was busy
            taken_s /= 2
            during = signalled([taken_s])
            check_other_streams(llm, lambda work, during=during: caught.append(during(work)), 3)
    assert any(caught)
