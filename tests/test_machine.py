"""What a measurement says of its machine."""

import mmap
import time
from pathlib import Path

import pytest
import torch

from forerun import machine
from forerun.machine import (
    Machine,
    bandwidth_bytes_per_s,
    forget_peak_rss,
    peak_rss_bytes,
    processor,
    sources_digest,
    vector_instructions,
)


def test_the_processors_name_is_the_systems(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some: Chip 9\n\nprocessor\t: 1\nmodel name\t: Some: Chip 9\n")
    assert processor(cpuinfo) == "Some: Chip 9"
    cpuinfo.write_text("Processor : none of that name\n")
    assert processor(cpuinfo) == processor(tmp_path / "missing")


def test_vector_instructions_are_told_from_all_else_that_a_processor_can(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert vector_instructions(cpuinfo) == ()
    flags = "fpu sse ssse3 sse4_1 avx avx2 avx512f avx512_bf16 amx_tile amx_bf16 fma f16c sme smep sev aes hypervisor"
    cpuinfo.write_text(f"processor : 0\nmodel name : A\nflags\t\t: {flags}\nprocessor : 1\nflags : sse\n")
    known = {"sse", "ssse3", "sse4_1", "avx", "avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "fma", "f16c"}
    assert set(vector_instructions(cpuinfo)) == known
    cpuinfo.write_text("processor : 0\nFeatures : fp asimd asimdhp sve sve2 sme i8mm bf16 paca\n")
    assert set(vector_instructions(cpuinfo)) == {"asimd", "asimdhp", "sve", "sve2", "sme", "i8mm", "bf16"}


def test_threads_are_torchs_own() -> None:
    assert Machine.here().num_threads == torch.get_num_threads()
    assert Machine.here() == Machine.here()


def test_bandwidth_is_the_bytes_over_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s = [8.0, 2.0, 4.0, 2.5, 16.0]
    looks = [0.0]
    for each in took_s:
        looks += [looks[-1] + each, looks[-1] + each]  # the end of one and the beginning of the next
    monkeypatch.setattr(time, "perf_counter", iter(looks).__next__)
    assert bandwidth_bytes_per_s(1000) == 4 * 1000 / 2.0


@pytest.mark.full
def test_the_peak_forgets_what_is_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    block = mmap.mmap(-1, 200_000_000)  # memory of its own: a tensor may take what the process had and would keep
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    block.close()
    high = peak_rss_bytes()
    if forget_peak_rss() and high is not None:
        low = peak_rss_bytes()
        assert low is not None
        assert low <= high - 150_000_000
    monkeypatch.setattr(machine, "CLEAR_REFS", tmp_path / "no" / "such")
    assert not forget_peak_rss()


@pytest.mark.parametrize("name", ["a.py", "deep/b.cpp", "deep/c.hpp"])
def test_sources_are_told_apart(tmp_path: Path, name: str) -> None:
    """A changed line, kernels included, makes other sources; what is compiled or cached beside them does not."""
    for each in ("a.py", "deep/b.cpp", "deep/c.hpp"):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text("one")
    before = sources_digest(tmp_path)
    (tmp_path / "deep" / "b.pyc").write_text("noise")
    assert sources_digest(tmp_path) == before
    (tmp_path / name).write_text("two")
    assert sources_digest(tmp_path) != before
    assert len(sources_digest()) == 8
