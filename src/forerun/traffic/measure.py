"""A load test from start to end: which modes are run, and the report of what they took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.config import AUTO
from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.traffic.client import ServedModel, ServerAddress, TrafficClient
from forerun.traffic.figures import ServiceLevel, differences, traffic_figures
from forerun.traffic.plan import OFF, ServerLoad, SpeculationMode, TrafficPlan
from forerun.traffic.prompts import traffic_prompts
from forerun.traffic.report import TrafficReport
from forerun.traffic.run import Sender, run_traffic

OWN = ("model", "prompt", "messages", "max_tokens", "temperature", "seed", "stream", "stream_options", "speculation")
DEFAULT_MODES = (OFF, AUTO)  # of a server of forerun


@dataclass(frozen=True, slots=True)
class TrafficTask:
    """What is sent: `modes` None lets the server decide; `extra` are further fields of every body."""

    loads: tuple[ServerLoad, ...]
    modes: tuple[str, ...] | None
    prompts: Path | None
    requests: Mapping[str, Any]  # the other fields of the TrafficPlan
    agreement: ServiceLevel
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.extra:
            if name in OWN:
                raise InvalidRequest("body", f"{shown(name)} is set by the load test itself: leave it out.")

    def plan(self, model: ServedModel | None = None) -> TrafficPlan:
        """The plan for this model. Raises InvalidRequest for modes of a server that has none."""
        served = model is None or model.forerun
        if self.modes and not served:
            raise InvalidRequest("speculation", "this server is not forerun's: requests cannot change how it drafts.")
        names = self.modes or (DEFAULT_MODES if served else ("",))
        return TrafficPlan(self.loads, tuple(map(SpeculationMode, names)), **self.requests)


async def measure_traffic(address: ServerAddress, task: TrafficTask, report: ProgressCallback) -> TrafficReport:
    """Send what a task says, and report. Raises InvalidRequest where nothing can be sent, or nothing was answered."""
    task.plan()  # mistakes are told before anything is asked
    prompts = traffic_prompts(task.prompts, address.chat)
    async with TrafficClient(address) as client:
        model = await client.served_model()
        plan = task.plan(model)
        sender = Sender(client, model, plan, prompts, dict(task.extra))
        await refuse_in_vain(sender)
        blocks = await run_traffic(sender, report)

    def category(repetition: int, index: int) -> str:
        return sender.prompt(repetition, index).category

    return TrafficReport(
        address.base,
        model,
        plan,
        task.agreement,
        min(len(prompts), plan.repeats * plan.num_requests),
        traffic_figures(plan, blocks, task.agreement, category),
        blocks,
        differences(plan, blocks) if model.forerun else [],
    )


async def refuse_in_vain(sender: Sender) -> None:
    """Raise InvalidRequest where the server refuses the first request of a mode: it would refuse them all."""
    errors: Sequence[str] = [
        answer.error
        for mode in sender.plan.modes
        for answer in await sender.warm_up(ServerLoad("concurrency", 1.0), mode)
        if answer.error
    ]
    if errors:
        raise InvalidRequest("url", f"the server does not answer a first request: {errors[0]}.")
