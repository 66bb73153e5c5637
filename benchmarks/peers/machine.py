"""Describes the machine that measures, and identifies the sources that run."""

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
    """The best speed at which a gigabyte of float32 is summed, an upper bound of the speed of reading weights."""
    torch.set_num_threads(threads)
    return here.bandwidth_bytes_per_s()


def machine() -> dict[str, Any]:
    """The processor, instruction sets, number of cores, memory, system and load."""
    return asdict(Machine.here()) | {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "amx": bool({"amx_bf16", "amx_int8"} & set(vector_instructions())),
        "num_cores": os.cpu_count(),
        "memory_gib": round(columns(MEMINFO)["MemTotal:"] * 1024 / GIB, 1) if MEMINFO.exists() else None,
        "system": platform.platform(),
        "load_before": os.getloadavg()[0],
    }


def source_digest(benchmark: str = "peers") -> str:
    """Hex digits that identify the sources of forerun and of a benchmark; results of different ones are kept apart."""
    return sources_digest() + sources_digest(ROOT / "benchmarks" / benchmark)
