"""Tests of the compiled kernels need a C++ compiler, as the kernels do."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from forerun.kernels.build import FLAGS, SOURCES, NoKernels, compiler

LEVELS = ["native", "x86-64-v4", "x86-64-v3"]  # what the compiler may use: AMX, AVX-512, AVX2


def require_compiler() -> None:
    """Skip where there is none."""
    try:
        compiler()
    except NoKernels as missing:
        pytest.skip(str(missing))


def has(level: str) -> bool:
    """Whether this machine can run code for a level."""
    if level == "native":
        return True
    if platform.machine() != "x86_64":
        return False
    return torch.backends.cpu.get_cpu_capability() in {"x86-64-v4": ("AVX512",), "x86-64-v3": ("AVX512", "AVX2")}[level]


def compiled_for(level: str, folder: Path, optimization: str = "-O3") -> ctypes.CDLL:
    """The library as compiled for a processor that can do less than this one, perhaps; skips where it cannot run."""
    if not has(level):
        pytest.skip(f"this processor does not run {level} code")
    require_compiler()
    path = folder / f"{level}{optimization}.so"
    flags = [flag.replace("native", level).replace("-O3", optimization) for flag in FLAGS]
    sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    subprocess.run([compiler(), *flags, "-Wall", "-Wextra", "-Werror", *sources, "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))
