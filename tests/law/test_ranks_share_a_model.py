"""Ranks that share a model give the tokens and log-probabilities of a process that has it alone, to the bit.

Two ranks and four, in every number format, for every drafter of the conformance table, chains and trees, greedy and
sampled, in batches that come and go. Answers stay complete when a rank is killed.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from forerun.config import Speculation
from forerun.draft.base import Drafter
from forerun.draft.plan import DraftContext
from forerun.errors import RankLost
from forerun.kernels.threads import free_cores
from forerun.llm import LLM
from forerun.models.backends.native import NativeExecutor
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.texts import story
from law.drafters import DRAFTERS, built_for
from law.equality import Answer, Asked, decode, decode_plain
from law.fuzz import Bench, number_format

NUM_TOKENS = 8192
WORLDS, FORMATS = (2, 4), ("float32", "bfloat16", "int8", "int4")
SHAPES = [Speculation(depth=4), Speculation(4, 3, 12)]
ASKED = [
    Asked(story(length, seed), SamplingParams(temperature=seed % 3 / 2, seed=seed, max_tokens=24, logprobs=0))
    for seed, length in enumerate((1, 9, 70, 33, 150, 12))
]


@dataclass(slots=True)
class SharedBench(Bench):
    """A target that ranks share. There is one cache, which every engine begins empty."""

    @override
    def with_cache(self, runner: Runner, num_tokens: int) -> Runner:
        if runner is not self.runner:
            return Runner.of(runner.decoder, num_tokens, 16)
        runner.clear()
        return runner

    @classmethod
    def over(cls, alone: Bench, world: int, dtype: str) -> "SharedBench":
        target = Blueprint.of(str(TARGET), **number_format(dtype), tensor_parallel_size=world)
        return cls(target, alone.draft, target.load(NUM_TOKENS), alone.reader)


@dataclass(frozen=True)
class Shared:
    """A model shared by ranks, and the answers of a process that has the model alone."""

    ranks: SharedBench
    plain: list[Answer]


@pytest.fixture(scope="module", params=[f"{world}-{dtype}" for world in WORLDS for dtype in FORMATS])
def shared(request: pytest.FixtureRequest) -> Iterator[Shared]:
    world, dtype = request.param.split("-")
    alone = Bench.of(dtype=dtype)
    bench = SharedBench.over(alone, int(world), dtype)
    yield Shared(bench, decode_plain(alone, ASKED))
    assert bench.runner.decoder.ranks is not None, "the model has no ranks"
    bench.runner.decoder.ranks.stop()


def drafter_of(bench: Bench, name: str, runner: Runner) -> Drafter:
    """A drafter of the table for a target that ranks share."""
    return built_for(DraftContext(bench.target, bench.target.tokenizer()), name, runner, NUM_TOKENS)


@pytest.mark.short("2-int4")
def test_ranks_give_the_tokens_of_one_process(shared: Shared) -> None:
    assert decode(shared.ranks, ASKED, False).answers == shared.plain
    assert decode(shared.ranks, ASKED, False, max_num_seqs=2, chunk_tokens=32).answers == shared.plain


@pytest.mark.short("2-int4-suffix", "2-int4-early-exit:1", "2-int4-eagle")
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_changes_the_output_of_ranks(shared: Shared, name: str) -> None:
    for shape in SHAPES:
        decoded = decode(shared.ranks, ASKED, shape, lambda runner: drafter_of(shared.ranks, name, runner))
        assert decoded.answers == shared.plain, f"{name}, {shape}"
        assert decoded.stats.num_drafted > 0, f"{name} drafts nothing"


def tokens_of(llm: LLM, after: Callable[[int], None] = lambda _: None) -> list[list[int]]:
    """All tokens of each request; `after` is called with the number of every delta."""
    sequences = [llm.requests.sequences(Request.of(each.prompt, each.params))[0] for each in ASKED]
    for number, _ in enumerate(llm.deltas(sequences)):
        after(number)
    return [sequence.tokens for sequence in sequences]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The tokens of a process that has the model alone."""
    with LLM(str(TARGET)) as alone:
        return tokens_of(alone)


