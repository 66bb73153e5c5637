"""AsyncLLM: concurrent requests are answered as if alone, any may be cancelled, and an error or close ends all."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import cache

import pytest
from torch import Tensor

from forerun.accept.delta import Delta
from forerun.async_llm import AsyncLLM, DeltaQueue
from forerun.config import Speculation
from forerun.engine.engine import Engine
from forerun.errors import EngineClosed, InvalidRequest
from forerun.llm import LLM
from forerun.output import RequestOutput
from forerun.request import Prompt
from forerun.sampling.params import SamplingParams
from kit.assertions import assert_empty
from kit.checkpoints import SMALL, TARGET
from kit.engines import PATIENCE_S, params_with, plain, plain_answer
from kit.oracles import exact_parts
from kit.texts import PROMPTS

SPECULATIONS = (None, False, 2, Speculation(3, 3, 8), 7)


@cache
def drafting() -> LLM:
    return LLM(str(TARGET), f"model:{SMALL}", dtype="float32", max_num_seqs=6)


def endless(seed: int = 0, **others: object) -> SamplingParams:
    return params_with(seed, max_tokens=None, ignore_eos=True, **others)


def run(work: Callable[[AsyncLLM], Awaitable[None]], llm: LLM | None = None) -> None:
    """Runs `work` in a new event loop with a time limit: nothing here may wait for ever."""

    async def main() -> None:
        async with AsyncLLM(llm or drafting()) as front:
            await asyncio.wait_for(work(front), PATIENCE_S)

    asyncio.run(main())
    assert_empty(llm or drafting())


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the engine's thread has made the condition true."""
    while not condition():
        await asyncio.sleep(0.005)


async def collected_tokens(deltas: AsyncIterator[Delta]) -> tuple[int, ...]:
    return tuple([token async for delta in deltas for token in delta.token_ids])


def test_requests_at_once_are_answered_as_if_alone() -> None:
    """More requests than the batch holds, with every kind of speculation, submitted one after the other."""
    num = 14

    async def work(front: AsyncLLM) -> None:
        async def one(i: int) -> RequestOutput:
            await asyncio.sleep(i % 4 * 0.02)
            return await front.generate(PROMPTS[i % 5], params_with(i), speculation=SPECULATIONS[i % len(SPECULATIONS)])

        found = await asyncio.gather(*(one(i) for i in range(num)))
        assert list(map(exact_parts, found)) == [plain_answer(i) for i in range(num)]

    run(work)


def test_streams_at_once_and_many_samples() -> None:
    async def work(front: AsyncLLM) -> None:
        streams = [front.stream(PROMPTS[i % 5], params_with(i)) for i in range(6)]
        samples = front.generate(PROMPTS[0], params_with(1, n=4))
        found, many = await asyncio.gather(asyncio.gather(*map(collected_tokens, streams)), samples)
        answers = [plain().generate(PROMPTS[i % 5], params_with(i))[0].outputs[0].token_ids for i in range(6)]
        assert found == answers
        assert exact_parts(many) == exact_parts(plain().generate(PROMPTS[0], params_with(1, n=4))[0])
        prompt = plain().tokenizer.encode(PROMPTS[0])
        parts = [delta async for delta in front.stream(prompt, params_with(1, n=4))]
        for sample in many.outputs:
            own = [delta for delta in parts if delta.sample == sample.index]
            assert "".join(delta.text for delta in own) == sample.text
            assert own[-1].finish_reason == sample.finish_reason

    run(work)


def test_a_refused_request_leaves_the_others_unchanged() -> None:
    async def work(front: AsyncLLM) -> None:
        good = asyncio.create_task(front.generate(PROMPTS[0], params_with(0)))
        refused: list[tuple[Prompt, SamplingParams]] = [
            ([], params_with(1)),
            ("a", params_with(1, stop_token_ids=[999])),
        ]
        for prompt, asked in refused:
            with pytest.raises(InvalidRequest):
                await front.generate(prompt, asked)
            with pytest.raises(InvalidRequest):
                await anext(front.stream(prompt, asked))
        assert exact_parts(await good) == plain_answer(0)

    run(work)


async def leave_the_loop(front: AsyncLLM) -> None:
    async for delta in front.stream(PROMPTS[1], endless()):
        if delta.token_ids:
            break


async def close_the_stream(front: AsyncLLM) -> None:
    stream = front.stream(PROMPTS[1], endless(), speculation=Speculation(3, 2, 5))
    await anext(stream)
    assert isinstance(stream, AsyncGenerator)
    await stream.aclose()


