"""Compiling the kernels: once per machine, into the user's cache folder.

Decides with which compiler and flags, and where the result lies: under a name made of everything that went into it,
the processor included, so that another machine, source or compiler makes another file. Needs no headers of torch and
takes a few seconds. Knows nothing of what the kernels compute.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

Progress = Callable[[str, float], None]  # (what is going on, fraction done)

SOURCES = sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".cpp", ".hpp"))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
TIMEOUT_S = 300


class NoKernels(Exception):
    """Why there are no compiled kernels here: no compiler, or one that refused. torch's operators do the work then."""


def compiler() -> str:
    """The C++ compiler: the one that CXX names, else the system's."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise NoKernels(f"no C++ compiler found (looked for {', '.join(names)}): install g++, or name one in CXX")


def library(progress: Progress | None = None) -> ctypes.CDLL:
    """The compiled kernels, compiled now if they never were on this machine. Raises NoKernels."""
    path = target(compiler())
    if not path.exists():
        if progress is not None:
            progress("compiling kernels, once on this machine", 0.0)
        compile_to(path)
    return opened(path)


@cache
def target(command: str) -> Path:
    """Where the library for these sources, this compiler and this processor belongs."""
    version = subprocess.run([command, "--version"], capture_output=True, check=False).stdout
    digest = sha256(version + platform.machine().encode() + processor())
    for text in (*FLAGS, *(source.read_text(encoding="utf-8") for source in SOURCES)):
        digest.update(text.encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "forerun" / "kernels" / f"{digest.hexdigest()[:16]}.so"


def processor() -> bytes:
    """What the processor can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def compile_to(path: Path) -> None:
    """Compile beside `path` and move there when done, so that no other process ever finds half a library."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
            command = [compiler(), *FLAGS, *sources, "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode:
                raise NoKernels(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
            built.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"the kernels could not be compiled into {path.parent}: {error}") from error


@cache
def opened(path: Path) -> ctypes.CDLL:
    """Load the library into this process, once."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernels(f"{path} cannot be loaded: {error}; delete it, and it is compiled anew") from error
