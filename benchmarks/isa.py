"""Pins a benchmark to an instruction set, forerun and the libraries beside it alike.

So a figure for processors with AVX2 alone can be had on any x86 machine. Libraries look at these variables when they
are loaded; a benchmark that is pinned is therefore started again with them.
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
    """The option."""
    return option(None, "instructions to use at most (default: all there are)", choices=[*ISAS])


def pin(isa: str | None) -> None:
    """Start this process again with the variables of `isa`, unless it has them."""
    wanted = ISAS[isa] if isa else {}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, sys.orig_argv, os.environ | wanted)
