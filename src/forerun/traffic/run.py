"""`measure_traffic`: runs a load test, block by block, and returns the report.

In an open loop, latency is counted from a request's scheduled time, so that a slow server or client cannot reduce the
load or the measured times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.bench.material import Passage, mixed_passages
from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.traffic.client import ServedModel, ServerAddress, TimedAnswer, TrafficClient
from forerun.traffic.figures import ServiceLevel, TrafficBlock, TrafficReport, differences, traffic_figures
from forerun.traffic.plan import ServerLoad, SpeculationMode, TrafficPlan, TrafficTurn

MOST_WARM_UP = 8  # requests of a mode before its first block
FIXED = ("model", "prompt", "messages", "max_tokens", "temperature", "seed", "stream", "stream_options", "speculation")


async def measure_traffic(
    address: ServerAddress,
    plan: TrafficPlan,
    agreement: ServiceLevel,
    report: ProgressCallback,
    prompts: Path | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> TrafficReport:
    """Run a plan with the prompts of a file, or the bundled ones; `extra`: additional fields of every body.

    Raises InvalidRequest if requests cannot be sent or are refused.
    """
    for name in extra:
        if name in FIXED:
            raise InvalidRequest("body", f"{shown(name)} is set by the load test: leave it out.")
    passages = mixed_passages(prompts)
    for passage in passages:
        prompt_fields(passage, address.chat)
    async with TrafficClient(address) as client:
        model = await client.served_model()
        plan = plan.for_server(model.forerun)
        sender = Sender(client, model, plan, passages, extra)
        for mode in plan.modes:
            for answer in await sender.warm_up(ServerLoad("concurrency", 1.0), mode):
                if answer.error:  # all other requests would fail too
                    raise InvalidRequest("url", f"the server failed the first request: {answer.error}.")
        blocks = await sender.run(report)
    return TrafficReport(
        address.base,
        model,
        plan,
        agreement,
        min(len(passages), plan.repeats * plan.num_requests),
        traffic_figures(plan, blocks, agreement, lambda *request: sender.prompt(*request).category),
        blocks,
        differences(plan, blocks) if model.forerun else [],
    )


def prompt_fields(prompt: Passage, chat: bool) -> Mapping[str, Any]:
    """The prompt fields of a body; for a chat, a plain prompt becomes the user's message.

    Raises InvalidRequest for messages without `chat`.
    """
    messages = prompt.conversation
    if chat:
        return {"messages": messages or [{"role": "user", "content": prompt.prompt}]}
    if messages is not None:
        raise InvalidRequest("prompts", f"{prompt.place}: it has messages: add --chat.")
    return {"prompt": prompt.prompt}


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends the requests of a plan to one server."""

    client: TrafficClient
    model: ServedModel
    plan: TrafficPlan
    prompts: Sequence[Passage]
    extra: Mapping[str, Any]

    def prompt(self, repetition: int, index: int) -> Passage:
        """The prompt of a request: each repetition continues in the list, and all modes use the same prompts."""
        return self.prompts[(repetition * self.plan.num_requests + index) % len(self.prompts)]

    def body(self, turn: TrafficTurn, index: int) -> dict[str, Any]:
        """The body of a request."""
        plan = self.plan
        fields = {
            "model": self.model.name,
            **prompt_fields(self.prompt(turn.repetition, index), self.client.address.chat),
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "seed": plan.seed + turn.repetition * plan.num_requests + index,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        ignored = {"ignore_eos": True} if plan.ignore_eos else {}
        return {**fields, **ignored, **turn.mode.field, **self.extra}

    async def ask(self, turn: TrafficTurn, index: int, due_s: float) -> TimedAnswer:
        """Send one request now."""
        return await self.client.ask(index, self.body(turn, index), due_s)

    async def warm_up(self, load: ServerLoad, mode: SpeculationMode) -> list[TimedAnswer]:
        """Send a few requests that are not measured, with the concurrency of the load."""
        most = load.value if load.kind == "concurrency" else MOST_WARM_UP / 2
        number = max(1, min(int(most), MOST_WARM_UP, self.plan.num_requests))
        turn = TrafficTurn(load, self.plan.repeats, mode)  # with prompts that no repetition uses, if there are any
        now_s = time.perf_counter()
        return list(await asyncio.gather(*(self.ask(turn, index, now_s) for index in range(number))))

    async def run(self, report: ProgressCallback) -> list[TrafficBlock]:
        """Run all blocks of the plan, in order."""
        turns, warm = list(self.plan.turns()), set()
        blocks: list[TrafficBlock] = []
        for done, turn in enumerate(turns):
            report(f"{turn.load.name}, {turn.mode.shown}", done / len(turns))
            if (turn.load, turn.mode) not in warm:
                warm.add((turn.load, turn.mode))
                await self.warm_up(turn.load, turn.mode)
            blocks.append(await self.block(turn))
        return blocks

    async def block(self, turn: TrafficTurn) -> TrafficBlock:
        """Run one block to its end."""
        run = self.closed_loop if turn.load.kind == "concurrency" else self.open_loop
        start_s = time.perf_counter()
        answers = sorted(await run(turn, start_s), key=lambda answer: answer.index)
        seconds = max(time.perf_counter() - start_s, self.plan.span_s(turn.load))
        return TrafficBlock(turn, tuple(answers), seconds)

    async def open_loop(self, turn: TrafficTurn, start_s: float) -> list[TimedAnswer]:
        """Run an open loop: send every request at its scheduled time."""

        async def ask_at(index: int, due_s: float) -> TimedAnswer:
            await asyncio.sleep(due_s - time.perf_counter())
            return await self.ask(turn, index, due_s)

        arrivals = self.plan.arrivals_s(turn.load, turn.repetition)
        return await asyncio.gather(*(ask_at(index, start_s + arrival) for index, arrival in enumerate(arrivals)))

    async def closed_loop(self, turn: TrafficTurn, start_s: float) -> list[TimedAnswer]:
        """Run a closed loop: a request is due when an earlier one is answered."""
        indices: Iterator[int] = iter(range(self.plan.num_requests))

        async def work() -> list[TimedAnswer]:
            return [await self.ask(turn, index, time.perf_counter()) for index in indices]

        return list(chain.from_iterable(await asyncio.gather(*(work() for _ in range(int(turn.load.value))))))
