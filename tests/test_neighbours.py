"""Other programs' load during a measurement is reported with the figure, and disturbed figures are not kept."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from forerun import LLM, machine
from forerun.bench.figures import group_figures
from forerun.bench.measure import Measurements
from forerun.bench.plan import Group, Turn
from forerun.bench.run import BenchRun
from forerun.bench.show import table
from forerun.engine import calibration
from forerun.kernels.threads import FreeCores, allowed_cores
from forerun.machine import Neighbours, disturbance, disturbs
from forerun.models import choice
from kit.bench_runs import run_of
from kit.checkpoints import SMALL, TARGET
from kit.servers import until

BUSY = 1.5
DISTURBING = 0.2


@pytest.fixture(autouse=True)
def measurements_can_be_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DISTURBING", DISTURBING)


class FakeTime:
    """A clock that only `run` advances, while other programs keep so many cores busy."""

    def __init__(self) -> None:
        self.now_s, self.taken_s = 100.0, 7.0

    def run(self, wall_s: float, num_busy: float) -> None:
        self.now_s += wall_s
        self.taken_s += num_busy * wall_s

    def neighbours(self) -> Neighbours:
        return Neighbours(lambda: self.now_s, lambda: self.taken_s)


def test_busy_cores_are_those_of_the_time_between() -> None:
    times = FakeTime()
    times.run(5, 3)
    watch = times.neighbours()
    times.run(1, 0.5)
    times.run(3, 1.5)
    assert watch.num_busy() == pytest.approx(1.25)


def test_nothing_is_reported_of_a_short_time_or_by_a_system_without_counters() -> None:
    times = FakeTime()
    watch = times.neighbours()
    times.run(0.1, 2)
    assert watch.num_busy() is None
    silent = Neighbours(lambda: times.now_s, lambda: None)
    times.run(5, 2)
    assert silent.num_busy() is None
    assert not disturbs(None)
    assert disturbance(None) == disturbance(0.9 * DISTURBING) == ""
    assert f"{BUSY} of {len(allowed_cores())} cores" in disturbance(BUSY)


def test_what_the_host_of_a_virtual_machine_takes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (core, *_), stat = sorted(allowed_cores()), tmp_path / "stat"
    free = FreeCores(stat=stat, process_s=lambda: 0.0)
    stat.write_text(f"cpu{core} 100 0 0 0 0 0 0 300\n")
    assert (free.others_s(), free.others_s(stolen=True)) == (1.0, 4.0)


def test_a_busy_program_is_noticed() -> None:
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watch = Neighbours()
        until(lambda: disturbs(watch.num_busy()), pause_s=0.1)  # other processes may keep it waiting
    finally:
        spinning.kill()
        spinning.wait()


@pytest.mark.parametrize(("plain", "drafted"), [(0.0, BUSY), (BUSY, 0.0), (None, 0.01)])
def test_a_disturbed_benchmark_is_marked_in_the_line_of_the_figure(plain: float | None, drafted: float) -> None:
    """A ratio is as uncertain as the more disturbed of its two figures."""
    figures = group_figures(Group("code", 1, 0.0), [run_of(0, 1.0, plain), run_of(1, 2.0, drafted)])
    file = io.StringIO()
    Console(width=120, file=file).print(table(figures))
    (line,) = [line for line in file.getvalue().splitlines() if "0.50" in line]
    assert ("disturbed" in line) == (BUSY in (plain, drafted))


def test_runs_that_were_disturbed_are_made_again_by_the_same_command(tmp_path: Path) -> None:
    kept = Measurements.open(tmp_path / "state.jsonl", {}, "benchmark", "state", "file")
    kept.add("busy", asdict(run_of(1, 2.0, BUSY)))
    kept.add("quiet", asdict(run_of(1, 2.0, 0.0)))
    kept.add("a number", 3)
    again = Measurements.open(tmp_path / "state.jsonl", {}, "benchmark", "state", "file")
    assert [again.holds(name) for name in ("busy", "quiet", "a number", "none")] == [False, True, True, False]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the number of busy cores that every measurement finds."""

    def set_busy(num_busy: float) -> None:
        monkeypatch.setattr(Neighbours, "num_busy", lambda self: num_busy)

    return set_busy


def test_kernels_are_not_chosen_by_disturbed_times(always: Callable[[float], None]) -> None:
    calls = []

    def measure() -> choice.MeasuredTimes:
        calls.append(1)
        return {}

    always(BUSY)
    assert choice.measure_undisturbed(measure) is None
    assert len(calls) == choice.TRIES
    always(0.0)
    assert choice.measure_undisturbed(measure) == {}


def test_costs_of_rounds_that_were_disturbed_are_not_kept(
    always: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = []
    monkeypatch.setattr(calibration, "keep", lambda key, found: kept.append(json.dumps(found)))
    monkeypatch.setattr(calibration, "read_kept", lambda *_: None)
    monkeypatch.setattr(calibration, "LIMIT_S", 1e6)  # however slow the machine is
    for num_busy in (BUSY, 0.0):
        always(num_busy)
        LLM(str(TARGET), f"model:{SMALL}", max_model_len=128).close()
        assert len(kept) == (num_busy == 0.0)
        assert ("The next start measures again" in caplog.text) == disturbs(num_busy)
        caplog.clear()


def test_a_run_records_the_load_of_other_programs() -> None:
    run = run_of(0, 1.0, 0.25)
    turn = Turn(repetition=run.repetition, depth=run.depth)
    assert BenchRun.from_json(json.loads(json.dumps(asdict(run))), turn, len(run.answers)) == run
