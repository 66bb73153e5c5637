"""Tests of the compiled kernels need a C++ compiler, as the kernels do; what it makes is shared by all workers."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from forerun.kernels.build import FLAGS, NoKernels, compiler, cpp_files
from forerun.kernels.variants import NATIVE, NATIVE_FLAGS, VARIANTS, runnable

# What the compiler may use. Where there are variants, one of them has the bits of a native library, as a test proves.
LEVELS = [variant.name for variant in VARIANTS] + [NATIVE] * (not runnable())
FLAGS_OF = {NATIVE: NATIVE_FLAGS} | {variant.name: variant.flags for variant in VARIANTS}


def require_compiler() -> None:
    """Skip where there is none."""
    try:
        compiler()
    except NoKernels as missing:
        pytest.skip(str(missing))


def compiled_for(level: str, folder: Path, optimization: str = "-O3") -> ctypes.CDLL:
    """The library as compiled for a processor that can do less than this one, perhaps; skips where it cannot run.

    `folder` is a temporary one of pytest, in whose place all workers of a run use the same.
    """
    if level not in (NATIVE, *(variant.name for variant in runnable())):
        pytest.skip(f"this processor does not run {level} code")
    require_compiler()
    path = of_all_workers(folder) / f"kernels-{level}{optimization}.so"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            flags = [flag.replace("-O3", optimization) for flag in FLAGS]
            strict = [*FLAGS_OF[level], "-Wall", "-Wextra", "-Werror", "-shared"]
            made = path.with_suffix(".part")
            subprocess.run([compiler(), *flags, *strict, *cpp_files(), "-o", str(made)], check=True)
            made.rename(path)
    return ctypes.CDLL(str(path))


def of_all_workers(folder: Path) -> Path:
    """The temporary folder of the whole run, of which every worker has a part."""
    return next((above for above in folder.parents if above.parent.name.startswith("pytest-of-")), folder)
