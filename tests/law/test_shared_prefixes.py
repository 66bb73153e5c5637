"""Cached prefixes change no answer: not a token, not a bit of a log-probability.

Conversations, equal prompts and several samples arrive, go on, are cancelled and preempted, under two tenants. Every
answer is compared with that of plain decoding, alone in an engine without a prefix cache.
"""

import random
from collections.abc import Callable

import pytest

from forerun.config import EngineOptions, Speculation
from forerun.draft.base import Drafter
from forerun.engine.engine import Engine
from forerun.engine.request_check import RequestChecker
from forerun.models.runner import Runner
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.texts import story
from kit.unchecked import unchecked
from law.drafters import DRAFTERS, built
from law.equality import FORMATS
from law.fuzz import Bench, bench_of, run
from law.random_traffic import NO_SHARING, SYSTEM, Traffic


def play(bench: Bench, drafter: Callable[[Runner], Drafter], num_tokens: int, seed: int, num_requests: int) -> Engine:
    """Run random traffic with this drafter; the engine afterwards."""
    traffic = Traffic(bench, num_tokens, seed, EngineOptions(max_num_seqs=4, chunk_tokens=37))
    traffic.engine.drafter = drafter(traffic.engine.runner)
    with unchecked():
        traffic.play(num_requests)
    assert not traffic.engine.recovery.strikes, "no drafter raised an error"
    return traffic.engine


