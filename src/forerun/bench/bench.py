"""The benchmark loop: it runs what is left of a selection, group by group, and alternates between depths.

This file decides only the order. Every group is warmed up before its first run, also where an interrupted benchmark
is continued.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.annotations import ProgressCallback
from forerun.bench.figures import GroupFigures, group_figures
from forerun.bench.plan import Group, Selection, depth_name
from forerun.bench.run import Stage, hash_of
from forerun.bench.state import State


def bench(stage: Stage, selection: Selection, state: State, report: ProgressCallback) -> list[GroupFigures]:
    """Run what `state` does not hold yet, and say what all runs show."""
    groups = selection.groups({name: workload.replayed for name, workload in stage.workloads.items()})
    left = {group: [turn for turn in selection.turns() if (group, turn) not in state.runs] for group in groups}
    weights = {group: weight(stage, group) for group in groups}
    in_all, done = sum(weights[group] * len(turns) for group, turns in left.items()), 0
    for group, turns in left.items():
        if turns:
            report(f"{group.name}: warming up", done / in_all)
            stage.warm_up(group, selection.depths)
        for turn in turns:
            report(f"{group.name}, depth {depth_name(turn.depth)}", done / in_all)
            state.add(stage.run(group, turn))
            done += weights[group]
    return [figures_of(stage, selection, state, group) for group in groups]


def weight(stage: Stage, group: Group) -> int:
    """About how much a run of this group takes: the tokens of one sequence, times the waves."""
    workload = stage.workloads[group.workload]
    num_waves = -(-len(workload.items) // group.batch)
    return num_waves * workload.longest(stage.num_tokens)


def figures_of(stage: Stage, selection: Selection, state: State, group: Group) -> GroupFigures:
    """What a finished group shows."""
    runs = [state.runs[group, turn] for turn in selection.turns()]
    return group_figures(group, runs, recorded(stage, group))


def recorded(stage: Stage, group: Group) -> Sequence[str]:
    """The hashes of a replayed workload's answers; none where answers are generated."""
    items = stage.workloads[group.workload].items
    return [hash_of(item.answer) for item in items if item.answer is not None]
