"""Compiles the kernels: for this processor at first use, or all variants of an architecture for a wheel.

The file compiled at first use is named by a hash of all that affects the library: sources, compiler, flags and
processor. Compiling takes up to a minute or two and needs no headers of torch.

The libraries of a wheel link to libc, libm, libgcc and libstdc++, which torch needs too; OpenMP's functions stay
unresolved, and torch's runtime provides them. setup.py imports this file, so it uses only the standard library.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from forerun.kernels.variants import MACHINES, VARIANTS, Variant, flags_here, processor

SOURCES = sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".cpp", ".hpp"))
# -fno-schedule-insns: scheduling before register allocation, GCC's default for Arm, makes loops spill registers.
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-schedule-insns", "-fopenmp", "-fPIC", "-Wno-psabi")
TIMEOUT_S = 300.0
VERSION_TIMEOUT_S = 10.0
LONGEST_QUOTE = 120  # most characters of a quoted compiler error
COMPLAINT = re.compile(
    "((fatal )?error: (?!ld returned|linker command)|cannot find |multiple definition of |undefined reference to ).*"
)
OLDEST_GLIBC = (2, 27)
# The symbol versions in the libraries of GCC 7, which systems with that glibc (since 2018) have.
PORTABLE = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
NEEDED = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)(?=\0)")
FIX = "install g++, or set CXX to a compiler that works"
FIX_SPACE = "free space there, or set TMPDIR to a folder on another disk"

logger = logging.getLogger(__name__)


class NoKernels(Exception):
    """There are no compiled kernels on this machine; the message gives the reason and the fix."""


def compiler() -> str:
    """The path of the C++ compiler: that in CXX, else the system's. Raises NoKernels."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise NoKernels(f"no C++ compiler found (looked for {', '.join(names)}): {FIX}")


def library_name(command: str) -> str:
    """The file name of the library for these sources, this compiler and processor: 16 hex digits."""
    version = run_command([command, "--version"], VERSION_TIMEOUT_S).stdout
    digest = sha256(version.encode() + platform.machine().encode() + processor())
    for text in (*FLAGS, *flags_here(), *(source.read_text(encoding="utf-8") for source in SOURCES)):
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def compile_to(path: Path, command: str) -> None:
    """Compile the library for this processor to `path`, whose folder must exist. Raises NoKernels."""
    run_compiler([command, *FLAGS, *flags_here(), "-shared", *cpp_files(), "-o", str(path)], path)


def cpp_files() -> list[str]:
    """The source files to compile."""
    return [str(source) for source in SOURCES if source.suffix == ".cpp"]


def run_compiler(call: list[str], path: Path) -> None:
    """Run a compiler call that writes `path`. Raises NoKernels with its first error; the entire output is logged."""
    done = run_command(call, TIMEOUT_S)
    if done.returncode or not path.exists():
        logger.debug("%s returned %d:\n%s", " ".join(call), done.returncode, done.stderr)
        fix = FIX_SPACE if os.strerror(errno.ENOSPC) in done.stderr else FIX
        raise NoKernels(f"{call[0]} failed{first_error(done.stderr)}: {fix}")


def first_error(output: str) -> str:
    """The first error in a compiler's output, shortened and in brackets; empty without output."""
    match = COMPLAINT.search(output)
    line = match.group() if match else next(iter(output.strip().splitlines()), "")
    short = line if len(line) <= LONGEST_QUOTE else f"{line[: LONGEST_QUOTE - 3]}..."
    return f" ({short})" if short else ""


def run_command(call: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command. Raises NoKernels if it cannot be run or does not end in time."""
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


def compile_all(folder: Path, command: str) -> list[Path]:
    """Compile the libraries of all variants for the compiler's architecture into `folder`. Raises NoKernels."""
    architecture, system = target(command)
    variants = [variant for variant in VARIANTS if variant.machine == architecture]
    if not variants:
        raise NoKernels(f"{command} compiles for {architecture}, for which the kernels have no variant")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda variant: compile_variant(folder, command, variant, system), variants))


def compile_variant(folder: Path, command: str, variant: Variant, system: str) -> Path:
    """Compile the library of one variant, named after it."""
    path, mac = folder / f"{variant.name}.so", system == "darwin"
    flags = [flag for flag in FLAGS if not (mac and flag == "-fopenmp")]
    openmp = ["-Xpreprocessor", "-fopenmp"] if mac else []  # the form that Apple's compiler needs
    link = ["-undefined", "dynamic_lookup"] if mac else ["-Wl,--gc-sections", "-s"]
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch) / f"{Path(source).stem}.o" for source in cpp_files()]
        for source, made in zip(cpp_files(), objects, strict=True):
            run_compiler([command, *flags, *openmp, *variant.flags, "-c", source, "-o", str(made)], made)
        run_compiler([command, "-shared", *map(str, objects), *link, "-lm", "-o", str(path)], path)
    return path


def target(command: str) -> tuple[str, str]:
    """The compiler's target architecture and system, such as x86_64 and linux. Raises NoKernels."""
    triple = run_command([command, "-dumpmachine"], VERSION_TIMEOUT_S).stdout.strip().lower()  # x86_64-linux-gnu
    architecture = triple.partition("-")[0]
    system = next((name for name in ("linux", "darwin") if name in triple), "")
    if not system:
        raise NoKernels(f"{command} compiles for {triple or 'an unknown system'}: the kernels need Linux or macOS")
    return MACHINES.get(architecture, architecture), system


def platform_tag(libraries: list[Path], command: str) -> str:
    """The wheel's platform tag: manylinux of the oldest glibc, or linux if the libraries need newer symbols."""
    architecture, system = target(command)
    if system != "linux":
        return re.sub(r"[^a-z0-9]", "_", sysconfig.get_platform().lower())
    needed: dict[str, tuple[int, ...]] = {}
    for path in libraries:
        for name, version in NEEDED.findall(path.read_bytes()):
            numbers = tuple(map(int, version.split(b".")))
            needed[name.decode()] = max(numbers, needed.get(name.decode(), ()))
    if "GLIBC" not in needed or any(needed.get(name, ()) > most for name, most in PORTABLE.items()):
        return f"linux_{architecture}"
    major, minor, *_ = max(OLDEST_GLIBC, needed["GLIBC"])
    return f"manylinux_{major}_{minor}_{architecture}"
