"""The instruction-set variants of the kernels, and which of them this machine can run.

A wheel has one library for each variant of its architecture. A library must never run on a processor that lacks one of
its instructions, so the processor's features decide which variants may be loaded. FORERUN_ISA selects one of them in
place of the best; `native` is a library compiled for this very processor.
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
WITHOUT_PAIRS = "-U__AVX512BF16__"  # removes the code that multiplies pairs of bfloat16
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # other names of the same architectures
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the library. `features` are the processor features that it needs, as named in /proc/cpuinfo.

    `instructions` is the name that the library reports. Libraries that report the same name give the same bits, with
    any compiler, so fingerprints contain only this name. `tiles`: it uses the tile registers of AMX.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]
    instructions: str
    tiles: bool = False

    def runs_here(self) -> bool:
        """Whether this processor has all features, and the system permits this process to use them."""
        return self.machine == architecture() and self.features <= features() and (not self.tiles or grants_tiles())


V3 = frozenset(("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"))
V3 |= {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VNNI, BF16 = V4 | {"avx512_vnni"}, V4 | {"avx512_vnni", "avx512_bf16"}
WIDE = ("-march=x86-64-v4", "-mavx512vnni")

VARIANTS = (  # the best first
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


SLOW_ON_INTEL = "avx512-bf16"


def architecture() -> str:
    """This machine's architecture, in the compilers' naming."""
    name = platform.machine().lower()
    return MACHINES.get(name, name)


def cpuinfo() -> list[bytes]:
    """The lines of /proc/cpuinfo. Raises OSError where there is none."""
    return CPUINFO.read_bytes().splitlines()


def processor() -> bytes:
    """The line of processor features in /proc/cpuinfo, or the name of the processor."""
    try:
        return next((line for line in cpuinfo() if line.startswith((b"flags", b"Features"))), b"")
    except OSError:
        return platform.processor().encode()


def multiplies_pairs_slowly() -> bool:
    """Whether this processor takes longer for products of pairs of bfloat16 than for the same products in float32.

    Intel's do: 2.2 cycles for 32 products, and 0.5 cycles for 16 in float32 (measured on a Xeon of the fifth
    generation). They have AMX for such products, which virtual machines often hide.
    """
    try:
        return any(line.startswith(b"vendor_id") and line.endswith(b"GenuineIntel") for line in cpuinfo())
    except OSError:
        return False


def features() -> frozenset[str]:
    """The features of this processor, as named in /proc/cpuinfo; empty if they are unknown."""
    return frozenset(processor().decode(errors="replace").partition(":")[2].split())


@cache
def grants_tiles() -> bool:
    """Whether the system permits this process to use AMX's tile registers, which it must request once."""
    refused: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return refused == 0


def runnable() -> list[Variant]:
    """The variants that this machine can run, the best first."""
    variants = [variant for variant in VARIANTS if variant.runs_here()]
    names = [variant.name for variant in variants]
    if SLOW_ON_INTEL in names and multiplies_pairs_slowly():
        place = names.index(SLOW_ON_INTEL)
        variants[place : place + 2] = reversed(variants[place : place + 2])
    return variants


def requested_isa() -> str | None:
    """The value of FORERUN_ISA: a variant that runs here, or `native`; None if it is not set.

    Raises DeviceUnavailable for any other value.
    """
    name = os.environ.get(SETTING)
    possible = [*(variant.name for variant in runnable()), NATIVE]
    if not name or name in possible:
        return name or None
    raise DeviceUnavailable(f"{SETTING}={name} cannot be used: this processor can run {' and '.join(possible)}")


def loadable() -> list[Variant]:
    """The variants that may be loaded from a wheel, the best first: all that run here, or that of FORERUN_ISA."""
    requested = requested_isa()
    return [variant for variant in runnable() if requested in (None, variant.name)]


def flags_here() -> tuple[str, ...]:
    """The compiler flags for this very processor, or for the variant of FORERUN_ISA."""
    requested = requested_isa()
    if requested in (None, NATIVE):
        return native_flags()
    return next(variant.flags for variant in VARIANTS if variant.name == requested)


def native_flags() -> tuple[str, ...]:
    """The compiler flags for this very processor, such that the library has the bits of its best variant."""
    best = [variant.name for variant in runnable()][:1]
    return (*NATIVE_FLAGS, WITHOUT_PAIRS) if best == ["avx512"] else NATIVE_FLAGS
