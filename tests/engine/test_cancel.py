"""Cancelling a request takes the same work however many other requests there are.

Work is counted in lines of Python that run, so that it is the same on every machine. A search through sequences counts,
too, one line per sequence, since they are compared by a function in Python here.
"""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import forerun
from forerun.async_llm import AsyncLLM
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.unchecked import unchecked

FEW, MANY = 50, 1000
MOST = 1.5  # times as many lines per cancelled request: a search would take twenty times as many
PATIENCE_S = 300.0
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, seed=0)
PLACES = (str(Path(forerun.__file__).parent), __file__)


class Lines:
    """Counts the lines of forerun and of this file that run while it is on, in all threads that begin after it."""

    def __init__(self) -> None:
        self.on, self.count = False, 0

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        """What sys.settrace takes."""
        if not self.on or not frame.f_code.co_filename.startswith(PLACES):
            return None
        self.count += event == "line"
        return self.trace


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """A count of lines, among them one for each comparison of sequences."""

    def same(one: Sequence, other: object) -> bool:
        return one is other

    monkeypatch.setattr(Sequence, "__eq__", same)
    found, before = Lines(), (sys.gettrace(), threading.gettrace())
    sys.settrace(found.trace)
    threading.settrace(found.trace)
    yield found
    sys.settrace(before[0])
    threading.settrace(before[1])


@contextmanager
def counted(lines: Lines) -> Iterator[None]:
    """Count from 0 while this lasts. The functions that are running already are not counted."""
    lines.on, lines.count = True, 0
    try:
        yield
    finally:
        lines.on = False


def test_cancelling_many_requests_takes_the_same_work_per_request_as_cancelling_few(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some run, most wait: tasks that are cancelled during a round are all removed before the next one."""
    rounds, honest = [], Engine.step
    held, begun, go_on = threading.Event(), threading.Event(), threading.Event()

    def step(engine: Engine) -> object:
        rounds.append(len(engine.sequences))
        if held.is_set():
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return honest(engine)

    async def leave(llm: LLM, number: int) -> float:
        async with AsyncLLM(llm) as front:
            tasks = [asyncio.create_task(front.generate([1, 5, 6], ENDLESS)) for _ in range(number)]
            while len(llm.engine.sequences) < number:
                await asyncio.sleep(0.01)
            held.set()
            assert await asyncio.to_thread(begun.wait, PATIENCE_S)
            with counted(lines):
                for task in reversed(tasks):
                    task.cancel()
                await asyncio.wait(tasks)
                rounds.clear()
                held.clear()
                begun.clear()
                go_on.set()
                while llm.engine.has_work:
                    await asyncio.sleep(0.001)
            go_on.clear()
            assert not any(rounds), "a round contained cancelled requests"
            return lines.count / number

    monkeypatch.setattr(Engine, "step", step)
    llm = LLM(str(TARGET), dtype="float32", max_num_seqs=4, max_model_len=256)
    with unchecked():
        among_few = asyncio.run(leave(llm, FEW))
        assert among_few > 10, "nothing is counted"
        assert asyncio.run(leave(llm, MANY)) < MOST * among_few
    assert not llm.engine.active.samples
