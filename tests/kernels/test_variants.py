"""Which library a machine gets: the wheel's for its processor and never another's, or one that it compiles itself."""

import ctypes
import itertools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forerun.errors import DeviceUnavailable
from forerun.kernels import build, library, variants
from forerun.kernels.build import NoKernels
from forerun.kernels.sampling import find_sampling_kernels
from forerun.kernels.variants import VARIANTS, Variant, runnable
from forerun.models.backends.native_check import find_kernels
from kit.computer import Computer, forget, library_works, restart, script, warnings_of

SRC = Path(library.__file__).resolve().parents[2]
OLD = "fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
HASWELL = f"{OLD} fma movbe xsave avx f16c abm bmi1 avx2 bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE} avx512_vnni avx512_vbmi"
COOPER_LAKE = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{COOPER_LAKE} avx512_fp16 amx_bf16 amx_tile amx_int8"
PROCESSORS = {
    "Nehalem": ("x86_64", OLD, []),
    "Haswell": ("x86_64", HASWELL, ["avx2"]),
    "Haswell without FMA": ("x86_64", HASWELL.replace("fma", ""), []),
    "Skylake": ("x86_64", SKYLAKE, ["avx2"]),
    "Ice Lake": ("x86_64", ICE_LAKE, ["avx512", "avx2"]),
    "Cooper Lake": ("AMD64", COOPER_LAKE, ["avx512", "avx512-bf16", "avx2"]),
    "Zen 4": ("x86_64", COOPER_LAKE, ["avx512-bf16", "avx512", "avx2"]),
    "Sapphire Rapids": ("x86_64", SAPPHIRE_RAPIDS, ["amx", "avx512", "avx512-bf16", "avx2"]),
    "Graviton": ("aarch64", "fp asimd evtstrm aes", ["neon"]),
    "Apple": ("arm64", "", ["neon"]),
    "RISC-V": ("riscv64", "", []),
}
INTEL = {"Nehalem", "Haswell", "Skylake", "Ice Lake", "Cooper Lake", "Sapphire Rapids"}


