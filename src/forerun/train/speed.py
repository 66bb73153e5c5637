"""Predicted speed-up, from acceptance on held-out answers and the measured cost of rounds with this drafter.

For the measurement the untrained student drafts for the target, since the cost of rounds depends on the network's shape
and not on its weights. Costs are measured by `tune/passes.py` at batch size 1, drafted and plain rounds alternating.
The shortest time is used, since other processes on the same cores only make times longer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from forerun.annotations import ProgressCallback
from forerun.bench.material import Item, Workload
from forerun.bench.plan import Group
from forerun.bench.run import BenchSetup
from forerun.control.controller import FixedDepth
from forerun.draft.base import Drafter
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.errors import DraftError
from forerun.heads.student import Student
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.tune.passes import COARSE_DEPTHS, PassMeter, RowCosts, sizes_at

CACHE_TOKENS = 2048  # the drafter's cache while it is timed
REPEATS = 8  # rounds of each size


def best_depth(costs: RowCosts | None, tokens_per_round: Sequence[float]) -> tuple[int, float] | None:
    """(best depth, speed-up) for these tokens per round by depth (from 1); None if rounds were not timed.

    A drafted round costs at least as much as a plain one, so no predicted speed-up exceeds the tokens per round.
    """
    if costs is None:
        return None
    gains = [tokens / max(1.0, costs.round_ratio(depth)) for depth, tokens in enumerate(tokens_per_round, start=1)]
    depth = max(range(len(gains)), key=gains.__getitem__)
    return depth + 1, gains[depth]


def round_costs(
    llm: LLM,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    depths: Sequence[int],
    progress: ProgressCallback,
) -> RowCosts | None:
    """Costs of rounds of one sequence after these prompts; None if the context is too short to measure them."""
    deepest = max(depths)
    num_tokens = llm.plan.max_model_len - max(map(len, prompts)) - deepest - 3
    if num_tokens < 1:
        return None
    texts = Workload("prompts", tuple(Item(tuple(prompt), None, "") for prompt in prompts))
    setup = BenchSetup(llm, {texts.name: texts}, num_tokens, drafter=drafter, controller=FixedDepth())
    meter = PassMeter(setup, Group(texts.name, 1, temperature), None, deepest, REPEATS)
    try:
        num_busy = meter.measure(sizes_at(1, depths), progress).num_busy
    except DraftError:
        return None
    plain_s = meter.shortest_s[0]
    passes = {1 + depth: taken_s / plain_s for depth, taken_s in meter.shortest_s.items()}
    return RowCosts(plain_s, passes, {}, num_busy=num_busy)


def costs_of_student(
    llm: LLM,
    target: Blueprint,
    student: Student,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    deepest: int,
    progress: ProgressCallback,
) -> RowCosts | None:
    """Costs of rounds with this student's drafts, at depths up to `deepest`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "untrained"
        folder.mkdir()
        student.write(student.weights, folder)
        plan = plan_drafter(student.spec(folder), DraftContext(target, llm.tokenizer))
        drafter = plan.build(dict.fromkeys(plan.models, CACHE_TOKENS), None, llm.engine.runner)
    depths = sorted({*(depth for depth in COARSE_DEPTHS if depth < deepest), deepest})
    return round_costs(llm, drafter, prompts, temperature, depths, progress)


def read_costs(path: Path) -> RowCosts | None:
    """Read stored costs; None if they cannot be read."""
    try:
        return RowCosts.from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
