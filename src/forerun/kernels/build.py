"""Compiles the kernels: the compiler, its flags, and the name of the resulting file.

The name is a hash of everything that goes into the library, the processor included, so another machine, source or
compiler makes another file. Compiling takes a few seconds and needs no headers of torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

SOURCES = sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".cpp", ".hpp"))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
TIMEOUT_S = 300.0
VERSION_TIMEOUT_S = 10.0
LONGEST_QUOTE = 1000  # characters of what a compiler says
FIX = "install g++, or name a compiler that works in CXX"


class NoKernels(Exception):
    """Why there are no compiled kernels here, and what would help. torch's operators do the work then."""


def compiler() -> str:
    """The C++ compiler: the one that CXX names, else the system's."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise NoKernels(f"no C++ compiler found (looked for {', '.join(names)}): {FIX}")


def library_name(command: str) -> str:
    """What the library of these sources, made by this compiler for this processor, is called: 16 hex digits."""
    version = run([command, "--version"], VERSION_TIMEOUT_S).stdout
    digest = sha256(version.encode() + platform.machine().encode() + processor())
    for text in (*FLAGS, *(source.read_text(encoding="utf-8") for source in SOURCES)):
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def processor() -> bytes:
    """What the processor can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def compile_to(path: Path, command: str) -> None:
    """Write the library to `path`, whose folder exists. Raises NoKernels."""
    sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    call = [command, *FLAGS, *sources, "-o", str(path)]
    done = run(call, TIMEOUT_S)
    if done.returncode or not path.exists():
        raise NoKernels(f"{' '.join(call)} failed: {done.stderr.strip()[-LONGEST_QUOTE:]}: {FIX}")


def run(call: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a compiler. Raises NoKernels where the system cannot run it, or it does not end."""
    try:
        return subprocess.run(
            call,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{call[0]} cannot be run ({error}): {FIX}") from error
