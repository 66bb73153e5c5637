"""The number of threads of the compiled kernels: at most the number of cores that other programs leave free.

All threads of a pass wait for the slowest one. If another busy program makes the system preempt one for some
milliseconds, fewer threads finish sooner: on two cores, one of them busy, one thread gave four times as many tokens per
second as two. The number of threads never changes a result.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

PERIOD_S = 0.2  # between two measurements: the system counts CPU time in hundredths of a second
RECENT_S = 1.0  # the longest interval between measurements that shows the present load while this process is idle
LEAST_SHARE = 0.05  # of a core: with less it is idle; next to busy programs a pass can take seconds
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FEW_ROWS = 32  # passes of more rows last longer than a time slice, and use all cores
PAUSE_SOFT = 1  # OpenMP's omp_pause_soft: ends threads, keeps settings
STAT, CPU_MAX = Path("/proc/stat"), Path("/sys/fs/cgroup/cpu.max")
USER, NICE, SYSTEM, IRQ, SOFTIRQ, STEAL = 1, 2, 3, 6, 7, 8  # columns of a core's line, see proc(5)


@dataclass
class FreeCores:
    """Measures how many of the cores that this process may use are not used by other processes.

    Processes of lower priority do not count, since they are preempted. `clock` and `process_s` return the time and this
    process's CPU time in seconds. `helpers` are ids of processes whose CPU time counts as this process's. If the system
    has no such statistics, as on macOS, all cores count as free.
    """

    stat: Path = STAT
    cpu_max: Path = CPU_MAX
    clock: Callable[[], float] = time.monotonic
    process_s: Callable[[], float] = time.process_time
    num_threads: int = 0  # the last result; 0: none yet
    next_s: float = -math.inf  # the time of the next measurement
    last: tuple[float, float, float] | None = None  # the last measurement: its time, the CPU time of others, its own
    cores: frozenset[int] = field(default_factory=frozenset)
    helpers: set[int] = field(default_factory=set)

    def threads(self, most: int) -> int:
        """The number of threads to use: at most `most`, fewer if cores are busy or a quota allows fewer; at least 1."""
        now_s = self.clock()
        if now_s >= self.next_s or not self.num_threads:
            self.measure(now_s)
        return max(1, min(most, self.num_threads))

    def measure(self, now_s: float) -> None:
        """Set `num_threads` by the CPU time of others since the last time, if that is recent or this process ran."""
        self.next_s = now_s + PERIOD_S
        cores, others_s, own_s = allowed_cores(), self.others_s(), self.process_s()
        busy, then_s, before_s, own_before_s = 0, *(self.last or (-math.inf, 0.0, math.inf))
        longest_s = max(RECENT_S, (own_s - own_before_s) / LEAST_SHARE)
        if others_s is not None and cores == self.cores and 0 < now_s - then_s <= longest_s:
            busy = round((others_s - before_s) / (now_s - then_s))
        self.cores, self.last = cores, None if others_s is None else (now_s, others_s, own_s)
        self.num_threads = max(1, min(len(cores) - max(0, busy), self.quota()))

    def others_s(self, stolen: bool = False) -> float | None:
        """The CPU time of other processes on this process's cores; None if the system has no statistics.

        `stolen`: whether to include the time that a virtual machine's host gave to other machines.
        """
        try:
            lines = [line.split() for line in self.stat.read_text().splitlines() if line.startswith("cpu")]
            columns = (USER, SYSTEM, IRQ, SOFTIRQ, *((NICE,) if os.nice(0) > 0 else ()), *((STEAL,) if stolen else ()))
            cores = {f"cpu{core}" for core in allowed_cores()}
            ticks = sum(int(line[column]) for line in lines if line[0] in cores for column in columns)
            ticks -= sum(map(ticks_of, self.helpers))
        except (OSError, ValueError, IndexError):
            return None
        return ticks / TICKS_PER_S - self.process_s()

    def quota(self) -> int:
        """The container's CPU quota in cores, rounded up; without a quota, the number of cores."""
        try:
            most, period = self.cpu_max.read_text().split()
            return math.ceil(int(most) / int(period))
        except (OSError, ValueError, ZeroDivisionError):  # no quota, or "max"
            return len(allowed_cores())


def ticks_of(process: int) -> int:
    """The CPU time of a process in clock ticks; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])  # utime and stime, see proc(5)


def allowed_cores() -> frozenset[int]:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


@cache
def free_cores() -> FreeCores:
    """The FreeCores of this process."""
    return FreeCores()


def num_threads(num_rows: int = 1) -> int:
    """The number of threads for a compiled kernel with this many rows at present; at most torch's setting."""
    most = torch.get_num_threads()
    return most if num_rows > FEW_ROWS else free_cores().threads(most)


def end_idle_threads() -> None:
    """End the OpenMP threads of the calling thread, which starts new ones when it computes again.

    A thread calls this before another thread takes over. libgomp, which torch and the compiled kernels use, counts the
    threads of all callers, idle ones too. If they are more than cores, threads sleep whenever they wait for each other,
    and a pass of a small model takes twice as long.
    """
    if hasattr(os, "RTLD_NOLOAD"):
        with suppress(OSError, AttributeError):  # another OpenMP library is loaded, or an old libgomp
            ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD).omp_pause_resource_all(PAUSE_SOFT)
