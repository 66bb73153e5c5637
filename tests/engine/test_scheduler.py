"""For any memory and requests: rows fit, chunks are shared by arrival, the oldest is never preempted, all finish."""

from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cache.paged import PagedCache
from forerun.config import Speculation
from forerun.engine.prefixes import Prefixes
from forerun.engine.request_check import RequestChecker
from forerun.engine.scheduler import ChunkSize, RowPlan, Scheduler
from forerun.engine.sequence import Sequence, Status
from forerun.request import Request
from forerun.sampling.params import SamplingParams


def requests(max_length: int = 10_000) -> RequestChecker:
    return RequestChecker(tokenizer=None, vocab_size=50, max_length=max_length, eos_ids=(), default=Speculation())


def sequences(shapes: Seq[tuple[int, int]], tenants: str = "") -> list[Sequence]:
    """One sequence per (prompt length, tokens to generate), whose tenant is a letter of `tenants`, if given."""
    maker, made = requests(), list[Sequence]()
    for i, (prompt, num_new) in enumerate(shapes):
        tenant = tenants[i : i + 1]
        made += maker.sequences(Request.of([1] * prompt, SamplingParams(max_tokens=num_new), tenant=tenant))
    return made


def cache_of(num_tokens: int, block_size: int) -> PagedCache:
    return PagedCache(
        layers=1, kv_heads=1, head_dim=1, num_tokens=num_tokens, dtype=torch.float32, block_size=block_size, key_pad=1
    )


def scheduler_of(cache: PagedCache, max_num_seqs: int, chunk_tokens: int, shares: bool = False) -> Scheduler:
    return Scheduler(Prefixes(cache, lambda: None, shares), max_num_seqs, ChunkSize(chunk_tokens))


def play(scheduler: Scheduler, waiting: list[Sequence], arrivals: Seq[int]) -> list[tuple[int, list[int], list[int]]]:
    """Rounds without a model until all sequences are finished: (oldest running, rows, preempted) of each round."""
    cache, num_generated, rounds, incoming = scheduler.cache, dict[int, int](), [], list(waiting)
    for number in range(3000):
        for sequence in incoming[: arrivals[number % len(arrivals)]]:
            scheduler.submit(sequence)
            incoming.remove(sequence)
        rows, preempted = scheduler.plan()
        if not rows and not incoming and not scheduler.waiting:
            return rounds
        assert not {row.sequence.id for row in rows} & {sequence.id for sequence in preempted}
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert sum(row.num_chunk for row in rows) <= scheduler.chunk.tokens
        assert [row.sequence.id for row in rows] == sorted(row.sequence.id for row in rows)
        assert all(row.sequence.status is Status.RUNNING for row in rows)
        ids, counts = [row.sequence.id for row in rows], [row.num_certain for row in rows]
        cache.reserve(ids, counts)  # never OutOfBlocks
        rounds.append((min((s.id for s in scheduler.running), default=-1), ids, [s.id for s in preempted]))
        for row, count in zip(rows, counts, strict=True):
            sequence = row.sequence
            cache.keep([sequence.id], [range(count)])
            sequence.num_read += count
            assert row.draws == (sequence.num_read == len(sequence.tokens))
            if not row.draws:
                continue
            sequence.tokens.append(2)
            num_generated[sequence.id] = num_generated.get(sequence.id, 0) + 1
            assert sequence.num_output == num_generated[sequence.id]
            if num_generated[sequence.id] == sequence.params.max_tokens:
                scheduler.finish(sequence)
                cache.release([sequence.id])
        cache.check()
    raise AssertionError("a sequence never finishes")


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=9),
    block_size=st.sampled_from([1, 4, 16]),
    slack=st.integers(0, 90),
    max_num_seqs=st.integers(1, 6),
    chunk_tokens=st.integers(1, 50),
    arrivals=st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any),
    shares=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_all_sequences_fit_and_finish_and_the_oldest_is_never_preempted(
    shapes: list[tuple[int, int]],
    block_size: int,
    slack: int,
    max_num_seqs: int,
    chunk_tokens: int,
    arrivals: list[int],
    shares: bool,
) -> None:
    longest = max(prompt + num_new for prompt, num_new in shapes)
    scheduler = scheduler_of(cache_of(longest + slack, block_size), max_num_seqs, chunk_tokens, shares)
    everyone = sequences(shapes)
    rounds = play(scheduler, everyone, arrivals)
    assert [s.num_output for s in everyone] == [num_new for _, num_new in shapes]
    assert all(s.status is Status.FINISHED for s in everyone)
    assert scheduler.cache.num_rows == 0
    for oldest, _, preempted in rounds:
        assert oldest not in preempted, "the oldest must not lose its place"
    assert sum(s.num_preempted for s in everyone) == sum(len(preempted) for *_, preempted in rounds)