def test_answers_are_complete_although_a_rank_is_killed(
    plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    before = {*free_cores().helpers}
    with LLM(str(TARGET), "suffix", tensor_parallel_size=2) as llm:
        for num_seen in (8, 0):
            (process,) = free_cores().helpers - before

            def kill(number: int, at: int = num_seen, process: int = process) -> None:
                if number == at:
                    os.kill(process, signal.SIGKILL)

            assert tokens_of(llm, kill) == plain
            assert process not in free_cores().helpers
        assert llm.engine.drafter is not None
    assert caplog.text.count("all ranks are started again") == 2
    assert free_cores().helpers <= before


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_ranks_may_be_killed_at_any_moment(plain: list[list[int]], seed: int) -> None:
    """Also while they start again: an answer is complete or ends with RankLost, and the next one is complete."""
    dice = random.Random(seed)
    before = {*free_cores().helpers}

    def kill() -> None:
        for _ in range(4):
            time.sleep(dice.random() * dice.choice([0.1, 1, 4]))
            if helpers := sorted(free_cores().helpers - before):
                with suppress(ProcessLookupError):
                    os.kill(dice.choice(helpers), signal.SIGKILL)

    with LLM(str(TARGET), dice.choice(["suffix", "early-exit:2"]), tensor_parallel_size=2) as llm:
        thread = threading.Thread(target=kill)
        thread.start()
        while thread.is_alive():
            with suppress(RankLost):
                assert tokens_of(llm) == plain
        assert tokens_of(llm) == plain
    assert free_cores().helpers <= before


@pytest.mark.full
@pytest.mark.drafter_raises  # a pass that fails with a draft and not without it is counted as the drafter's error
def test_answers_are_complete_although_a_pass_fails_on_rank_0_only(
    plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks still wait in that pass; their results must not be used in the next one."""
    with LLM(str(TARGET), "suffix", tensor_parallel_size=2) as llm:
        for name in ("compute", "logits"):
            number, honest = itertools.count(), getattr(NativeExecutor, name)

            def failing(*args: Any, honest: Any = honest, number: Iterator[int] = number, **named: Any) -> Any:
                if next(number) == 3:
                    raise MemoryError
                return honest(*args, **named)

            monkeypatch.setattr(NativeExecutor, name, failing)
            assert tokens_of(llm) == plain
            monkeypatch.undo()


@pytest.mark.full
def test_a_stopped_rank_is_replaced_after_a_timeout(plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.models.shards.ranks.ANSWER_S", 1.0)  # in a pass
    monkeypatch.setattr("forerun.models.shards.launch.ANSWER_S", 10.0)  # before it, and for a model that is loaded
    before = {*free_cores().helpers}
    with LLM(str(TARGET), tensor_parallel_size=2) as llm:
        (process,) = free_cores().helpers - before

        def stop(number: int) -> None:
            if number == 8:
                os.kill(process, signal.SIGSTOP)

        assert tokens_of(llm, stop) == plain
        assert process not in free_cores().helpers


@pytest.mark.full
def test_ranks_started_by_torchrun_give_the_same_tokens(tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(
        "from forerun import LLM, SamplingParams\n"
        f"llm = LLM({str(TARGET)!r}, 'ngram', tensor_parallel_size=2)\n"
        "params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)\n"
        "print(*llm.generate([[1, 5, 9]], params, use_tqdm=False)[0].outputs[0].token_ids)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    with LLM(str(TARGET)) as alone:
        params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
        plain = alone.generate([[1, 5, 9]], params)[0].outputs[0].token_ids
    assert ended.stdout.split() == [str(token) for token in plain], ended.stderr
