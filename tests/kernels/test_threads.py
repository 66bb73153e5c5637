"""How many threads the compiled kernels use while other programs run."""

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun import LLM, AsyncLLM, SamplingParams
from forerun.kernels import threads
from forerun.kernels.threads import FEW_ROWS, PERIOD_S, TICKS_PER_S, FreeCores, end_idle_threads, num_threads
from kit.checkpoints import TARGET

CORES = frozenset(range(4))


class FakeSystem:
    """A machine of four cores, of which other programs and this process use a set number."""

    def __init__(self, folder: Path) -> None:
        self.stat, self.cpu_max = folder / "stat", folder / "cpu.max"
        self.now_s = self.process_s = 0.0
        self.busy_s = [0.0] * 6  # of the process's four cores and two more
        self.niced_s = 0.0
        self.free = FreeCores(self.stat, self.cpu_max, lambda: self.now_s, lambda: self.process_s)
        self.run([0] * 6, 0)

    def run(self, others: list[float], own_cores: float, wall_s: float = 1.0, niced: float = 0.0) -> int:
        """Lets time pass in which others and this process keep so many cores busy; returns the threads then used."""
        self.now_s += wall_s
        self.process_s += own_cores * wall_s
        for core, share in enumerate(others):
            self.busy_s[core] += share * wall_s
        self.busy_s[0] += own_cores * wall_s
        self.niced_s += niced * wall_s
        lines = [f"cpu{i} {round(s * TICKS_PER_S)} {round(self.niced_s * TICKS_PER_S) if i == 0 else 0} 0 9 0 0 0 0"
                 for i, s in enumerate(self.busy_s)]  # fmt: skip
        self.stat.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8", *lines, "intr 5"]))
        return self.free.threads(4)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    monkeypatch.setattr(threads, "allowed_cores", lambda: CORES)
    return FakeSystem(tmp_path)


def test_cores_of_others_are_left_to_them(system: FakeSystem) -> None:
    assert system.run([0, 0, 0, 0, 0, 0], own_cores=4) == 4
    assert system.run([1, 0, 0, 0, 0, 0], own_cores=3) == 3
    assert system.run([1, 1, 0.6, 0, 0, 0], own_cores=1.4) == 1
    assert system.run([1, 1, 1, 1, 0, 0], own_cores=0.5) == 1
    assert system.run([0.3, 0, 0, 0, 0, 0], own_cores=3.7) == 4


def test_this_processes_own_load_other_cores_and_low_priority_programs_count_as_free(
    system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Low priority is one that is lower than this process's."""
    for nice, num_free in ((0, 4), (5, 1)):
        monkeypatch.setattr(os, "nice", lambda _, nice=nice: nice)
        system.run([0, 0, 0, 0, 0, 0], own_cores=0, wall_s=30)
        assert system.run([0, 0, 0, 0, 1, 1], own_cores=4) == 4
        assert system.run([0, 0, 0, 0, 0, 0], own_cores=0, niced=3) == num_free


def test_a_measured_load_is_used_for_a_while_and_then_measured_again(system: FakeSystem) -> None:
    assert system.run([2, 0, 0, 0, 0, 0], own_cores=2) == 2
    assert system.run([0, 0, 0, 0, 0, 0], own_cores=2, wall_s=PERIOD_S / 2) == 2
    assert system.run([0, 0, 0, 0, 0, 0], own_cores=2, wall_s=PERIOD_S) == 4


def test_load_while_this_process_was_idle_is_not_counted(system: FakeSystem) -> None:
    assert system.run([1, 1, 1, 1, 0, 0], own_cores=0, wall_s=30) == 4
    assert system.run([1, 1, 1, 1, 0, 0], own_cores=0, wall_s=0.3) == 1


def test_passes_that_last_for_seconds_next_to_busy_programs_take_fewer_threads(system: FakeSystem) -> None:
    """Threads that wait for each other make a pass so slow that every measurement is seconds after the last one."""
    assert system.run([1, 1, 1, 1, 0, 0], own_cores=0.3, wall_s=3) == 1
    assert system.run([1, 1, 0, 0, 0, 0], own_cores=1, wall_s=3) == 2
    assert system.run([0, 0, 0, 0, 0, 0], own_cores=2, wall_s=3) == 4


def test_passes_over_many_rows_take_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "free_cores", lambda: SimpleNamespace(threads=lambda most: 1))
    assert (num_threads(), num_threads(FEW_ROWS)) == (1, 1)
    assert num_threads(FEW_ROWS + 1) == torch.get_num_threads()


