"""The machine on which the numbers were measured, and the sources that were run."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import Any

import torch
from benchmarks.processes import ROOT

from forerun import machine as here
from forerun.machine import MEMINFO, Machine, columns, sources_digest, vector_instructions

GIB = 1 << 30


def bandwidth_bytes_per_s(threads: int) -> float:
    """How fast a gigabyte of float32 is summed, at best: what reading weights can at most be."""
    torch.set_num_threads(threads)
    return here.bandwidth_bytes_per_s()


def machine() -> dict[str, Any]:
    """Name and size of it all."""
    return asdict(Machine.here()) | {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "amx": bool({"amx_bf16", "amx_int8"} & set(vector_instructions())),
        "num_cores": os.cpu_count(),
        "memory_gib": round(columns(MEMINFO)["MemTotal:"] * 1024 / GIB, 1) if MEMINFO.exists() else None,
        "system": platform.platform(),
        "load_before": os.getloadavg()[0],
    }


def source_digest(benchmark: str = "peers") -> str:
    """16 hex digits for forerun's sources and a benchmark's: results of other sources are not mixed with theirs."""
    return sources_digest() + sources_digest(ROOT / "benchmarks" / benchmark)
