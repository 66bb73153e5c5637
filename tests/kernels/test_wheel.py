"""A wheel carries the kernels for every processor of its architecture, and works where there is no compiler."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zipfile import ZipFile

import pytest

from forerun.kernels.build import NoKernels, compile_all, platform_tag, target
from forerun.kernels.variants import VARIANTS, architecture, runnable
from kit.checkpoints import ROOT
from kit.compiled import require_compiler
from kit.computer import Computer, script

SOURCES = ["src", "setup.py", "pyproject.toml", "README.md", "LICENSE"]
OLDEST_SETUPTOOLS = (70, 1)
X86_64 = [variant.name for variant in VARIANTS if variant.machine == "x86_64"]


def compiler_for(computer: Computer, triple: str) -> str:
    """A compiler that reports this system as the one it compiles for."""
    text = (computer.folder / "cxx").read_text()
    return str(script(computer.folder / "cross", f'[ "$1" = -dumpmachine ] && echo {triple} && exit\n{text}'))


@pytest.mark.parametrize(
    ("triple", "names"),
    [
        ("x86_64-linux-gnu", X86_64),
        ("x86_64-pc-linux-gnu", X86_64),
        ("aarch64-unknown-linux-gnu", ["neon"]),
        ("arm64-apple-darwin23.1.0", ["neon"]),
    ],
)
def test_there_is_a_library_for_each_variant_of_the_compilers_architecture(
    computer: Computer, triple: str, names: list[str]
) -> None:
    made = compile_all(computer.folder / "made", compiler_for(computer, triple))
    assert [path.name for path in made] == [f"{name}.so" for name in names]
    linked = [line for line in (computer.folder / "arguments").read_text().splitlines() if "-shared" in line.split()]
    assert len(linked) == len(names)
    assert not any("-fopenmp" in line for line in linked), "torch brings the runtime"


@pytest.mark.parametrize("triple", ["riscv64-linux-gnu", "x86_64-w64-mingw32", "", "sparc-sun-solaris2.11"])
def test_for_other_systems_there_is_none(computer: Computer, triple: str) -> None:
    with pytest.raises(NoKernels, match="compiles for"):
        compile_all(computer.folder / "made", compiler_for(computer, triple))


@pytest.mark.parametrize(
    ("needed", "tag"),
    [
        ("GLIBC_2.2.5 GLIBC_2.14 GLIBCXX_3.4.9 CXXABI_1.3.11", "manylinux_2_27_x86_64"),
        ("GLIBC_2.14 GLIBC_2.34 GLIBC_2.4 GLIBCXX_3.4", "manylinux_2_34_x86_64"),
        ("GLIBC_2.14 GLIBCXX_3.4.29", "linux_x86_64"),
        ("GLIBC_2.14 CXXABI_1.3.13", "linux_x86_64"),
        ("", "linux_x86_64"),  # another C library
    ],
)
def test_the_tag_is_that_of_the_oldest_system_with_the_needed_symbols(
    computer: Computer, needed: str, tag: str
) -> None:
    paths = [computer.folder / "old.so", computer.folder / "new.so"]
    for path, names in zip(paths, (needed.split()[:1], needed.split()), strict=True):
        path.write_bytes(b"\x7fELF\0" + b"\0".join(name.encode() for name in names) + b"\0puts\0")
    assert platform_tag(paths, compiler_for(computer, "x86_64-linux-gnu")) == tag


def test_this_machines_compiler_says_what_it_compiles_for(real_compiler: str) -> None:
    if sys.platform == "linux":
        assert target(real_compiler) == (architecture(), "linux")


def call(*arguments: str | Path, folder: Path, **env: str) -> str:
    """Run a program; returns all that it printed, and fails with that."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FORERUN", "COV"))}
    done = subprocess.run(
        [*map(str, arguments)], cwd=folder, env=kept | env, text=True, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a wheel from a copy of the sources, in an environment with these variables."""
    try:
        found = version("setuptools")
    except PackageNotFoundError:
        found = "0"
    if tuple(map(int, found.split(".")[:2])) < OLDEST_SETUPTOOLS:
        pytest.skip(f"building needs setuptools {OLDEST_SETUPTOOLS} here, there is {found}")

    def run(**env: str) -> Path:
        folder = tmp_path_factory.mktemp("sources")
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", "dist"]
        call(sys.executable, "-m", "pip", "wheel", *options, ".", folder=folder, **env)
        (made,) = (folder / "dist").glob("*.whl")
        return made

    return run


def libraries_in(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as file:
        return {Path(name).stem: file.read(name) for name in file.namelist() if name.endswith(".so")}


@pytest.mark.full
def test_without_a_compiler_the_wheel_is_one_of_python_alone(build: Callable[..., Path]) -> None:
    wheel = build(CXX="/dev/null")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not libraries_in(wheel)


RUNTIMES = """
import json, pathlib
import forerun
from forerun.models.choice import cpu_backend
import torch
name = cpu_backend("native", torch.float32).name
files = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(json.dumps([forerun.__file__, name, sorted(file for file in files if "omp" in pathlib.Path(file).name)]))
"""


@pytest.mark.full
def test_prove_runs_from_a_wheel_without_a_compiler(build: Callable[..., Path], tmp_path: Path) -> None:
    """It may not write anywhere either, and links no OpenMP runtime: the process has one, which is torch's."""
    require_compiler()
    if not runnable():
        pytest.skip("no variant of the kernels is for this processor")
    wheel = build()
    carried = libraries_in(wheel)
    assert set(carried) == {variant.name for variant in VARIANTS if variant.machine == architecture()}
    assert not any(b"libgomp" in data for data in carried.values())
    assert "-py3-none-" in wheel.name
    site = tmp_path / "site"
    options = ["--no-deps", "--no-index", "--quiet", "--target", str(site)]
    call(sys.executable, "-m", "pip", "install", *options, wheel, folder=tmp_path)
    without = {"PYTHONPATH": str(site), "PATH": "/nowhere", "CXX": "/dev/null", "HOME": "/dev/null"}
    without["XDG_CACHE_HOME"] = "/dev/null"
    place, name, runtimes = json.loads(call(sys.executable, "-c", RUNTIMES, folder=tmp_path, **without))
    assert Path(place).is_relative_to(site)
    assert name == f"{runnable()[0].instructions} kernels"
    if sys.platform == "linux":
        assert len(runtimes) == 1, runtimes
        assert "torch" in runtimes[0]
    models, few = ["--model", "stdlib", "--draft", "model:stdlib-draft"], ["--num-prompts", "1", "-n", "8"]
    rest = [*few, "--num-texts", "100", "--prompts", str(ROOT / "tests/data/prompts.txt")]
    output = call(sys.executable, "-m", "forerun", "prove", *models, *rest, folder=tmp_path, **without)
    assert name in output
    assert "No compiled kernels" not in output
