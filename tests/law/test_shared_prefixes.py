"""What is known of a beginning changes no answer: not a token, not a bit of a log-probability.

Conversations, equal prompts and several samples come, go on, are cancelled and preempted, under two tenants. Every
answer is compared with that of plain decoding, alone, where nothing is kept.
"""

import random
from collections.abc import Callable
from functools import cache

import pytest
from drafters import DRAFTERS, built
from equality import FORMATS
from fuzz import Bench
from random_traffic import NO_SHARING, SYSTEM, Traffic

from forerun.config import EngineOptions, Speculation
from forerun.draft.base import Drafter
from forerun.engine.engine import Engine
from forerun.models.runner import Runner
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.texts import story
from kit.unchecked import unchecked


@pytest.fixture(scope="module")
def bench_of() -> Callable[[str], Bench]:
    return cache(lambda name: Bench.of(dtype=name))


def play(bench: Bench, drafter: Callable[[Runner], Drafter], num_tokens: int, seed: int, num_requests: int) -> Engine:
    """The engine behind the traffic that this drafter drafted for."""
    traffic = Traffic(bench, num_tokens, seed, EngineOptions(max_num_seqs=4, chunk_tokens=37))
    traffic.engine.drafter = drafter(traffic.engine.runner)
    with unchecked():
        traffic.play(num_requests)
    assert not traffic.engine.recovery.strikes, "no drafter raised an error"
    return traffic.engine


@pytest.mark.short("suffix-roomy", "model:stories280k-short of memory")
@pytest.mark.parametrize("num_tokens", [672, 4096], ids=["short of memory", "roomy"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_answers_are_those_of_texts_read_alone(bench_of: Callable[[str], Bench], name: str, num_tokens: int) -> None:
    engine = play(bench_of("float32"), lambda runner: built(name, runner, num_tokens=num_tokens), num_tokens, 7, 14)
    assert (engine.stats.num_prefix_hits > 300) == (name not in NO_SHARING)


@pytest.mark.full
@pytest.mark.parametrize("format_", FORMATS)
def test_in_every_number_format(bench_of: Callable[[str], Bench], format_: str) -> None:
    bench = bench_of(format_)
    engine = play(bench, lambda _: bench.model_drafter(2048), 1024, 11, 10)
    assert engine.stats.num_prefix_hits > 300


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_in_random_crowds(bench_of: Callable[[str], Bench], seed: int) -> None:
    rng = random.Random(seed)
    name, num_tokens = rng.choice(list(DRAFTERS)), rng.choice([600, 900, 2000])
    play(bench_of("float32"), lambda runner: built(name, runner, num_tokens=num_tokens), num_tokens, seed, 30)


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_samples_and_equal_prompts_share_one_reading(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("float32")
    engine, requests = bench.engine(), bench.requests()
    prompt = story(130, 3)
    for _ in range(2):
        for sample in requests.sequences(Request.of(prompt, SamplingParams(n=3, max_tokens=4, seed=1))):
            engine.submit(sample)
    run(engine)
    stats = engine.stats
    assert stats.num_prompt_tokens == 129, "each token of the prompt but its root, once"
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (6 * 129, 5 * 129)
    assert stats.prefix_hit_rate == pytest.approx(5 / 6)


def test_a_conversation_is_read_on_where_it_ended(bench_of: Callable[[str], Bench]) -> None:
    """All full blocks of 16 of the first turn, its answer included, are known in the second one."""
    bench = bench_of("float32")
    engine, requests = bench.engine(), bench.requests()
    (first,) = requests.sequences(Request.of(story(100, 4), SamplingParams(max_tokens=30, ignore_eos=True, seed=1)))
    engine.submit(first)
    run(engine)
    (second,) = requests.sequences(Request.of([*first.tokens, 5, 6, 7], SamplingParams(max_tokens=3)))
    engine.submit(second)
    run(engine)
    assert len(first.tokens) == 130
    assert (first.num_cached, second.num_cached) == (0, 128)
    assert engine.stats.num_prompt_tokens == 99 + 4


def test_what_is_known_of_an_answer_does_not_count_as_known_of_the_prompt(bench_of: Callable[[str], Bench]) -> None:
    """A preempted sequence may find its own text again; its prompt was read all the same."""
    bench = bench_of("float32")
    engine, requests = bench.engine(), bench.requests()
    for length, scored in ((4, None), (40, 0)):  # neither was looked up when it began
        params = SamplingParams(max_tokens=60, ignore_eos=True, prompt_logprobs=scored)
        (sequence,) = requests.sequences(Request.of(story(length, 5), params, speculation=False))
        engine.submit(sequence)
        while sequence.num_output < 40:
            engine.step()
        engine.forget([engine.scheduler.preempt(sequence)])
        engine.step()
        assert sequence.num_read > 32, "it was found again"
        assert not sequence.num_cached
        run(engine)
    assert engine.stats.num_prefix_hits <= engine.stats.num_prefix_queries


def test_no_tenant_finds_what_another_said(bench_of: Callable[[str], Bench]) -> None:
    """Neither while it is read nor later; and nothing of a sequence that no one may be drafted with is kept."""
    bench = bench_of("float32")
    engine, requests = bench.engine(), bench.requests()
    for tenants in (("a", "b"), ("c",)):
        for tenant in tenants:
            engine.submit(requests.sequences(Request.of(SYSTEM, SamplingParams(max_tokens=3), None, tenant))[0])
        run(engine)
    assert engine.stats.num_prefix_hits == 0
    kept = len(engine.runner.cache.prefix_store)
    (nobody,) = requests.sequences(Request.of(story(150, 9), SamplingParams(max_tokens=3)))
    nobody.tenant = None
    engine.submit(nobody)
    run(engine)
    assert len(engine.runner.cache.prefix_store) == kept


def test_nothing_is_kept_where_it_is_off(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("float32")
    drafter = bench.model_drafter()
    engine, requests = bench.engine(drafter, options=EngineOptions(prefix_cache=False)), bench.requests()
    for _ in range(2):
        for sample in requests.sequences(Request.of(SYSTEM, SamplingParams(n=2, max_tokens=3), Speculation(2))):
            engine.submit(sample)
        run(engine)
    assert (engine.stats.num_prefix_queries, engine.stats.prefix_hit_rate) == (0, None)
    assert engine.stats.num_prompt_tokens == 4 * 149
    assert not len(engine.runner.cache.prefix_store)
    assert not len(drafter.runner.cache.prefix_store)


@pytest.mark.parametrize("name", ["model:stories280k", "eagle", "early-exit:adapted"])
def test_what_a_drafter_has_in_its_own_cache_is_not_read_again(bench_of: Callable[[str], Bench], name: str) -> None:
    """The second of two equal prompts costs the drafter no reading of more than a block and its guesses."""
    bench = bench_of("float32")
    engine, requests = bench.engine(), bench.requests()
    engine.drafter = drafter = built(name, engine.runner)
    read: list[int] = []
    runner = drafter.runner  # type: ignore[attr-defined]
    own = runner.decoder.forward

    def forward(batch: object, *args: object, **words: object) -> object:
        read.append(len(batch.tokens))  # type: ignore[attr-defined]
        return own(batch, *args, **words)

    runner.decoder.forward = forward
    most = []
    for _ in range(2):
        for sample in requests.sequences(Request.of(SYSTEM, SamplingParams(max_tokens=6, seed=2), Speculation(2))):
            engine.submit(sample)
        run(engine)
        most.append(max(read, default=0))
        read.clear()
    runner.decoder.forward = own
    assert most[0] > 100
    assert most[1] <= 64
    assert engine.stats.num_prefix_hits > 60
