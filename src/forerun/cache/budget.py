"""The memory that there is: what the system and this container have left, and the part of it that is planned with.

It reads the system's files. How a budget is shared out is decided in `plan.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

BUDGET_SHARE = 0.8  # of what is available; activations, logits and the rest of the machine live on the other fifth
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def default_budget() -> int:
    """The part of the memory available that is planned with where the user names no budget."""
    return int(available_bytes() * BUDGET_SHARE)


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """What can be allocated without swapping, on this machine and within this container's limit.

    Where the system does not tell (macOS), half of the physical memory.
    """
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    available = table(meminfo)["MemAvailable:"] * 1024
    limit = cgroup / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        # Pages of files that were read once are given back when needed: they count as used, but are not.
        reclaimable = table(cgroup / "memory.stat")["inactive_file"]
        used = int((cgroup / "memory.current").read_text()) - reclaimable
        available = min(available, max(0, int(most) - used))
    return available


def table(path: Path) -> dict[str, int]:
    """First and second column of a file of the kernel's."""
    return {words[0]: int(words[1]) for words in (line.split() for line in path.read_text().splitlines())}
