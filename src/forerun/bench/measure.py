"""A benchmark from start to end: it loads models, continues from saved runs, and puts the figures in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from forerun.bench.bench import bench
from forerun.bench.material import Passage
from forerun.bench.plan import Selection
from forerun.bench.report import Bandwidth, BenchReport
from forerun.bench.setup import Models, about, set_up
from forerun.bench.state import State, default_path, key_of
from forerun.machine import bandwidth_bytes_per_s
from forerun.models.loading import Blueprint
from forerun.streams import show_note


@runtime_checkable
class Bar(Protocol):
    """What shows how far the work is."""

    def __call__(self, what: str, done: float, detail: str = "") -> None:
        """`done` is the fraction of `what` that is finished; `detail` says what of it runs now."""
        ...

    def stop(self) -> None:
        """Take the bar off the screen."""
        ...


def measure(
    models: Models,
    passages: Mapping[str, Sequence[Passage]],
    selection: Selection,
    path: Path | None,
    fresh: bool,
    bar: Bar,
) -> BenchReport:
    """Run what is not finished yet, and report. Finished runs are in the file `path`, or in the cache folder."""
    stage = set_up(models, passages, selection, bar)
    what = about(models, stage, selection)
    state = State.open(path or default_path(key_of(what)), what, fresh)
    if state.runs:
        show_note(f"{len(state.runs)} runs are finished already ({state.path}); --fresh makes them again.")
    bar("benchmark", 0.0, "memory bandwidth")
    target = Blueprint.of(models.target)
    start = bandwidth_bytes_per_s(device=target.placement.device)
    try:
        groups = bench(stage, selection, state, lambda detail, done: bar("benchmark", done, detail))
    except KeyboardInterrupt:
        bar.stop()
        num_runs = len(state.runs)
        show_note(f"Interrupted. The same command goes on behind {num_runs} finished runs ({state.path}).")
        raise
    bar("benchmark", 1.0, "memory bandwidth")
    places = {name: [item.place for item in workload.items] for name, workload in stage.workloads.items()}
    bandwidth = Bandwidth(start, bandwidth_bytes_per_s(device=target.placement.device))
    return BenchReport(what, bandwidth, target.pass_bytes, places, tuple(groups), target.placement)