def test_the_youngest_sequence_is_preempted() -> None:
    """Three sequences fit at first, and no longer when they have grown."""
    scheduler = scheduler_of(cache_of(36, 4), 3, 100)
    everyone = sequences([(8, 9), (8, 9), (8, 9)])
    rounds = play(scheduler, everyone, [3])
    assert [s.num_preempted > 0 for s in everyone] == [False, False, True]
    sent_back = next(i for i, (_, _, preempted) in enumerate(rounds) if preempted)
    assert rounds[sent_back][1:] == ([0, 1], [2])


def test_as_many_sequences_are_admitted_as_fit_together_to_their_ends() -> None:
    """Each needs three blocks. None is admitted only to be preempted."""
    for num_blocks in range(3, 13):
        scheduler = scheduler_of(cache_of(4 * num_blocks, 4), 8, 100)
        for sequence in sequences([(9, 3)] * 6):
            scheduler.submit(sequence)
        rows, preempted = scheduler.plan()
        assert (len(rows), preempted) == (num_blocks // 3, [])


def read(rows: Seq[RowPlan]) -> list[tuple[int, int, bool]]:
    """The rows of a pass as (id, prompt tokens, whether it draws), after marking these tokens as read."""
    for row in rows:
        row.sequence.num_read += row.num_chunk
    return [(row.sequence.id, row.num_chunk, row.draws) for row in rows]


def test_short_prompts_share_a_pass_before_long_ones() -> None:
    scheduler = scheduler_of(cache_of(400, 4), 4, 10)
    for sequence in sequences([(5, 1), (21, 1), (1, 1), (4, 1)]):
        scheduler.submit(sequence)
    assert read(scheduler.plan()[0]) == [(0, 4, True), (1, 3, False), (2, 0, True), (3, 3, True)]


def test_a_short_prompt_waits_for_one_pass_and_a_long_one_for_every_second() -> None:
    scheduler = scheduler_of(cache_of(4000, 4), 16, 10)
    long, *short = sequences([(201, 1), *[(11, 1)] * 9])
    scheduler.submit(long)
    assert read(scheduler.plan()[0]) == [(0, 10, False)]
    for sequence in short:
        scheduler.submit(sequence)
    parts = [read(scheduler.plan()[0]) for _ in range(18)]
    of_long = [sum(num for seq_id, num, _ in part if seq_id == 0) for part in parts]
    assert of_long == [0, 10] * 9
    assert [max((seq_id for seq_id, num, _ in part if num), default=0) for part in parts[::2]] == list(range(1, 10))


def test_a_waiting_sequence_can_be_finished() -> None:
    scheduler = scheduler_of(cache_of(400, 4), 1, 100)
    first, second = sequences([(5, 9), (5, 9)])
    scheduler.submit(first)
    scheduler.submit(second)
    scheduler.plan()
    scheduler.finish(second)
    assert not scheduler.waiting
    scheduler.finish(first)
    assert scheduler.plan() == ([], [])


def test_tenants_take_turns_in_the_batch() -> None:
    """The tenant with the fewest running sequences is next, among equals the earliest request."""
    scheduler = scheduler_of(cache_of(4000, 4), 3, 100)
    everyone = sequences([(9, 9)] * 8, "aaaaabcb")
    for sequence in everyone[:5]:
        scheduler.submit(sequence)
    scheduler.plan()
    assert [s.id for s in scheduler.running] == [0, 1, 2]
    for sequence in everyone[5:]:
        scheduler.submit(sequence)
    order = []
    for _ in everyone:
        scheduler.finish(scheduler.running[0])
        before = {s.id for s in scheduler.running}
        scheduler.plan()
        order += [s.id for s in scheduler.running if s.id not in before]
    assert order == [5, 6, 3, 4, 7]
    assert not scheduler.waiting
    assert not scheduler.waiting.queues


@pytest.mark.parametrize("tenants", ["aab", "aaa"])
def test_a_preempted_sequence_resumes_before_those_that_wait(tenants: str) -> None:
    scheduler = scheduler_of(cache_of(4000, 4), 2, 100)
    first, second, other = sequences([(9, 9)] * 3, tenants)
    scheduler.submit(first)
    scheduler.submit(second)
    scheduler.plan()
    scheduler.submit(other)
    scheduler.preempt(second)
    scheduler.plan()
    assert scheduler.running == [first, second]
