"""Costs: what the controllers of measured runs begin with, as measured by the engine's own calibration, and a table.

`passes.py` measures what predictions are made from.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.control.kept_costs import as_json
from forerun.control.measured import MeasuredDepth
from forerun.engine.calibration import BATCHES, measure
from forerun.llm import LLM
from forerun.tune.passes import PassTable

TURNS = 2
TABLE_DEPTHS = (0, 1, 2, 4, 8, 16)


def measured_costs(llm: LLM, batches: Sequence[int], progress: ProgressCallback) -> dict[str, Any]:
    """What rounds take at these batch sizes, in the form of `control/kept_costs.py`. The engine must be idle.

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


def cost_table(costs: Mapping[int, PassTable]) -> list[dict[str, Any]]:
    """Seconds of the target's part of a round and of each arm's drafting, by batch and depth."""
    return [
        {
            "batch": batch,
            "depth": depth,
            "pass_s": known.pass_s(next(iter(known.by_arm)), batch, batch * (1 + depth)),
            "draft_s": {arm: known.draft_s(arm, batch, depth) for arm in known.by_arm},
        }
        for batch, known in costs.items()
        for depth in TABLE_DEPTHS
    ]
