"""Tests of the compiled kernels need a C++ compiler, as the kernels do; what it makes is shared by all workers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from forerun.kernels.build import FLAGS, NoKernels, compiler, cpp_files
from forerun.kernels.variants import NATIVE, NATIVE_FLAGS, VARIANTS, architecture, runnable

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
    """The library as compiled for a processor that can do less than this one, perhaps; skips where it cannot run."""
    if level not in (NATIVE, *(variant.name for variant in runnable())):
        pytest.skip(f"this processor does not run {level} code")
    return ctypes.CDLL(str(library_for(level, folder, optimization)))


def library_for(level: str, folder: Path, optimization: str = "-O3") -> Path:
    """The library's file, for any processor; skips where no compiler makes one.

    `folder` is a temporary one of pytest, in whose place all workers of a run use the same.
    """
    command = compiler_for(level)
    path = of_all_workers(folder) / f"kernels-{level}{optimization}.so"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            flags = [flag.replace("-O3", optimization) for flag in FLAGS]
            strict = [*FLAGS_OF[level], "-Wall", "-Wextra", "-Werror", "-shared"]
            made = path.with_suffix(".part")
            subprocess.run([command, *flags, *strict, *cpp_files(), "-o", str(made)], check=True)
            made.rename(path)
    return path


def compiler_for(level: str) -> str:
    """A compiler for this level's architecture: this machine's own, or Debian's for another; skips without one."""
    foreign = next((v.machine for v in VARIANTS if v.name == level and v.machine != architecture()), None)
    if foreign is None:
        require_compiler()
        return compiler()
    found = shutil.which(f"{foreign}-linux-gnu-g++")
    return found or pytest.skip(f"no {foreign}-linux-gnu-g++ here (Debian: g++-{foreign.replace('_', '-')}-linux-gnu)")


def of_all_workers(folder: Path) -> Path:
    """The temporary folder of the whole run, of which every worker has a part."""
    return next((above for above in folder.parents if above.parent.name.startswith("pytest-of-")), folder)
