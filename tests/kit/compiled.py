"""For tests of the compiled kernels: they need a C++ compiler, and compiled libraries are cached for later runs."""

import ctypes
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
from filelock import FileLock

from forerun.kernels.build import FLAGS, SOURCES, NoKernels, compiler, cpp_files
from forerun.kernels.library import library
from forerun.kernels.variants import NATIVE, VARIANTS, architecture, native_flags, runnable
from kit.checkpoints import ROOT

KEPT = ROOT / "build" / "kernels-of-tests"
FLAGS_OF = {NATIVE: native_flags()} | {variant.name: variant.flags for variant in VARIANTS}
# Instruction sets for the compiler. One of the variants has the bits of the native library, as a test proves.
NAMES = [NATIVE, *(variant.name for variant in VARIANTS)]
HERE = [NATIVE, *(variant.name for variant in runnable())]
ENDS = {HERE[0], HERE[-1]}  # the short suite takes the highest and the lowest level of this processor
LEVELS, LEVELS_HERE = (
    [name if name in ENDS else pytest.param(name, marks=pytest.mark.full) for name in names] for names in (NAMES, HERE)
)


def require_compiler() -> None:
    """Skip the test if there is no compiler."""
    try:
        compiler()
    except NoKernels as missing:
        pytest.skip(str(missing))


def compiled_for(level: str, optimization: str = "-O3") -> ctypes.CDLL:
    """The library compiled for an instruction set; skips the test if this processor cannot run it."""
    if level not in HERE:
        pytest.skip(f"this processor does not run {level} code")
    return ctypes.CDLL(str(library_for(level, optimization)))


def library_for(level: str, optimization: str = "-O3") -> Path:
    """The library's file for an instruction set; skips the test without a compiler for it.

    It is compiled again when anything that goes into it has changed. The native one is that of this process.
    """
    command = compiler_for(level)
    if (level, optimization) == (NATIVE, "-O3"):
        return Path(library()._name)
    flags = [flag.replace("-O3", optimization) for flag in FLAGS] + [*FLAGS_OF.get(level, (f"-march={level}",))]
    call = [command, *flags, "-Wall", "-Wextra", "-Werror", "-shared", *cpp_files()]
    version = subprocess.run([command, "--version"], capture_output=True, check=True).stdout
    digest = sha256(repr(call).encode() + version + b"".join(source.read_bytes() for source in SOURCES))
    name = f"{level}{optimization}"
    path = KEPT / f"{name}-{digest.hexdigest()[:16]}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with FileLock(KEPT / f"{name}.lock"):
        if not path.exists():
            for old in KEPT.glob(f"{name}-????????????????.so"):
                old.unlink()
            made = path.with_suffix(".part")
            subprocess.run([*call, "-o", str(made)], check=True)
            made.rename(path)
    return path


def compiler_for(level: str) -> str:
    """A compiler for this level's architecture: this machine's, or Debian's cross-compiler; skips without one."""
    foreign = next((v.machine for v in VARIANTS if v.name == level and v.machine != architecture()), None)
    if foreign is None:
        require_compiler()
        return compiler()
    found = shutil.which(f"{foreign}-linux-gnu-g++")
    return found or pytest.skip(f"no {foreign}-linux-gnu-g++ here (Debian: g++-{foreign.replace('_', '-')}-linux-gnu)")