@pytest.mark.short("suffix-roomy", "model:stories280k-short of memory")
@pytest.mark.parametrize("num_tokens", [672, 4096], ids=["short of memory", "roomy"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_cached_prefixes_change_no_answer_with_any_drafter(name: str, num_tokens: int) -> None:
    engine = play(bench_of("float32"), lambda runner: built(name, runner, num_tokens=num_tokens), num_tokens, 7, 14)
    assert (engine.stats.num_prefix_hits > 300) == (name not in NO_SHARING)


@pytest.mark.full
@pytest.mark.parametrize("format_", FORMATS)
def test_cached_prefixes_change_no_answer_in_any_number_format(format_: str) -> None:
    bench = bench_of(format_)
    engine = play(bench, lambda _: bench.model_drafter(2048), 1024, 11, 10)
    assert engine.stats.num_prefix_hits > 300


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_cached_prefixes_change_no_answer_in_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    name, num_tokens = rng.choice(list(DRAFTERS)), rng.choice([600, 900, 2000])
    play(bench_of("float32"), lambda runner: built(name, runner, num_tokens=num_tokens), num_tokens, seed, 30)


def prepared() -> tuple[Engine, RequestChecker]:
    """An engine without a drafter, and what makes sequences of requests."""
    bench = bench_of("float32")
    return bench.engine(), bench.requests()


def test_samples_and_equal_prompts_share_one_prefill() -> None:
    engine, requests = prepared()
    request = Request.of(story(130, 3), SamplingParams(n=3, max_tokens=4, seed=1))
    run(engine, [*requests.sequences(request), *requests.sequences(request)])
    stats = engine.stats
    assert stats.num_prompt_tokens == 129, "each token of the prompt but its root, once"
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (6 * 129, 5 * 129)
    assert stats.prefix_hit_rate == pytest.approx(5 / 6)


def test_a_sequence_waits_for_another_ones_prefill_only_while_the_prefix_is_not_cached() -> None:
    engine, requests = prepared()
    for num_first in (1, 2):
        prompts = [[*story(130, 3), last] for last in (num_first, num_first + 10)]
        pair = [requests.sequences(Request.of(prompt, SamplingParams(max_tokens=4)))[0] for prompt in prompts]
        for sequence in pair:
            engine.submit(sequence)
        engine.step()
        assert [sequence.num_output > 0 for sequence in pair] == [True, num_first == 2]
        run(engine, [])


def test_the_next_turn_of_a_conversation_reuses_the_cached_turns() -> None:
    """All full blocks of 16 tokens of the first turn, with its answer, are cached for the second turn."""
    engine, requests = prepared()
    (first,) = requests.sequences(Request.of(story(100, 4), SamplingParams(max_tokens=30, ignore_eos=True, seed=1)))
    run(engine, [first])
    (second,) = requests.sequences(Request.of([*first.tokens, 5, 6, 7], SamplingParams(max_tokens=3)))
    run(engine, [second])
    assert len(first.tokens) == 130
    assert (first.num_cached, second.num_cached) == (0, 128)
    assert engine.stats.num_prompt_tokens == 99 + 4


def test_a_cached_answer_of_a_preempted_sequence_does_not_count_as_cached_prompt() -> None:
    """A preempted sequence may reuse its own cached text; `num_cached` still says that its prompt was computed."""
    engine, requests = prepared()
    for length, scored in ((4, None), (40, 0)):  # no prefix of either is looked up at the start
        params = SamplingParams(max_tokens=60, ignore_eos=True, prompt_logprobs=scored)
        (sequence,) = requests.sequences(Request.of(story(length, 5), params, speculation=False))
        engine.submit(sequence)
        while sequence.num_output < 40:
            engine.step()
        engine.forget([engine.scheduler.preempt(sequence)])
        engine.step()
        assert sequence.num_read > 32, "the cached text was reused"
        assert not sequence.num_cached
        run(engine, [])
    assert engine.stats.num_prefix_hits <= engine.stats.num_prefix_queries


def test_tenants_do_not_share_cached_prefixes() -> None:
    """Neither while a prompt is prefilled nor later; and nothing is cached of a sequence without a tenant."""
    engine, requests = prepared()
    for tenants in (("a", "b"), ("c",)):
        asked = [Request.of(SYSTEM, SamplingParams(max_tokens=3), None, tenant) for tenant in tenants]
        run(engine, [requests.sequences(each)[0] for each in asked])
    assert engine.stats.num_prefix_hits == 0
    kept = len(engine.runner.cache.prefix_store)
    (unowned,) = requests.sequences(Request.of(story(150, 9), SamplingParams(max_tokens=3)))
    unowned.tenant = None
    run(engine, [unowned])
    assert len(engine.runner.cache.prefix_store) == kept


def test_nothing_is_cached_with_prefix_cache_off() -> None:
    bench = bench_of("float32")
    drafter = bench.model_drafter()
    engine, requests = bench.engine(drafter, options=EngineOptions(prefix_cache=False)), bench.requests()
    for _ in range(2):
        run(engine, requests.sequences(Request.of(SYSTEM, SamplingParams(n=2, max_tokens=3), Speculation(2))))
    assert (engine.stats.num_prefix_queries, engine.stats.prefix_hit_rate) == (0, None)
    assert engine.stats.num_prompt_tokens == 4 * 149
    assert not len(engine.runner.cache.prefix_store)
    assert not len(drafter.runner.cache.prefix_store)


@pytest.mark.parametrize("name", ["model:stories280k", "eagle", "early-exit:adapted"])
def test_a_drafter_does_not_prefill_a_cached_prompt_again(name: str) -> None:
    """For the second of two equal prompts the drafter reads no more than a block and the draft tokens in one pass."""
    engine, requests = prepared()
    engine.drafter = drafter = built(name, engine.runner)
    read: list[int] = []
    runner = drafter.runner  # type: ignore[attr-defined]
    original = runner.decoder.forward

    def forward(batch: object, *args: object, **words: object) -> object:
        read.append(len(batch.tokens))  # type: ignore[attr-defined]
        return original(batch, *args, **words)

    runner.decoder.forward = forward
    most = []
    for _ in range(2):
        run(engine, requests.sequences(Request.of(SYSTEM, SamplingParams(max_tokens=6, seed=2), Speculation(2))))
        most.append(max(read, default=0))
        read.clear()
    runner.decoder.forward = original
    assert most[0] > 100
    assert most[1] <= 64
    assert engine.stats.num_prefix_hits > 60


def test_a_cached_prompt_is_read_again_for_a_drafter_that_has_not_received_its_states() -> None:
    engine, requests = prepared()
    answers = []
    for drafter in (None, built("eagle", engine.runner)):
        engine.drafter = drafter
        request = Request.of(SYSTEM, SamplingParams(max_tokens=6, seed=2), Speculation(2))
        answers.append(run(engine, requests.sequences(request)))
    assert answers[0] == answers[1]
    assert engine.stats.num_prompt_tokens == 2 * 149
    assert engine.stats.num_drafted > 0
