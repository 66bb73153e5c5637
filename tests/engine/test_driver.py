"""Any number of threads use one engine: each gets the plain answers, and none waits for another's reader."""

import asyncio
import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from torch import Tensor

from forerun.accept.delta import Delta
from forerun.async_llm import AsyncLLM
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence as Queued
from forerun.errors import EngineClosed, RequestFailed
from forerun.llm import LLM
from kit.assertions import assert_empty
from kit.checkpoints import SMALL, TARGET
from kit.command import apart
from kit.engines import PATIENCE_S, params_with, plain_answer
from kit.oracles import exact_parts
from kit.texts import PROMPTS


@cache
def shared() -> LLM:
    return LLM(str(TARGET), f"model:{SMALL}", dtype="float32", max_num_seqs=5)


@cache
def plain_tokens(i: int) -> tuple[int, ...]:
    (sample,) = plain_answer(i)["samples"]
    return tuple(sample[1])


def together(*works: Callable[[], object]) -> list[object]:
    """Run functions concurrently, each in a thread; their results. Raises the first error, if any."""
    found: list[object] = [None] * len(works)

    def run(i: int) -> None:
        try:
            found[i] = works[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        assert not thread.is_alive(), "a thread hangs"
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def tokens_of(deltas: Sequence[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def test_concurrent_answers_and_streams_of_many_threads_are_those_of_plain_decoding() -> None:
    """More requests than fit into a batch: batches, streams, some with slow readers, and an event loop."""
    llm = shared()

    def answers(i: int) -> None:
        found = llm.generate([PROMPTS[(i + k) % 5] for k in range(3)], [params_with(i + k) for k in range(3)])
        assert [exact_parts(each) for each in found] == [plain_answer(i + k) for k in range(3)]

    def stream(i: int) -> None:
        deltas = []
        for delta in llm.stream(PROMPTS[i % 5], params_with(i)):
            time.sleep(0.002 * (i % 3))
            deltas.append(delta)
        assert tokens_of(deltas) == plain_tokens(i)

    async def loop() -> None:
        async with AsyncLLM(llm) as front:
            found = await asyncio.gather(*(front.generate(PROMPTS[i % 5], params_with(i)) for i in range(6)))
            assert [exact_parts(each) for each in found] == [plain_answer(i) for i in range(6)]

    for i in range(9):
        plain_answer(i)
    works = [lambda i=i: (stream if i % 2 else answers)(i) for i in range(7)]
    together(*works, lambda: asyncio.run(loop()))
    assert_empty(llm)


def test_a_request_that_cannot_be_queued_fails_alone_with_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader gets the error, in threads and in an event loop, and the others are answered."""
    llm = LLM(str(TARGET), dtype="float32", max_num_seqs=5)
    queue = llm.engine.scheduler.submit

    def fails_for_two_samples(sequence: Queued) -> None:
        if sequence.params.n == 2 and sequence.sample == 1:
            raise MemoryError("no memory to extend the queue")
        queue(sequence)

    monkeypatch.setattr(llm.engine.scheduler, "submit", fails_for_two_samples)

    def unlucky() -> None:
        with pytest.raises(RequestFailed, match=r"could not be queued.*MemoryError"):
            llm.generate(PROMPTS[0], params_with(3, n=2))

    def lucky() -> None:
        assert exact_parts(llm.generate(PROMPTS[1], params_with(1))[0]) == plain_answer(1)

    async def both() -> None:
        async with AsyncLLM(llm) as front:
            good, bad = await asyncio.gather(
                front.generate(PROMPTS[2], params_with(2)),
                front.generate(PROMPTS[0], params_with(3, n=2)),
                return_exceptions=True,
            )
            assert isinstance(bad, RequestFailed)
            assert not isinstance(good, BaseException)
            assert exact_parts(good) == plain_answer(2)

    for i in (1, 2):
        plain_answer(i)
    together(unlucky, lucky)
    together(lambda: asyncio.run(asyncio.wait_for(both(), PATIENCE_S)))
    assert_empty(llm)


def test_an_unread_stream_does_not_block_other_requests() -> None:
    """Also after the thread that opened it has ended; another thread can read on later without loss."""
    llm, opened = shared(), []

    def open_one() -> None:
        stream = llm.stream(PROMPTS[1], params_with(1))
        opened.append((stream, [next(stream)]))

    together(open_one)
    found = together(*(lambda i=i: exact_parts(llm.generate(PROMPTS[i % 5], params_with(i))[0]) for i in range(4)))
    assert found == [plain_answer(i) for i in range(4)]
    ((stream, deltas),) = opened
    assert tokens_of([*deltas, *stream]) == plain_tokens(1)
    assert_empty(llm)


def test_a_stream_may_be_closed_in_any_thread_and_by_the_garbage_collector() -> None:
    """In another thread during a round, and during a round of the same thread."""
    llm = shared()
    closed: list[str] = []

    class Holder:
        """Holds a stream in a reference cycle, which only the garbage collector frees."""

        def __init__(self) -> None:
            self.me, self.stream = self, llm.stream(PROMPTS[0], params_with(0, max_tokens=None, ignore_eos=True))
            next(self.stream)

        def __del__(self) -> None:
            closed.append(threading.current_thread().name)

    def collecting(tokens: Sequence[int], logits: Tensor) -> Tensor:
        if not closed:
            gc.collect()
        return logits

    Holder()  # collected during a round of this thread
    found = llm.generate(PROMPTS[2], params_with(2, logits_processors=[collecting], max_tokens=6))
    assert found[0].outputs[0].token_ids == plain_tokens(2)[:6]
    assert closed
    assert_empty(llm)

    def busy() -> None:
        for i in range(3):
            assert exact_parts(llm.generate(PROMPTS[i], params_with(i))[0]) == plain_answer(i)

    def closing() -> None:
        for _ in range(2):
            stream = llm.stream(PROMPTS[3], params_with(3))
            next(stream)
            del stream
            Holder()
            gc.collect()

    together(busy, closing, busy)
    assert_empty(llm)


def test_after_an_error_in_a_step_another_thread_drives_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a step is raised in the thread that steps, and other threads continue."""
    llm, honest, raised = shared(), Engine.step, []

    def step(engine: Engine) -> list[Delta]:
        if threading.current_thread().name == "unlucky" and not raised:
            raised.append(1)
            raise ConnectionError("on purpose")
        return honest(engine)

    monkeypatch.setattr(Engine, "step", step)

    def unlucky() -> None:
        threading.current_thread().name = "unlucky"
        while not raised:
            try:
                assert exact_parts(llm.generate(PROMPTS[0], params_with(0))[0]) == plain_answer(0)
            except ConnectionError:
                return

    def lucky() -> None:
        while not raised:
            assert exact_parts(llm.generate(PROMPTS[1], params_with(1))[0]) == plain_answer(1)
        assert exact_parts(llm.generate(PROMPTS[2], params_with(2))[0]) == plain_answer(2)

    together(unlucky, lucky)
    assert raised
    assert_empty(llm)


def test_after_a_round_jobs_that_came_meanwhile_run_and_all_waiting_threads_look_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, done, inboxes = shared().driver, list[bool](), [queue.SimpleQueue[Delta | None]() for _ in range(3)]

    def step() -> list[Delta]:
        driver.jobs.append(lambda: done.append(True))
        assert not driver.drive(rounds=False), "a round is running"
        driver.waiting.extend(inboxes)
        return []

    monkeypatch.setattr(shared().engine, "step", step)
    assert driver.drive()
    assert done == [True]
    assert [inbox.qsize() for inbox in inboxes] == [1, 1, 1]


def test_cancelling_a_request_in_the_engine_ends_its_stream() -> None:
    llm = shared()
    stream = llm.stream(PROMPTS[0], params_with(0, max_tokens=None, ignore_eos=True))
    next(stream)
    (sequence,) = llm.engine.sequences.values()
    llm.engine.cancel(sequence.request_id)
    assert len(list(stream)) == 0
    assert_empty(llm)


def test_closing_an_llm_raises_engine_closed_in_all_waiting_readers() -> None:
    """After the current round; readers in threads and in an event loop, and all later requests."""
    llm, begun = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=5), threading.Barrier(4)

    def slow(tokens: Sequence[int], logits: Tensor) -> Tensor:
        time.sleep(0.005)
        return logits

    endless = params_with(0, max_tokens=None, ignore_eos=True, logits_processors=[slow])

    def reader() -> None:
        stream = llm.stream(PROMPTS[0], endless)
        next(stream)
        begun.wait(PATIENCE_S)
        with pytest.raises(EngineClosed, match="this LLM was closed"):
            llm.generate([PROMPTS[i] for i in range(3)], endless)
        with pytest.raises(EngineClosed, match="this LLM was closed"):
            list(stream)

    async def loop() -> None:
        async with AsyncLLM(llm) as front:
            stream = front.stream(PROMPTS[1], endless)
            await anext(stream)
            await asyncio.to_thread(begun.wait, PATIENCE_S)
            with pytest.raises(EngineClosed, match="this LLM was closed"):
                await asyncio.wait_for(front.generate(PROMPTS[2], endless), PATIENCE_S)
            with pytest.raises(EngineClosed):
                [delta async for delta in stream]

    def closing() -> None:
        begun.wait(PATIENCE_S)
        time.sleep(0.05)
        llm.close()
        assert llm.driver.closed

    together(reader, reader, lambda: asyncio.run(loop()), closing)
    with pytest.raises(EngineClosed):
        llm.generate(PROMPTS[0])
    llm.close()


FORKING = """
import asyncio, os, signal, sys, threading, time, torch
from forerun import AsyncLLM, LLM, SamplingParams
from forerun.errors import EngineClosed

def answer():
    torch.ones(1 << 20).exp()  # in several threads
    return llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]

def answer_in_child():
    if answer() != expected:
        return "other tokens"
    try:
        asyncio.run(front.generate("The", params))
    except EngineClosed:
        return 0
    return "no engine thread, and no error"

llm = LLM(sys.argv[1], "ngram", dtype="float32", threads=2)
params = SamplingParams(max_tokens=12, seed=3, logprobs=1)
expected, front = answer(), AsyncLLM(llm)
def read():
    while True:
        for delta in llm.stream("The", SamplingParams(max_tokens=None, ignore_eos=True)):
            time.sleep(0.001)
threading.Thread(target=read, daemon=True).start()
for _ in range(4):
    answer()
    child = os.fork()
    if not child:
        signal.alarm(100)  # ends it if it waits for threads that only the parent has
        os._exit(1 if answer_in_child() else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, code
    assert answer() == expected
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_answers_while_another_thread_of_the_parent_runs_a_round() -> None:
    done = apart("-c", FORKING, str(TARGET))
    assert done.returncode == 0, done.stderr
