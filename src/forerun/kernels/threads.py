"""Threads: how many the compiled kernels take, so that none waits for a core on which another program runs.

All threads of a pass wait for its slowest. Where the system takes one from its core for some milliseconds, as beside a
busy program, fewer threads are done sooner: on two cores beside one such program, one thread gave four times as many
tokens per second as two. How many compute never changes a result.
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

PERIOD_S = 0.2  # between two looks: the system counts in hundredths of a second
RECENT_S = 1.0  # what others did in a longer time says little of now
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FEW_ROWS = 32  # of more, threads are at work for longer than the system lets one program run: all of them are as good
PAUSE_SOFT = 1  # OpenMP's omp_pause_soft: threads end, settings stay
STAT, CPU_MAX = Path("/proc/stat"), Path("/sys/fs/cgroup/cpu.max")
USER, NICE, SYSTEM, IRQ, SOFTIRQ, STEAL = 1, 2, 3, 6, 7, 8  # columns of a core's line, see proc(5)


@dataclass
class FreeCores:
    """The cores that this process may use and that others leave free.

    What runs at a lower priority than this process counts as nothing: it makes way. `clock` and `process_s` give the
    present time and this process's processor time, in seconds; `helpers` are the processes that compute for this one.
    Where the system does not tell, as on macOS, all cores are free.
    """

    stat: Path = STAT
    cpu_max: Path = CPU_MAX
    clock: Callable[[], float] = time.monotonic
    process_s: Callable[[], float] = time.process_time
    num_threads: int = 0  # what was found last; 0: nothing yet
    next_s: float = -math.inf
    seen: tuple[float, float] | None = None  # when the cores were last looked at, what others had used until then
    cores: frozenset[int] = field(default_factory=frozenset)
    helpers: set[int] = field(default_factory=set)

    def threads(self, most: int) -> int:
        """How many to take: `most`, or fewer where cores are busy or a quota allows fewer; at least one."""
        now_s = self.clock()
        if now_s >= self.next_s or not self.num_threads:
            self.look(now_s)
        return max(1, min(most, self.num_threads))

    def look(self, now_s: float) -> None:
        """Count the cores that others kept busy since the last look; none if that was long ago."""
        self.next_s = now_s + PERIOD_S
        cores, others_s = allowed_cores(), self.others_s()
        busy, then_s, before_s = 0, *(self.seen or (-math.inf, 0.0))
        if others_s is not None and cores == self.cores and 0 < now_s - then_s <= RECENT_S:
            busy = round((others_s - before_s) / (now_s - then_s))
        self.cores, self.seen = cores, None if others_s is None else (now_s, others_s)
        self.num_threads = max(1, min(len(cores) - max(0, busy), self.quota()))

    def others_s(self, stolen: bool = False) -> float | None:
        """Processor time that other processes have used of this one's cores; None where the system does not tell.

        `stolen`: with what a virtual machine's host has given to others.
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
        """As many cores as this container's processor time is worth, rounded up."""
        try:
            most, period = self.cpu_max.read_text().split()
            return math.ceil(int(most) / int(period))
        except (OSError, ValueError, ZeroDivisionError):  # none, or "max"
            return len(allowed_cores())


def ticks_of(process: int) -> int:
    """The processor time of another process, in the system's ticks; 0 of one that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])  # in user mode and in the system, see proc(5)


def allowed_cores() -> frozenset[int]:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


@cache
def free_cores() -> FreeCores:
    """Those of this process."""
    return FreeCores()


def num_threads(num_rows: int = 1) -> int:
    """How many threads a compiled kernel takes now, for so many rows: torch's setting at most."""
    most = torch.get_num_threads()
    return most if num_rows > FEW_ROWS else free_cores().threads(most)


def end_idle_threads() -> None:
    """End the threads with which the calling thread has computed; when it computes again, it starts others.

    libgomp, with which torch and the compiled kernels share work, counts the threads of all callers, also of those that
    compute no more. Where there are more than cores, threads sleep wherever they wait for each other, and a pass of a
    small model takes twice as long. So a thread calls this before another one takes over.
    """
    if hasattr(os, "RTLD_NOLOAD"):
        with suppress(OSError, AttributeError):  # another library than libgomp is loaded, or an older one
            ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD).omp_pause_resource_all(PAUSE_SOFT)
