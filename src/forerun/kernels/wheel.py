"""Compiles what a wheel carries: the kernels for every variant of an architecture, and the wheel's platform tag.

The libraries link to libc, libm, libgcc and libstdc++, which torch needs as well. They leave the functions of OpenMP
open, for torch's runtime to provide. setup.py calls this file, so it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forerun.kernels.build import FLAGS, VERSION_TIMEOUT_S, NoKernels, attempt, cpp_files, run
from forerun.kernels.variants import MACHINES, VARIANTS, Variant

OLDEST_GLIBC = (2, 27)
# What systems with that glibc have, which are those since 2018: the libraries of GCC 7.
PORTABLE = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
NEEDED = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)(?=\0)")


def compile_all(folder: Path, command: str) -> list[Path]:
    """A library in `folder` for each variant of the architecture that `command` compiles for. Raises NoKernels."""
    architecture, system = target(command)
    variants = [variant for variant in VARIANTS if variant.machine == architecture]
    if not variants:
        raise NoKernels(f"{command} compiles for {architecture}, for which there is no variant of the kernels")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda variant: compile_variant(folder, command, variant, system), variants))


def compile_variant(folder: Path, command: str, variant: Variant, system: str) -> Path:
    """One of them, named after the variant."""
    path, mac = folder / f"{variant.name}.so", system == "darwin"
    flags = [flag for flag in FLAGS if not (mac and flag == "-fopenmp")]
    openmp = ["-Xpreprocessor", "-fopenmp"] if mac else []  # Apple's compiler takes it in this form only
    link = ["-undefined", "dynamic_lookup"] if mac else ["-Wl,--gc-sections", "-s"]
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch) / f"{Path(source).stem}.o" for source in cpp_files()]
        for source, made in zip(cpp_files(), objects, strict=True):
            attempt([command, *flags, *openmp, *variant.flags, "-c", source, "-o", str(made)], made)
        attempt([command, "-shared", *map(str, objects), *link, "-lm", "-o", str(path)], path)
    return path


def target(command: str) -> tuple[str, str]:
    """Architecture and system that a compiler compiles for, such as x86_64 and linux. Raises NoKernels."""
    said = run([command, "-dumpmachine"], VERSION_TIMEOUT_S).stdout.strip().lower()  # x86_64-linux-gnu, arm64-apple-...
    architecture = said.partition("-")[0]
    system = next((name for name in ("linux", "darwin") if name in said), "")
    if not system:
        raise NoKernels(f"{command} compiles for {said or 'an unknown system'}: the kernels need Linux or macOS")
    return MACHINES.get(architecture, architecture), system


def platform_tag(libraries: list[Path], command: str) -> str:
    """The wheel's platform: manylinux of the oldest glibc that has what they need, if other systems do."""
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
