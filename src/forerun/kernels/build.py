"""Compiles the kernels: the compiler, its flags, and the name of the resulting file.

The name is a hash of everything that goes into the library, the processor included, so another machine, source or
compiler makes another file. Compiling takes a few seconds and needs no headers of torch. wheel.py compiles the
libraries that a wheel carries.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

from forerun.kernels.variants import flags_here, processor

SOURCES = sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".cpp", ".hpp"))
# Scheduling before registers are assigned, as GCC does it for Arm, makes loops need more registers than there are.
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-schedule-insns", "-fopenmp", "-fPIC", "-Wno-psabi")
TIMEOUT_S = 300.0
VERSION_TIMEOUT_S = 10.0
LONGEST_QUOTE = 120  # characters of what a compiler says
COMPLAINT = re.compile(
    "((fatal )?error: (?!ld returned|linker command)|cannot find |multiple definition of |undefined reference to ).*"
)
FIX = "install g++, or name a compiler that works in CXX"

logger = logging.getLogger(__name__)


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
    for text in (*FLAGS, *flags_here(), *(source.read_text(encoding="utf-8") for source in SOURCES)):
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def compile_to(path: Path, command: str) -> None:
    """Write the library to `path`, whose folder exists. Raises NoKernels."""
    attempt([command, *FLAGS, *flags_here(), "-shared", *cpp_files(), "-o", str(path)], path)


def cpp_files() -> list[str]:
    """What a compiler is given."""
    return [str(source) for source in SOURCES if source.suffix == ".cpp"]


def attempt(call: list[str], path: Path) -> None:
    """Run a compiler that is to write `path`. Raises NoKernels with its first complaint; all else is logged."""
    done = run(call, TIMEOUT_S)
    if done.returncode or not path.exists():
        logger.debug("%s returned %d:\n%s", " ".join(call), done.returncode, done.stderr)
        raise NoKernels(f"{call[0]} failed{complaint(done.stderr)}: {FIX}")


def complaint(said: str) -> str:
    """The line of a compiler's output that says what is wrong, cut to what a reader takes in."""
    found = COMPLAINT.search(said)
    line = found.group() if found else next(iter(said.strip().splitlines()), "")
    short = line if len(line) <= LONGEST_QUOTE else f"{line[: LONGEST_QUOTE - 3]}..."
    return f" ({short})" if short else ""


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
    except subprocess.TimeoutExpired as error:
        raise NoKernels(f"{call[0]} timed out after {timeout_s:g} s: {FIX}") from error
    except OSError as error:
        raise NoKernels(f"{call[0]} cannot be run ({error}): {FIX}") from error
