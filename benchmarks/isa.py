"""Limits forerun and the other libraries of a benchmark to an instruction set.

So figures for processors with only AVX2 can be measured on any x86 machine. Libraries read these environment variables
when they are loaded, so a benchmark restarts itself with them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.options import option

ISAS: Mapping[str, Mapping[str, str]] = {
    "avx2": {"FORERUN_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"FORERUN_ISA": "avx512", "ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "amx": {"FORERUN_ISA": "amx", "ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"},
}


def isa_option() -> Any:
    """The option --isa."""
    return option(None, "the largest instruction set to use (default: all)", choices=[*ISAS])


def pin(isa: str | None) -> None:
    """Restart this process with the environment variables of `isa`, unless they are set."""
    wanted = ISAS[isa] if isa else {}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, sys.orig_argv, os.environ | wanted)
