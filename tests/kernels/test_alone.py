"""The kernels without Python: alone.cpp, which also runs where the processor is an emulated one.

QEMU knows Arm and AVX2, but neither AVX-512 nor AMX: libraries for these are tested where a processor has them.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from forerun.kernels.build import FLAGS, SOURCES
from forerun.kernels.variants import VARIANTS, architecture, runnable
from kit.compiled import FLAGS_OF, HERE, NAMES, compiler_for, library_for

SOURCE = Path(__file__).with_name("alone.cpp")
PORTABLE = "x86-64"  # before all variants: what the compiler makes of code without instructions for it
INSTRUCTIONS = {variant.name: variant.instructions for variant in VARIANTS} | {PORTABLE: "vectors"}
LEAST = HERE[-1]  # which the short suite compiles for other tests too
MACHINES = {variant.name: variant.machine for variant in VARIANTS}


def emulator(machine: str) -> list[str]:
    """What runs a program of another architecture; skips where it is missing."""
    found = shutil.which(f"qemu-{machine}")
    if found is None:
        pytest.skip(f"no qemu-{machine} here (Debian: qemu-user)")
    return [found, "-L", f"/usr/{machine}-linux-gnu"]


def run(level: str, folder: Path) -> list[str]:
    """Compile it for a level and run it; returns the hashes of all results, after all of them were found right."""
    here = level in {PORTABLE, *(variant.name for variant in runnable())}
    if not here and level != "neon":
        pytest.skip(f"neither this processor nor QEMU runs {level} code")
    command, start = compiler_for(level), [] if here else emulator(MACHINES[level])
    program = folder / f"alone-{level}"
    # The program around the library is compiled with -O1: that takes half the time, and its bits are the same.
    flags = [flag.replace("-O3", "-O1") for flag in FLAGS] + [*FLAGS_OF.get(level, (f"-march={level}",))]
    flags += ["-Wall", "-Wextra", "-Werror", f"-I{SOURCES[0].parent}"]
    library = library_for(level)
    found_at = f"-Wl,-rpath,{library.parent}"
    subprocess.run([command, *flags, str(SOURCE), str(library), found_at, "-o", str(program)], check=True)
    done = subprocess.run([*start, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.split("\n")[0] == INSTRUCTIONS[level]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "level",
    [level if level == LEAST else pytest.param(level, marks=pytest.mark.full) for level in NAMES if level in MACHINES],
)
def test_kernels_are_right_without_python(level: str, tmp_path: Path) -> None:
    assert len(run(level, tmp_path)) == 11


@pytest.mark.full
@pytest.mark.skipif(architecture() != "x86_64", reason="it is a level of x86-64")
def test_kernels_are_right_on_processors_that_no_variant_is_for(tmp_path: Path) -> None:
    assert len(run(PORTABLE, tmp_path)) == 11


@pytest.mark.full
def test_neon_has_the_bits_of_avx2(tmp_path: Path) -> None:
    """Both widen 16 bits, and everything else is the same arithmetic lane by lane."""
    assert run("neon", tmp_path) == run("avx2", tmp_path)