def test_a_quota_bounds_the_threads(system: FakeSystem) -> None:
    system.cpu_max.write_text("150000 100000\n")
    assert system.run([0] * 6, own_cores=1) == 2
    system.cpu_max.write_text("max 100000\n")
    assert system.run([0] * 6, own_cores=1) == 4


@pytest.mark.parametrize("text", ["", "cpu0\n", "cpu0 a b c\n", None])
def test_a_system_without_load_counters_leaves_all_cores(system: FakeSystem, text: str | None) -> None:
    system.stat.unlink()
    if text is not None:
        system.stat.write_text(text)
    system.now_s += 1
    assert system.free.threads(4) == 4
    assert system.free.threads(3) == 3


def shared_s(share: float, now: list[float], stolen: bool = False) -> float:
    """The CPU time of others who have always used this share of a core."""
    return share * now[0]


@given(st.lists(st.tuples(st.floats(0, 6), st.floats(0, 4), st.floats(0.001, 5)), max_size=8))
def test_the_number_of_threads_is_at_least_one_and_at_most_the_number_set(
    rounds: list[tuple[float, float, float]],
) -> None:
    now, used = [0.0], [0.0]
    free = FreeCores(clock=lambda: now[0], process_s=lambda: used[0])
    for others, process, wall_s in rounds:
        now[0], used[0] = now[0] + wall_s, used[0] + process * wall_s
        free.next_s = -1.0
        free.others_s = partial(shared_s, others, now)  # type: ignore[method-assign]
        assert 1 <= free.threads(3) <= 3


def test_the_load_of_this_machine_can_be_measured() -> None:
    assert num_threads() >= 1


def tasks() -> set[str]:
    """The threads of this process, those of libraries among them."""
    return set(os.listdir("/proc/self/task"))


def left_by(compute: Callable[[], None]) -> set[str]:
    """The threads that another thread's computing leaves behind as long as that thread lives."""
    found = set[str]()

    def run() -> None:
        before = tasks()
        torch.ones(2_000_000).add_(1.0)
        assert tasks() - before, "more than one thread computes"
        compute()
        found.update(tasks() - before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="only Linux tells the threads of a process")
@pytest.mark.skipif(len(threads.allowed_cores()) < 2, reason="one core: one thread computes")
def test_a_finished_computation_leaves_no_threads_behind() -> None:
    """Idle ones count: where there are more than cores, threads sleep at barriers, and passes take twice as long."""
    set_before, llm = torch.get_num_threads(), LLM(str(TARGET), None, max_model_len=64)
    torch.set_num_threads(2)
    try:
        assert left_by(lambda: None), "threads wait for their caller, or this shows nothing"
        assert left_by(end_idle_threads) == set()
        assert left_by(lambda: drop(llm.generate("a", SamplingParams(max_tokens=2)))) == set()
        assert left_by(lambda: drop(LLM(str(TARGET), None, max_model_len=64))) == set()
        fronts = list[AsyncLLM]()
        left = left_by(lambda: fronts.append(AsyncLLM(llm)))
        assert left == {str(front.thread.native_id) for front in fronts}
        fronts[0].close()
    finally:
        torch.set_num_threads(set_before)


def drop(_: object) -> None:
    """Keep nothing."""
