"""Sequences join, leave and are preempted between rounds; drafts take only the cache that is left over."""

import random
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
from typing_extensions import override

from forerun.cache.paged import Spare
from forerun.config import EngineOptions, Speculation
from forerun.control.controller import FixedDepth, Load
from forerun.draft.base import Budget, Outlook
from forerun.engine.engine import Engine
from forerun.engine.request_check import RequestChecker
from forerun.engine.sequence import Sequence
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.oracles import Oracle

LONGEST = 64


@cache
def decoder() -> Runner:
    return Blueprint.of(str(TARGET), dtype="float32").load(64)


def engine_of(num_tokens: int, oracle: Oracle | None = None, block_size: int = 8, **options: Any) -> Engine:
    """An engine around the shared weights, with a cache of its own."""
    runner = Runner.of(decoder().decoder, num_tokens, block_size)
    return Engine(runner, oracle, options=EngineOptions(**options))


def requests() -> RequestChecker:
    return RequestChecker(None, 512, LONGEST, eos_ids=(2,), default=Speculation(4))


def random_requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 40 random tokens, with sampling parameters."""
    rng = random.Random(seed)
    prompts = [[1, *(rng.randrange(3, 512) for _ in range(rng.randrange(40)))] for _ in range(count)]
    return [
        (p, SamplingParams(temperature=i % 2, seed=i, max_tokens=rng.randint(1, 20), ignore_eos=True))
        for i, p in enumerate(prompts)
    ]


def finish(engine: Engine, texts: Seq[Sequence]) -> list[list[int]]:
    for sequence in texts:
        engine.submit(sequence)
    while engine.has_work:
        engine.step()
    return [sequence.tokens for sequence in texts]


def oracle_for(asked: Seq[tuple[list[int], SamplingParams]]) -> tuple[Oracle, list[list[int]]]:
    """The answers of plain decoding one by one, and an oracle that knows them."""
    oracle, answers, maker = Oracle(errs=lambda place: place % 6 == 5), [], requests()
    for prompt, params in asked:
        (tokens,) = finish(engine_of(LONGEST), maker.sequences(Request.of(prompt, params)))
        answers.append(tokens)
        oracle.answers.setdefault((tuple(prompt), 0), []).append((params, tuple(tokens[len(prompt) :])))
    return oracle, answers


SPECULATIONS = (Speculation(4), Speculation(3, 3, 8), Speculation(7), Speculation(0), Speculation(5, 2, 9))


@pytest.mark.short("2")
@pytest.mark.parametrize("seed", range(4))
def test_drafts_take_the_cache_that_is_left_over_and_change_no_answer(seed: int) -> None:
    """In caches from hardly sufficient to ample: the cache never runs out of blocks, and answers are the same."""
    rng, asked = random.Random(seed), random_requests(6, seed)
    oracle, answers = oracle_for(asked)
    num_drafted = []
    for num_tokens in (LONGEST, LONGEST + rng.randint(8, 60), 900):
        engine = engine_of(num_tokens, oracle, block_size=rng.choice([2, 8]), max_num_seqs=4, chunk_tokens=17)
        maker = requests()
        texts = [
            s for i, (p, q) in enumerate(asked) for s in maker.sequences(Request.of(p, q, SPECULATIONS[(i + seed) % 5]))
        ]
        assert finish(engine, texts) == answers
        assert engine.runner.cache.num_rows == 0
        engine.runner.cache.check()
        num_drafted.append(engine.stats.num_drafted)
    assert num_drafted[-1] > 0


@pytest.mark.short("3-8", "52-64")
@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("num_prompt", [3, 52])
def test_a_cache_planned_for_a_full_batch_drafts_in_a_full_batch(block_size: int, num_prompt: int) -> None:
    """No request waits, and every round drafts to the requested depth, in blocks that the rows hold anyway."""
    params = SamplingParams(temperature=0, max_tokens=LONGEST - num_prompt, ignore_eos=True)
    asked = [([1, *range(300 + i, 299 + i + num_prompt)], params) for i in range(8)]
    (oracle, answers), maker = oracle_for(asked), requests()
    engine = engine_of(8 * LONGEST, oracle, block_size=block_size, max_num_seqs=8, chunk_tokens=512)
    engine.controller = watched = Watched()
    assert finish(engine, [s for p, q in asked for s in maker.sequences(Request.of(p, q, Speculation(4)))]) == answers
    assert len(watched.requested[0]) == 8, "some had to wait"
    assert watched.granted == watched.requested


class Watched(FixedDepth):
    """Records the requested and the granted depths of every round."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[list[int]] = []
        self.granted: list[list[int]] = []

    @override
    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Seq[Budget]:
        found = super().budgets(load, outlook, spare)
        self.requested.append(
            [min(speculation.depth, room) for speculation, room in zip(load.speculations, load.rooms, strict=True)]
        )
        self.granted.append([budget.depth for budget in found])
        return found


def test_with_a_full_cache_nothing_is_drafted_and_decoding_goes_on() -> None:
    asked = [([1, *range(300, 340)], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))]
    oracle, answers = oracle_for(asked)
    engine = engine_of(LONGEST, oracle, block_size=4)
    engine.controller = watched = Watched()
    assert finish(engine, requests().sequences(Request.of(*asked[0], Speculation(7, 2, 12)))) == answers
    refused = [
        granted == [0] and requested != [0]
        for granted, requested in zip(watched.granted, watched.requested, strict=True)
    ]
    assert [7] in watched.granted
    assert any(refused), "the cache was never full"


@pytest.mark.parametrize(("max_tokens", "num_drafted"), [(1, 0), (2, 0), (5, 3), (9, 7)])
def test_no_token_is_drafted_that_could_not_be_emitted(max_tokens: int, num_drafted: int) -> None:
    """The round that reads the prompt emits the first token, and every round one more than were drafted."""
    asked = [([1, *range(300, 310)], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))]
    oracle, answers = oracle_for(asked)
    oracle.errs = lambda place: False
    engine = engine_of(LONGEST, oracle)
    assert finish(engine, requests().sequences(Request.of(*asked[0], Speculation(7)))) == answers
    assert engine.stats.num_drafted == engine.stats.num_accepted == num_drafted


def test_counters_add_up() -> None:
    asked = random_requests(5, 8)
    oracle, answers = oracle_for(asked)
    engine, maker = engine_of(900, oracle, max_num_seqs=3), requests()
    finish(engine, [s for i, (p, q) in enumerate(asked) for s in maker.sequences(Request.of(p, q, SPECULATIONS[i]))])
    stats = engine.stats
    num_emitted = sum(len(answer) - len(prompt) for answer, (prompt, _) in zip(answers, asked, strict=True))
    assert stats.num_emitted == num_emitted <= stats.num_accepted + stats.num_rounds
    assert stats.num_prompt_tokens == sum(len(prompt) - 1 for prompt, _ in asked)
    assert stats.num_accepted == sum(stats.accepted_at_depth)
    assert stats.num_drafted >= sum(stats.offered_at_depth) >= stats.num_accepted > 0
    offered, accepted = stats.offered_at_depth, stats.accepted_at_depth
    assert all(later <= earlier for earlier, later in zip(accepted, offered[1:], strict=False))
    assert stats.acceptance_rate == stats.num_accepted / stats.num_drafted
    assert stats.tokens_per_round == (stats.num_accepted + stats.num_rounds) / stats.num_rounds
