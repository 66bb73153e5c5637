"""The report of a load test, and its form as JSON.

This file decides names and units: times in seconds, shares between 0 and 1, and null where a value is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.prove.proof import jsonable
from forerun.traffic.client import ServedModel
from forerun.traffic.figures import OtherAnswer, ServiceLevel, TrafficBlock, TrafficFigures, capacity
from forerun.traffic.plan import SpeculationMode, TrafficPlan


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """A whole load test. `compared` says whether answers of modes had to be the same; `others` are those that were not.

    `num_prompts` counts the different prompts; where requests are more, some were asked again.
    """

    url: str
    model: ServedModel
    plan: TrafficPlan
    agreement: ServiceLevel
    num_prompts: int
    figures: Sequence[TrafficFigures]
    blocks: Sequence[TrafficBlock]
    others: Sequence[OtherAnswer]

    @property
    def compared(self) -> bool:
        """Whether there were modes whose answers have to be equal."""
        return self.model.forerun and len(self.plan.modes) > 1

    @property
    def same_answers(self) -> bool | None:
        """Whether they were; None where nothing was compared."""
        return not self.others if self.compared else None

    def of(self, mode: SpeculationMode) -> list[TrafficFigures]:
        """The figures of a mode."""
        return [each for each in self.figures if each.mode == mode]

    def as_object(self) -> dict[str, Any]:
        """For JSON; `requests` has every request with its times."""
        values: dict[str, Any] = jsonable(
            {
                "url": self.url,
                "model": asdict(self.model),
                "plan": asdict(self.plan),
                "agreement": asdict(self.agreement),
                "num_prompts": self.num_prompts,
                "same_answers": self.same_answers,
                "differences": [asdict(other) for other in self.others],
                "capacity": [self.capacity_object(mode) for mode in self.plan.modes] if self.agreement.asks else None,
                "cells": [asdict(each) | {"mode": each.mode.name} for each in self.figures],
                "requests": [request for block in self.blocks for request in requests_of_block(block)],
            }
        )
        return values

    def capacity_object(self, mode: SpeculationMode) -> dict[str, Any]:
        """How heavy a load of this mode keeps the agreement."""
        best, broken = capacity(self.figures, mode)
        served = best.requests_per_s.median if best and best.requests_per_s else None
        load = best and asdict(best.load)
        return {"mode": mode.name, "load": load, "requests_per_s": served, "a_heavier_load_breaks_it": broken}


def requests_of_block(block: TrafficBlock) -> list[dict[str, Any]]:
    """Every request of a block; a failed one has its error in place of times."""
    turn = block.turn
    shared = {"load": asdict(turn.load), "mode": turn.mode.name, "repetition": turn.repetition}
    times = ("first_token_s", "between_tokens_s", "longest_gap_s", "total_s")
    return [
        {**shared, "request": answer.index, "num_tokens": answer.num_tokens, "error": answer.error or None}
        | {name: getattr(answer, name) for name in times if not answer.error}
        for answer in block.answers
    ]