def become(name: str, computer: Computer, monkeypatch: pytest.MonkeyPatch, grants: bool = True) -> list[str]:
    """Makes the system report another processor; returns the variants that it runs."""
    machine, flags, names = PROCESSORS[name]
    field = "flags" if "64" in machine and "ar" not in machine else "Features"
    cpuinfo = computer.folder / "cpuinfo"
    vendor = "vendor_id\t: GenuineIntel\n" if name in INTEL else "vendor_id\t: AuthenticAMD\n" * (field == "flags")
    core = f"{vendor}{field}\t\t: {flags}\n"
    cpuinfo.write_text(f"processor\t: 0\n{core}\nprocessor\t: 1\n{core}")
    monkeypatch.setattr(variants, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(variants, "grants_tiles", lambda: grants)
    return names


def carry(computer: Computer, names: list[str]) -> None:
    """Install a wheel with libraries of these names."""
    library.WHEEL.mkdir()
    for name in names:
        shutil.copy(computer.library, library.WHEEL / f"{name}.so")


def loaded() -> str:
    """The file that the library in use was loaded from."""
    return Path(library.library()._name).stem


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_gets_the_best_library_that_it_can_run(
    computer: Computer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a wheel that holds those of all architectures. A processor without a variant compiles its library."""
    names = become(name, computer, monkeypatch)
    carry(computer, [variant.name for variant in VARIANTS])
    assert [variant.name for variant in runnable()] == names
    assert library_works()
    assert loaded() == names[0] if names else loaded() not in PROCESSORS
    assert computer.num_compiled == (0 if names else 1)


def test_without_permission_for_tiles_there_are_none(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert become("Sapphire Rapids", computer, monkeypatch, grants=False)[0] == "amx"
    assert [variant.name for variant in runnable()] == ["avx512", "avx512-bf16", "avx2"]


def test_a_library_compiled_here_multiplies_pairs_only_where_they_are_fast(
    computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it has the bits of the best variant, and reports its name."""
    for name, slow in {"Cooper Lake": True, "Ice Lake": True, "Zen 4": False, "Haswell": False}.items():
        become(name, computer, monkeypatch)
        assert (variants.WITHOUT_PAIRS in variants.flags_here()) == slow


def test_permission_for_tiles_is_asked_of_the_system() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("only Linux on x86-64 has something to ask for")
    assert variants.grants_tiles() == ("amx_tile" in variants.features())


def test_a_wheel_needs_no_compiler_and_no_folder_to_write_to(
    computer: Computer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    become("Haswell", computer, monkeypatch)
    carry(computer, ["avx2"])
    for setting in ("CXX", "HOME", "XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.setenv(setting, "/dev/null")
    assert library_works()
    assert not computer.num_compiled
    assert not computer.cache_folder.exists()
    assert not warnings_of(caplog)


@pytest.mark.parametrize("carried", [["neon"], ["amx", "avx512"], []])
def test_without_a_library_for_the_processor_it_compiles_or_torch_computes(
    computer: Computer, carried: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    become("Haswell", computer, monkeypatch)
    carry(computer, carried)
    assert library_works()
    assert computer.num_compiled == 1
    restart()
    monkeypatch.setenv("CXX", "/dev/null")
    assert find_sampling_kernels() is None
    assert find_kernels("auto", torch.float32) is None
    (warning,) = warnings_of(caplog)
    assert "\n" not in warning


def test_a_wheels_library_that_cannot_be_loaded_is_replaced(
    computer: Computer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    become("Ice Lake", computer, monkeypatch)
    carry(computer, ["avx2"])
    (library.WHEEL / "avx512.so").write_bytes(b"not a library")
    assert library_works()
    assert computer.num_compiled == 1
    (warning,) = warnings_of(caplog)
    assert "avx512.so cannot be loaded" in warning


def test_a_cache_from_another_processor_is_left_alone(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that share a home folder have one library each."""
    for count, name in enumerate(["Haswell", "Sapphire Rapids", "Graviton", "Haswell", "Sapphire Rapids"]):
        become(name, computer, monkeypatch)
        assert library_works()
        assert computer.num_compiled == min(count + 1, 3)
        restart()
    assert len(list(computer.cache_folder.glob("*.so"))) == 3


@pytest.mark.parametrize("carried", [True, False])
def test_a_variant_that_is_set_is_the_one_in_use(
    computer: Computer, carried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = become("Sapphire Rapids", computer, monkeypatch)
    carry(computer, names if carried else [])
    for name in names:
        monkeypatch.setenv("FORERUN_ISA", name)
        assert library_works()
        (variant,) = (variant for variant in VARIANTS if variant.name == name)
        if carried:
            assert loaded() == name
        else:
            assert [flag for flag in computer.last_arguments if flag.startswith("-m")] == list(variant.flags)
        restart()
    assert computer.num_compiled == (0 if carried else len(names))
    monkeypatch.setenv("FORERUN_ISA", "native")
    assert library_works()
    assert "-march=native" in computer.last_arguments


@pytest.mark.parametrize("name", ["avx512", "neon", "avx9", "AVX2"])
def test_a_variant_that_this_machine_cannot_run_is_an_error(
    computer: Computer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    become("Haswell", computer, monkeypatch)
    monkeypatch.setenv("FORERUN_ISA", name)
    for _ in range(2):
        with pytest.raises(DeviceUnavailable, match=f"FORERUN_ISA={name} .* this processor can run avx2 and native"):
            find_kernels("auto", torch.float32)
        with pytest.raises(DeviceUnavailable):
            find_sampling_kernels()
    assert find_kernels("torch", torch.float32) is None
    monkeypatch.setenv("FORERUN_ISA", "")
    assert library_works()


PROGRAM = "from forerun.kernels import library; print(library.library().answer())"


def test_of_two_programs_that_start_at_once_one_compiles(computer: Computer) -> None:
    text = (computer.folder / "cxx").read_text()
    script(computer.folder / "cxx", text.replace("echo compile >>", "sleep 0.5; echo compile >>"))
    env = os.environ | {"PYTHONPATH": str(SRC)}
    begun = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [program.communicate(timeout=300) for program in begun] == [(b"42\n", b"")] * 3
    assert computer.num_compiled == 1


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("/usr/bin/ld: cannot find -lgomp: No such file\ncollect2: error: ld returned 1 exit status",
         "cannot find -lgomp: No such file"),
        ("a.o: in function `f': undefined reference to `g'\nclang: error: linker command failed with exit code 1",
         "undefined reference to `g'"),
        ("x.cpp:7:9: error: no such type", "error: no such type"),
        ("collect2: error: ld returned 1 exit status", "collect2: error: ld returned 1 exit status"),
    ],
)  # fmt: skip
def test_a_linkers_error_is_reported_by_its_cause(output: str, cause: str) -> None:
    assert build.first_error(output) == f" ({cause})"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_kernels_can_be_linked_with_a_static_standard_library(tmp_path: Path) -> None:
    """Some compilers have no other; it contains the function that older shared ones lack."""
    caller = tmp_path / "a.cpp"
    caller.write_text(
        "#include <vector>\n#include <stdexcept>\n"
        'extern "C" int* f(long n, std::vector<int>* v) { v->at(n) = 1; if (n > 9) throw std::length_error("x"); '
        "return new int[n]; }"
    )
    portable = next(source for source in build.SOURCES if source.name == "portable.cpp")
    call = ["g++", "-std=c++17", "-fPIC", "-shared", "-static-libstdc++", str(caller), str(portable)]
    call += ["-o", str(tmp_path / "a.so")]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ctypes.CDLL(str(tmp_path / "a.so"))


def test_a_compilers_whole_output_is_logged_and_its_first_error_reported(
    computer: Computer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    complaint = "fatal error: omp.h: No such file or directory"
    text = (
        f'[ "$1" = --version ] && exit; for i in $(seq 99); do echo noise >&2; done; echo "x.cpp:7:9: {complaint}" >&2'
    )
    (computer.folder / "cxx").write_text(f"#!/bin/sh\n{text}; exit 1\n")
    with pytest.raises(NoKernels) as caught:
        library.library()
    assert str(caught.value) == f"{computer.folder}/cxx failed ({complaint}): {build.FIX}"
    (logged,) = (record.getMessage() for record in caplog.records if record.name.endswith("kernels.build"))
    assert logged.count("noise") == 99
    assert "-march=native" in logged
    forget()


def test_variants_of_an_architecture_are_listed_from_the_best_down() -> None:
    def wider(a: Variant, b: Variant) -> bool:
        return a.machine != b.machine or a.features > b.features

    assert all(wider(a, b) for a, b in itertools.pairwise(VARIANTS))
    assert len({variant.name for variant in VARIANTS}) == len({v.instructions for v in VARIANTS}) == len(VARIANTS)
