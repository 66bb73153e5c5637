"""The processors that kernels are compiled for: what each variant may use, and which of them this machine can run.

A wheel carries one library for each variant of its architecture. A library must never run on a processor that lacks one
of its instructions, so a variant is chosen by what the system says of the processor, never by trying. FORERUN_ISA names
a variant to use instead of the best one; `native` stands for a library compiled for this very processor.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.errors import DeviceUnavailable

CPUINFO = Path("/proc/cpuinfo")
SETTING = "FORERUN_ISA"
NATIVE = "native"
NATIVE_FLAGS = ("-march=native",)
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # names that some systems have for the same architecture
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Variant:
    """One library: `features` are /proc/cpuinfo's names of what it uses beyond the architecture's first processors.

    `instructions` is what the library calls itself. All variants of the same name have the same bits, from whichever
    compiler and with whatever else it may use, so this name and nothing else stands in fingerprints.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]
    instructions: str
    tiles: bool = False

    def runs_here(self) -> bool:
        """Whether this processor has all of it, and the system lets this process use it."""
        return self.machine == architecture() and self.features <= features() and (not self.tiles or grants_tiles())


V3 = frozenset(("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"))
V3 |= {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VNNI, BF16 = V4 | {"avx512_vnni"}, V4 | {"avx512_vnni", "avx512_bf16"}
WIDE = ("-march=x86-64-v4", "-mavx512vnni")

# The best first.
VARIANTS = (
    Variant(
        "amx",
        "x86_64",
        (*WIDE, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        BF16 | {"amx_tile", "amx_int8", "amx_bf16"},
        "AMX",
        tiles=True,
    ),
    Variant("avx512-bf16", "x86_64", (*WIDE, "-mavx512bf16"), BF16, "AVX-512 BF16"),
    Variant("avx512", "x86_64", WIDE, VNNI, "AVX-512"),
    Variant("avx2", "x86_64", ("-march=x86-64-v3",), V3, "AVX2"),
    Variant("neon", "aarch64", ("-march=armv8-a",), frozenset(), "NEON"),
)


def architecture() -> str:
    """This machine's architecture, by the name that compilers use."""
    name = platform.machine().lower()
    return MACHINES.get(name, name)


def processor() -> bytes:
    """What the processor can do, as far as the system says."""
    try:
        lines = CPUINFO.read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def features() -> frozenset[str]:
    """The features of this processor, by the names that the system has for them."""
    return frozenset(processor().decode(errors="replace").partition(":")[2].split())


@cache
def grants_tiles() -> bool:
    """Whether the system grants this process the registers of AMX; processes must ask once, and may ask again."""
    refused: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return refused == 0


def runnable() -> list[Variant]:
    """The variants that this machine can run, the best first."""
    return [variant for variant in VARIANTS if variant.runs_here()]


def asked_for() -> str | None:
    """What FORERUN_ISA asks for: a variant that runs here, or `native`; None where it is not set.

    Raises DeviceUnavailable for everything else.
    """
    name = os.environ.get(SETTING)
    possible = [*(variant.name for variant in runnable()), NATIVE]
    if not name or name in possible:
        return name or None
    raise DeviceUnavailable(f"{SETTING}={name} is not possible: this processor can run {' and '.join(possible)}")


def wanted() -> list[Variant]:
    """The variants that may be loaded from a wheel, the best first: all that run here, or the one asked for."""
    asked = asked_for()
    return [variant for variant in runnable() if asked in (None, variant.name)]


def flags_here() -> tuple[str, ...]:
    """What a compiler on this machine is to compile for: this very processor, or what FORERUN_ISA asks for."""
    asked = asked_for()
    return next((variant.flags for variant in VARIANTS if variant.name == asked), NATIVE_FLAGS)