async def cancel_the_task(front: AsyncLLM) -> None:
    task = asyncio.create_task(front.generate(PROMPTS[1], params_with(3, n=3, max_tokens=None, ignore_eos=True)))
    await until(lambda: len(front.llm.engine.sequences) > 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_at_once(front: AsyncLLM) -> None:
    task = asyncio.create_task(front.generate(PROMPTS[1], endless()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def run_out_of_time(front: AsyncLLM) -> None:
    def slow(tokens: Sequence[int], logits: Tensor) -> Tensor:
        time.sleep(0.002)  # all of the context takes longer than what the reader has, on any machine
        return logits

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(front.generate(PROMPTS[1], endless(logits_processors=[slow])), 0.05)


@pytest.mark.parametrize("leave", [leave_the_loop, close_the_stream, cancel_the_task, cancel_at_once, run_out_of_time])
def test_a_cancelled_request_is_dropped_and_the_others_go_on(leave: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def work(front: AsyncLLM) -> None:
        others = [asyncio.create_task(front.generate(PROMPTS[i], params_with(i))) for i in range(3)]
        await leave(front)
        assert [exact_parts(await other) for other in others] == [plain_answer(i) for i in range(3)]
        engine = front.llm.engine
        await until(lambda: not front.outboxes and not engine.has_work and not engine.runner.cache.num_rows)
        assert exact_parts(await front.generate(PROMPTS[0], params_with(0))) == plain_answer(0)

    run(work)


def test_closing_ends_what_is_under_way() -> None:
    async def work(front: AsyncLLM) -> None:
        running = [asyncio.create_task(front.generate(PROMPTS[i % 5], endless(i))) for i in range(8)]
        stream = front.stream(PROMPTS[0], endless())
        await anext(stream)
        await until(lambda: len(front.llm.engine.sequences) > 5)
        await asyncio.to_thread(front.close)
        for task in running:
            with pytest.raises(EngineClosed, match="closed while the request ran"):
                await task
        with pytest.raises(EngineClosed, match="closed while the request ran"):
            await collected_tokens(stream)
        for late in (front.generate("a"), anext(front.stream("a"))):
            with pytest.raises(EngineClosed, match="has shut down; create a new one"):
                await late
        assert not front.thread.is_alive()
        front.close()

    run(work)
    assert exact_parts(drafting().generate(PROMPTS[0], params_with(0))[0]) == plain_answer(0)


class Faulty(Exception):
    """What the engine's step raises here."""


def test_an_engine_failure_reaches_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests under way get the failure itself; later ones are refused with EngineClosed."""
    llm = LLM(str(TARGET), dtype="float32")

    def fail(_: Engine) -> object:
        raise Faulty("on purpose")

    async def work() -> None:
        front = AsyncLLM(llm)
        tasks = [asyncio.create_task(front.generate(PROMPTS[i], endless(i))) for i in range(3)]
        await until(lambda: len(llm.engine.sequences) == 3)
        monkeypatch.setattr(Engine, "step", fail)
        for task in tasks:
            with pytest.raises(Faulty, match="on purpose"):
                await task
        with pytest.raises(EngineClosed, match="create a new one") as error:
            await front.generate("a")
        assert isinstance(error.value.__cause__, Faulty)
        await asyncio.to_thread(front.close)

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
    monkeypatch.undo()
    assert not llm.engine.has_work
    assert exact_parts(llm.generate(PROMPTS[0], params_with(0))[0]) == plain_answer(0)


def test_an_event_loop_is_woken_once_for_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many samples the round adds tokens to: for each wake-up the engine waits for the interpreter."""
    woken: list[object] = []

    async def work(front: AsyncLLM) -> None:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: woken.append(call) or wake(*call))
        tokens = await collected_tokens(front.stream(PROMPTS[0], params_with(0, n=4, max_tokens=24, ignore_eos=True)))
        assert len(tokens) == 4 * 24
        assert 24 <= len(woken) <= 2 * 24
        monkeypatch.undo()

    run(work, plain())


def test_reading_many_waiting_deltas_lets_other_tasks_run() -> None:
    async def main() -> None:
        queue, turns = DeltaQueue(), []
        for _ in range(3):
            queue.put_nowait(KeyError())

        async def other() -> None:
            for _ in range(3):
                turns.append("other")
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        for _ in range(3):
            await queue.get()
            turns.append("reader")
        await task
        assert turns == ["other", "reader"] * 3

    asyncio.run(main())


def test_loops_of_several_threads() -> None:
    """Each thread has its own loop; one loop ends with a request under way."""
    front, found, num = AsyncLLM(drafting()), {}, 9

    async def some(mine: Sequence[int]) -> None:
        results = await asyncio.gather(*(front.generate(PROMPTS[i % 5], params_with(i)) for i in mine))
        found.update(zip(mine, map(exact_parts, results), strict=True))

    async def gone() -> None:
        asyncio.create_task(front.generate(PROMPTS[1], endless()))  # noqa: RUF006
        await asyncio.sleep(0.05)

    threads = [threading.Thread(target=lambda k=k: asyncio.run(some(range(k, num, 3)))) for k in range(3)]
    threads.append(threading.Thread(target=lambda: asyncio.run(gone())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    front.close()
    assert [found[i] for i in range(num)] == [plain_answer(i) for i in range(num)]
    assert_empty(drafting())


def test_without_references_it_ends_its_thread_and_frees_the_model() -> None:
    front = AsyncLLM(LLM(str(TARGET), "ngram", dtype="float32"))
    assert exact_parts(asyncio.run(front.generate(PROMPTS[0], params_with(0)))) == plain_answer(0)
    thread, engine = front.thread, weakref.ref(front.llm.engine)
    del front
    gc.collect()  # the event loop of the request has reference cycles
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert engine() is None


def test_a_request_whose_loop_is_closed_leaves_the_engine() -> None:
    """Nothing can receive its tokens any more; it would be generated to the end of the context."""
    front, loop, num_drawn = AsyncLLM(plain()), asyncio.new_event_loop(), [0]

    def slow(tokens: Sequence[int], logits: Tensor) -> Tensor:
        num_drawn[0] += 1
        time.sleep(0.005)
        return logits

    stream = front.stream(PROMPTS[1], endless(logits_processors=[slow]))
    loop.run_until_complete(anext(stream))
    loop.close()
    num_before, deadline_s = num_drawn[0], time.monotonic() + PATIENCE_S
    while front.outboxes or plain().engine.has_work:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    assert num_drawn[0] - num_before < 10
    front.close()
    assert isinstance(stream, AsyncGenerator)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_until_complete(stream.aclose())
