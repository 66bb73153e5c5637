"""Leaving costs what the one who leaves holds, however many others there are: thousands leave within a second."""

import asyncio
import time
from pathlib import Path

from forerun.async_llm import AsyncLLM
from forerun.config import EngineOptions, Speculation
from forerun.draft.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.engine.request import Requests
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from unchecked import unchecked

TARGET = Path(__file__).resolve().parents[1] / "data" / "stories260k"
MANY, MOST_S = 4000, 1.0
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, seed=0)


def test_an_engine_lets_go_of_thousands_at_once() -> None:
    """The last first, which a search from the front would find latest; some are running, most wait."""
    runner = Runner.of(Blueprint.of(str(TARGET), dtype="float32").load(64).decoder, 1024)
    engine = Engine(runner, NgramDrafter(), options=EngineOptions(max_num_seqs=4))
    maker = Requests(None, 512, 256, eos_ids=(), default=Speculation(0))
    with unchecked():
        texts = [maker.sequences(Request.of([1, 5, 6], ENDLESS))[0] for _ in range(MANY)]
        for text in texts:
            engine.submit(text)
        engine.step()
        started_s = time.process_time()
        for text in reversed(texts):
            engine.cancel(text.request_id)
        taken_s = time.process_time() - started_s
    assert taken_s < MOST_S
    assert not engine.has_work
    assert not engine.roster.samples
    assert engine.step() == []


def test_an_event_loop_lets_go_of_thousands_at_once() -> None:
    """The same from outside: tasks that are cancelled while their requests wait."""

    async def main(llm: LLM) -> float:
        async with AsyncLLM(llm) as front:
            tasks = [asyncio.create_task(front.generate([1, 5, 6], ENDLESS)) for _ in range(MANY)]
            while len(llm.engine.sequences) < MANY:
                await asyncio.sleep(0.01)
            started_s = time.process_time()
            for task in reversed(tasks):
                task.cancel()
            await asyncio.wait(tasks)
            while llm.engine.has_work:
                await asyncio.sleep(0.001)
            return time.process_time() - started_s

    llm = LLM(str(TARGET), dtype="float32", max_num_seqs=4, max_model_len=256)
    with unchecked():
        assert asyncio.run(main(llm)) < MOST_S
    assert not llm.engine.roster.samples
