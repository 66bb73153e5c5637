"""Fixture of the library's tests: a fake machine on which nothing was compiled yet."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.kernels import library
from forerun.kernels.build import compiler
from forerun.kernels.variants import SETTING
from kit.compiled import require_compiler
from kit.computer import Computer, forget, restart, script, shared_library


@pytest.fixture(scope="module")
def real_compiler() -> str:
    require_compiler()
    return compiler()


@pytest.fixture(scope="module")
def tiny_library(real_compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.so"
    return shared_library(real_compiler, path, 'extern "C" int answer() { return 42; }')


@pytest.fixture
def computer(
    tmp_path: Path, real_compiler: str, tiny_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Computer]:
    here = Computer(tmp_path, tiny_library, real_compiler)
    work = f"""case "$1" in --version) echo "one of our own";; *)
        echo compile >> {tmp_path}/calls; echo "$@" >> {tmp_path}/arguments
        for last; do :; done; cp {tiny_library} "$last";; esac"""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("CXX", str(script(tmp_path / "cxx", work)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setattr(library, "WHEEL", tmp_path / "wheel")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    forget()
    yield here
    restart()
