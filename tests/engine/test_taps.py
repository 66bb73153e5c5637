"""A drafter receives the states that the target computes for a text, however the text is split into rounds."""

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.config import EngineOptions, Speculation
from forerun.control.controller import FixedDepth
from forerun.draft.base import Budget, Committed, Draft, Drafter
from forerun.heads.adapter.drafter import EarlyExitDrafter
from forerun.models.runner import Read, Runner
from forerun.request import Request
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.unchecked import unchecked
from law.fuzz import Bench

TAPS = (0, 2, 4, 5, -1)  # of five layers: what enters the first, leaves the second and the fourth, and both ends
FORMATS = ("float32", "bfloat16", "int8", "int4", "float32 by torch", "bfloat16 by torch")
SHAPES = {
    "drafted": (Speculation(1), Speculation(3, 3, 9), Speculation(6), Speculation(2, 2)),
    "resting": (Speculation(0),),
}


@dataclass(slots=True)
class Listener:
    """Drafts as `drafter` does, and stores the states of each text; `forget` checks them."""

    drafter: Drafter
    check: Callable[[list[int], Tensor], None]
    taps: tuple[int, ...] = TAPS
    names: tuple[str, ...] = ("listener",)
    received: dict[int, tuple[list[int], list[Tensor]]] = field(default_factory=dict)
    num_forgotten: int = 0
    num_news: int = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.drafter, name)

    def observe(self, committed: Committed) -> None:
        assert committed.features is not None
        assert len(committed.features) == len(committed.tokens)
        self.num_news += 1
        for i, (seq_id, tokens, _) in enumerate(committed.rows()):
            known, states = self.received.setdefault(seq_id, ([], []))
            known.extend(tokens)
            states.append(committed.features[committed.offsets[i] : committed.offsets[i + 1]].clone())
        self.drafter.observe(committed)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        return 0  # so that it receives the states of all tokens

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        return self.drafter.propose(draws, budgets, tail)

    def forget(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            if seq_id in self.received:
                tokens, states = self.received.pop(seq_id)
                self.check(tokens, torch.cat(states))
                self.num_forgotten += 1
        self.drafter.forget(seq_ids)


@cache
def bench_of(name: str) -> Bench:
    """The target is its own draft model, so that draft tokens are accepted."""
    return Bench.of(TARGET, TARGET, name)


@pytest.mark.short("bfloat16-*")
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_drafter_receives_the_states_of_the_text_read_in_one_pass(name: str, shapes: str) -> None:
    """To the bit: with prompts in chunks, chains and trees, preempted sequences.

    If nothing is drafted, the tokens of several rounds arrive together.
    """
    bench = bench_of(name)
    assert_states_arrive(bench, lambda _: bench.model_drafter(), shapes)


def test_states_below_an_early_exit_arrive_too() -> None:
    """The lower layers have read the draft tokens already, but without these states."""
    assert_states_arrive(bench_of("float32"), lambda runner: EarlyExitDrafter(runner, 4), "drafted")


def test_states_of_a_cached_prefix_arrive_if_they_may_not_be_adopted() -> None:
    bench = bench_of("float32")
    engine = bench.engine(None, 1000, FixedDepth(), EngineOptions(max_num_seqs=2))
    listener: Any = Listener(bench.model_drafter(), lambda tokens, states: lengths.append((len(tokens), len(states))))
    lengths: list[tuple[int, int]] = []
    engine.drafter, requests = listener, bench.requests()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for _ in range(2):
        for sequence in requests.sequences(Request.of([1, *range(300, 400)], params)):
            engine.submit(sequence)
        with unchecked():
            while engine.has_work:
                engine.step()
        assert len(engine.runner.cache.prefix_store)
    assert not engine.recovery.strikes, "the drafter raised no error"
    assert lengths == [(104, 104)] * 2


def assert_states_arrive(bench: Bench, drafter: Callable[[Runner], Drafter], shapes: str) -> None:
    """Random requests, drafted by a drafter that checks the states of each text."""
    rng = random.Random(3)

    def check(tokens: list[int], states: Tensor) -> None:
        expected = Runner.of(bench.runner.decoder, 512).read([Read(0, tokens)], TAPS).taps
        assert expected is not None
        assert torch.equal(states, expected)

    options = EngineOptions(max_num_seqs=5, chunk_tokens=24)
    engine = bench.engine(None, 160, FixedDepth(), options)
    # It has the other methods of the drafter that it wraps.
    listener: Any = Listener(drafter(engine.runner), check)
    engine.drafter = listener
    engine.kernels = bench.target.sampling_kernels()
    requests = bench.requests()
    for i in range(8):
        params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=30, ignore_eos=True)
        prompt = [1, *(rng.randrange(3, 512) for _ in range(rng.choice([1, 2, 30, 70])))]
        for sequence in requests.sequences(Request.of(prompt, params, SHAPES[shapes][i % len(SHAPES[shapes])])):
            engine.submit(sequence)
    with unchecked():
        while engine.has_work:
            engine.step()
    assert not engine.recovery.strikes, "the drafter raised no error"
    assert listener.num_forgotten > 8  # more than there are requests: some were preempted
    assert not listener.received
    assert (engine.stats.num_accepted > 20) == (shapes == "drafted")
    assert shapes == "drafted" or listener.num_news < 0.5 * engine.stats.num_rounds
