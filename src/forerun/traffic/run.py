"""Running a load test: blocks of requests, one load and mode at a time.

This file decides when requests are sent. In an open loop every request has its time, and what it takes is counted from
there: a server that falls behind, or a client that does, cannot make the load lighter or the times shorter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.traffic.client import ServedModel, TimedAnswer, TrafficClient
from forerun.traffic.plan import ServerLoad, SpeculationMode, TrafficPlan, TrafficTurn
from forerun.traffic.prompts import TrafficPrompt

MOST_WARM_UP = 8  # requests of a mode before its first block


@dataclass(frozen=True, slots=True)
class TrafficBlock:
    """One block as it ran: its answers by number of the request, and its seconds until the last of them was over.

    At a rate these are never less than the time within which its requests arrive.
    """

    turn: TrafficTurn
    answers: tuple[TimedAnswer, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends the requests of a plan to one model."""

    client: TrafficClient
    model: ServedModel
    plan: TrafficPlan
    prompts: Sequence[TrafficPrompt]
    extra: dict[str, Any]

    def prompt(self, repetition: int, index: int) -> TrafficPrompt:
        """The prompt of a request: every repetition goes on in the list, every mode asks the same."""
        return self.prompts[(repetition * self.plan.num_requests + index) % len(self.prompts)]

    def body(self, turn: TrafficTurn, index: int) -> dict[str, Any]:
        """The body of a request."""
        plan = self.plan
        own = {
            "model": self.model.name,
            **self.prompt(turn.repetition, index).asked,
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "seed": plan.seed + turn.repetition * plan.num_requests + index,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        ends = {"ignore_eos": True} if plan.ignore_eos else {}
        return {**own, **ends, **turn.mode.field, **self.extra}

    async def ask(self, turn: TrafficTurn, index: int, due_s: float) -> TimedAnswer:
        """Send one request now."""
        return await self.client.ask(index, self.body(turn, index), due_s)

    async def warm_up(self, load: ServerLoad, mode: SpeculationMode) -> list[TimedAnswer]:
        """A few requests that do not count, as many at once as the load has."""
        most = load.value if load.kind == "concurrency" else MOST_WARM_UP / 2
        number = max(1, min(int(most), MOST_WARM_UP, self.plan.num_requests))
        turn = TrafficTurn(load, self.plan.repeats, mode)  # of prompts that no repetition begins with, if there are any
        now_s = time.perf_counter()
        return list(await asyncio.gather(*(self.ask(turn, index, now_s) for index in range(number))))

    async def block(self, turn: TrafficTurn) -> TrafficBlock:
        """Run one block to its end."""
        run = self.closed if turn.load.kind == "concurrency" else self.opened
        start_s = time.perf_counter()
        answers = sorted(await run(turn, start_s), key=lambda answer: answer.index)
        seconds = max(time.perf_counter() - start_s, self.plan.span_s(turn.load))
        return TrafficBlock(turn, tuple(answers), seconds)

    async def opened(self, turn: TrafficTurn, start_s: float) -> list[TimedAnswer]:
        """Every request at its own time."""

        async def at(index: int, due_s: float) -> TimedAnswer:
            await asyncio.sleep(due_s - time.perf_counter())
            return await self.ask(turn, index, due_s)

        arrivals = self.plan.arrivals_s(turn.load, turn.repetition)
        return await asyncio.gather(*(at(index, start_s + arrival) for index, arrival in enumerate(arrivals)))

    async def closed(self, turn: TrafficTurn, start_s: float) -> list[TimedAnswer]:
        """So many at a time; each is due when one before it is answered."""
        left: Iterator[int] = iter(range(self.plan.num_requests))

        async def work() -> list[TimedAnswer]:
            return [await self.ask(turn, index, time.perf_counter()) for index in left]

        return [
            answer for own in await asyncio.gather(*(work() for _ in range(int(turn.load.value)))) for answer in own
        ]


async def run_traffic(sender: Sender, report: ProgressCallback) -> list[TrafficBlock]:
    """Send everything that a plan asks for; the blocks in the order in which they ran."""
    turns, warm = list(sender.plan.turns()), set()
    blocks: list[TrafficBlock] = []
    for done, turn in enumerate(turns):
        report(f"{turn.load.name}, {turn.mode.shown}", done / len(turns))
        if (turn.load, turn.mode) not in warm:
            warm.add((turn.load, turn.mode))
            await sender.warm_up(turn.load, turn.mode)
        blocks.append(await sender.block(turn))
    return blocks
