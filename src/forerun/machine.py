"""The machine: the facts that a measurement must report, and those on which the last bits of results depend.

This file decides how a processor is named, how memory is measured (bandwidth, available memory, peak), how versions of
forerun's source are distinguished, which properties of a machine change the order of sums in torch's libraries, and
when a measurement counts as disturbed by other programs.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from forerun.device import CPU
from forerun.kernels.threads import allowed_cores, free_cores

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")
CGROUP = Path("/sys/fs/cgroup")
PACKAGE = Path(__file__).parent
SOURCES = (".py", ".cpp", ".hpp")
CLEAR_REFS = Path("/proc/self/clear_refs")
BANDWIDTH_ELEMENTS = 250_000_000  # 1 GB of float32: larger than any cache
BANDWIDTH_TRIES = 5
GPU_SUMS = 10
VECTOR_FLAGS = {  # by the field of /proc/cpuinfo, of x86 and of Arm (on x86, "sme" is memory encryption)
    "flags": re.compile("(?:s?sse|avx|amx)[a-z0-9_]*|fma|f16c"),
    "Features": re.compile("(?:asimd|sve|sme)[a-z0-9_]*|bf16|i8mm"),
}
LIBRARY_SETTINGS = (  # environment variables that make oneDNN and MKL use other instructions or formats
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
# Times that are measured while another program is busy are wrong by half and more, even medians. So a measurement says
# when it was disturbed, and is not saved.
DISTURBING = 0.2  # cores that other programs keep busy: ten times what an idle system uses
LEAST_S = 0.2  # the system counts processor time in hundredths of a second, too coarse for shorter times


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a measurement was made."""

    processor: str
    num_threads: int
    torch: str
    python: str
    system: str

    @classmethod
    def here(cls) -> Machine:
        """This machine, with torch's current number of threads."""
        return cls(
            processor=processor(),
            num_threads=torch.get_num_threads(),
            torch=torch.__version__,
            python=platform.python_version(),
            system=f"{platform.system()} {platform.machine()}",
        )


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The name of the processor, or of its architecture if the system does not report a name."""
    return cpuinfo_field(cpuinfo, "model name") or platform.processor() or platform.machine()


def vector_instructions(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """The processor's vector and matrix instructions, by the system's names; empty if it does not list them."""
    found_flags = set[str]()
    for field_name, pattern in VECTOR_FLAGS.items():
        found_flags.update(filter(pattern.fullmatch, cpuinfo_field(cpuinfo, field_name).split()))
    return tuple(sorted(found_flags))


def cpuinfo_field(cpuinfo: Path, name: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty if it is missing."""
    if cpuinfo.exists():
        fields = (line.partition(":") for line in cpuinfo.read_text(errors="replace").splitlines())
        return next((value.strip() for key, _, value in fields if key.strip() == name), "")
    return ""


def order_of_sums() -> str:
    """Everything from which torch's libraries choose an implementation of matrix products, and so the order of sums.

    These are the instructions, the sizes of caches (represented by the processor's name), the number of threads, and a
    few environment variables.
    """
    settings = [f"{name}={os.environ[name]}" for name in LIBRARY_SETTINGS if name in os.environ]
    return " ".join((processor(), *vector_instructions(), *settings, f"{torch.get_num_threads()} threads"))


def bandwidth_bytes_per_s(num_elements: int = BANDWIDTH_ELEMENTS, device: torch.device = CPU.device) -> float:
    """The read bandwidth of the device's memory: the best of several sums over a float32 tensor.

    A CPU uses torch's current number of threads. On a GPU several sums are launched before waiting, so that the launch
    time does not count.
    """
    tensor = torch.ones(num_elements, device=device)
    num_sums, best_s = 1 if device.type == "cpu" else GPU_SUMS, float("inf")
    for _ in range(BANDWIDTH_TRIES):
        wait_for(device)
        started_s = time.perf_counter()
        for _ in range(num_sums):
            tensor.sum()
        wait_for(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return num_sums * tensor.numel() * tensor.itemsize / best_s


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work; returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Memory that can be allocated without swapping, on this machine and within the limits of container and process.

    If the system does not report it (macOS), half of the physical memory.
    """
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    available = columns(meminfo)["MemAvailable:"] * 1024
    limit = cgroup / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        # The system frees cached pages of files when memory is needed, although they count as used.
        reclaimable = columns(cgroup / "memory.stat")["inactive_file"]
        used = int((cgroup / "memory.current").read_text()) - reclaimable
        available = min(available, max(0, int(most) - used))
    return min(available, unmapped_bytes())


def unmapped_bytes(statm: Path = STATM) -> int:
    """Memory that this process may still map under `ulimit -v`; sys.maxsize without such a limit."""
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(0, most - int(statm.read_text().split()[0]) * resource.getpagesize())


def columns(path: Path) -> dict[str, int]:
    """The first and second columns of a file of the Linux kernel, as keys and values."""
    return {words[0]: int(words[1]) for words in (line.split() for line in path.read_text().splitlines())}


def peak_rss_bytes() -> int | None:
    """The peak memory of this process; None if the system does not report it."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak_rss() -> bool:
    """Reset `peak_rss_bytes` to the current memory; returns whether the system supports it."""
    try:
        CLEAR_REFS.write_text("5\n")  # see proc(5): 5 resets the peak
    except OSError:
        return False
    return True


def sources_digest(folder: Path = PACKAGE) -> str:
    """8 hex digits that identify this version of forerun's sources, so that measurements of others are not reused."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SOURCES):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


@dataclass(slots=True)
class Neighbours:
    """The load of other programs on this process's cores, measured from the construction on.

    `clock` returns seconds, and `others_s` the processor time of other programs, None if the system does not report it.
    """

    clock: Callable[[], float] = time.monotonic
    others_s: Callable[[], float | None] = field(default_factory=lambda: partial(free_cores().others_s, stolen=True))
    began_s: float = field(init=False)
    before_s: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.began_s, self.before_s = self.clock(), self.others_s()

    def num_busy(self) -> float | None:
        """The average number of cores that other programs kept busy; None if unknown or if the time was too short."""
        taken_s, after_s = self.clock() - self.began_s, self.others_s()
        if self.before_s is None or after_s is None or taken_s < LEAST_S:
            return None
        return max(0.0, after_s - self.before_s) / taken_s


def disturbs(num_busy: float | None) -> bool:
    """Whether a measurement is unusable when other programs keep this many cores busy."""
    return num_busy is not None and num_busy >= DISTURBING


def disturbance(num_busy: float | None) -> str:
    """The warning for a measurement that other programs have disturbed; empty for others."""
    if num_busy is None or not disturbs(num_busy):
        return ""
    cores = f"{num_busy:.1f} of {len(allowed_cores())} cores"
    return f"disturbed: other programs kept {cores} busy meanwhile, so this measurement is unreliable"
