"""Costs: what rounds of a target and a drafter take, as measured by the engine's own calibration.

This file decides which batch sizes are measured, and how a round in which only some rows are drafted is priced.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.annotations import ProgressCallback
from forerun.economy import Kind
from forerun.engine.arms import Arm
from forerun.engine.calibration import BATCHES, measure
from forerun.engine.kept_costs import as_json
from forerun.engine.measured import MeasuredDepth
from forerun.llm import LLM
from forerun.tune.predict import Drafting

TURNS = 2
TABLE_DEPTHS = (0, 1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Outside:
    """What the engine takes for a round outside of passes, drafts and verdicts: (rows, plain, drafted), by rows."""

    measured: tuple[tuple[int, float, float], ...] = ()

    def seconds(self, num_rows: int, drafted: bool) -> float:
        """For a round of so many rows: on the line between the sizes that were measured."""
        if not self.measured:
            return 0.0
        column = 2 if drafted else 1
        return float(np.interp(num_rows, [each[0] for each in self.measured], [each[column] for each in self.measured]))


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What a calibrated controller knows of passes and drafts, and what else a round takes."""

    known: MeasuredDepth
    outside: Outside = field(default_factory=Outside)

    def pass_s(self, num_rows: int, num_tokens: float, merged: bool = False) -> float:
        """A pass of so many rows over so many tokens, and all that goes with it but drafting."""
        passes = self.known.costs.of(Kind.of(num_rows, 0, merged))
        return passes.expect(round(num_tokens)) + self.outside.seconds(num_rows, num_tokens > num_rows)

    def plain_s(self, num_rows: int) -> float:
        """Seconds of a plain round of so many rows."""
        return self.pass_s(num_rows, num_rows)

    def drafted_s(self, num_rows: int, drafting: Drafting) -> float:
        """Seconds of a round in which all rows are drafted like this.

        Where few of few rows can be drafted, some rounds have no guesses and cost what plain ones do.
        """
        members, merged = self.members(drafting.arm)
        share = min(1.0, drafting.covered * num_rows)  # of the rounds, those with any guesses
        if share == 0:
            return self.plain_s(num_rows)
        num_guesses = drafting.guesses * num_rows / share
        pass_s = self.pass_s(num_rows, num_rows + num_guesses, merged)
        drafted = max(1, round(drafting.covered * num_rows))
        draft_s = sum(member.drafting_s(drafting.depth, drafted) for member in members)
        return share * (pass_s + draft_s) + (1 - share) * self.plain_s(num_rows)

    def reading_s(self, arm: str, num_tokens: float) -> float:
        """Seconds that what drafts takes to read a prompt of so many tokens."""
        return sum(member.reading_s for member in self.members(arm)[0]) * num_tokens

    def members(self, arm: str) -> tuple[Sequence[Arm], bool]:
        """Those who draft where this arm does, and whether their trees are merged."""
        arms = self.known.arms
        number = arms.names.index(arm)
        merged = arms.is_mix and number == len(arms.arms) - 1
        return (arms.arms[:-1] if merged else [arms.arms[number]]), merged


def measured_costs(llm: LLM, batches: Sequence[int], progress: ProgressCallback) -> dict[str, Any]:
    """What rounds take at these batch sizes, in the form of `engine/kept_costs.py`. The engine must be idle.

    Everything is measured twice, and the shorter time counts: neighbours on the same cores only make times longer.
    """
    found = []
    for turn in range(TURNS):
        controller = MeasuredDepth()
        for number, batch in enumerate(sorted(batches)):
            progress("measuring costs", (turn + number / len(batches)) / TURNS)
            like = max(known for known in BATCHES if known <= max(batch, min(BATCHES)))
            measure(llm.engine, llm.requests, llm.generation_defaults.params(), controller, None, {batch: like})
        controller.begin()
        found.append(as_json(controller))
    return functools.reduce(shorter, found)


def shorter(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two measurements of the same, with the shorter time wherever both know one."""
    kinds: dict[tuple[Any, ...], dict[str, float]] = {}
    for entry in (*one["passes"], *other["passes"]):
        sizes = kinds.setdefault(tuple(entry["kind"]), {})
        for size, usual_s in entry["sizes"].items():
            sizes[size] = min(usual_s, sizes.get(size, usual_s))
    arms = []
    for own, second in zip(one["arms"], other["arms"], strict=True):
        lines = [*own["drafts"].items(), *second["drafts"].items()]
        lines.sort(key=lambda line: -line[1]["seconds"] / max(1.0, line[1]["sizes"]))  # the last one of a size counts
        reading_s = min(own["reading_s"], second["reading_s"])
        arms.append({**own, "drafts": dict(lines), "reading_s": reading_s})
    return {**one, "passes": [{"kind": list(kind), "sizes": sizes} for kind, sizes in kinds.items()], "arms": arms}


def cost_table(costs: MeasuredCosts, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds of the target's part of a round and of each arm's drafting, by batch and depth."""
    arms = costs.known.arms
    own = arms.arms[:-1] if arms.is_mix else arms.arms
    return [
        {
            "batch": batch,
            "depth": depth,
            "pass_s": costs.pass_s(batch, batch * (1 + depth)),
            "draft_s": {
                name: arm.drafting_s(depth, batch) if depth else 0.0 for name, arm in zip(arms.names, own, strict=False)
            },
        }
        for batch in batches
        for depth in TABLE_DEPTHS
    ]
