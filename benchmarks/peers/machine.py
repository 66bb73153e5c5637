"""The machine on which the numbers were measured: processor, memory, its bandwidth, versions.

This file decides what is reported about a machine and about the sources that were run.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.place import ROOT

from forerun.machine import sources_digest

SUM_BYTES, NUM_SUMS = 1 << 30, 5
GIB = 1 << 30


def bandwidth_bytes_per_s(threads: int) -> float:
    """How fast a gigabyte of float32 is summed, at best: what reading weights can at most be."""
    torch.set_num_threads(threads)
    numbers = torch.ones(SUM_BYTES // 4)
    fastest_s = float("inf")
    for _ in range(NUM_SUMS):
        started_s = time.perf_counter()
        numbers.sum()
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    return SUM_BYTES / fastest_s


def machine() -> dict[str, Any]:
    """Name and size of it all."""
    return {
        "processor": proc_field("/proc/cpuinfo", "model name") or platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "amx": bool({"amx_bf16", "amx_int8"} & set(proc_field("/proc/cpuinfo", "flags").split())),
        "num_cores": os.cpu_count(),
        "memory_gib": round(memory_bytes("MemTotal") / GIB, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }


def memory_bytes(field: str) -> int:
    """A line of /proc/meminfo; 0 where there is none."""
    words = proc_field("/proc/meminfo", field).split()
    return int(words[0]) * 1024 if words else 0


def proc_field(path: str, name: str) -> str:
    """The first value of a name in a file of `name: value` lines; empty where there is none."""
    file = Path(path)
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def source_digest() -> str:
    """16 hex digits for forerun's sources and this benchmark's: results of other sources are not mixed with theirs."""
    return sources_digest() + sources_digest(ROOT / "benchmarks" / "peers")
