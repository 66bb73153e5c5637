"""The description of the machine that a measurement records."""

import mmap
import sys
import time
from pathlib import Path

import pytest

from forerun import machine
from forerun.machine import (
    available_bytes,
    bandwidth_bytes_per_s,
    forget_peak_rss,
    peak_rss_bytes,
    processor,
    sources_digest,
    unmapped_bytes,
    vector_instructions,
)


def test_the_processors_name_is_the_systems(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some: Chip 9\n\nprocessor\t: 1\nmodel name\t: Some: Chip 9\n")
    assert processor(cpuinfo) == "Some: Chip 9"
    cpuinfo.write_text("Processor : none of that name\n")
    assert processor(cpuinfo) == processor(tmp_path / "missing")


def test_vector_instructions_are_found_among_a_processors_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert vector_instructions(cpuinfo) == ()
    flags = "fpu sse ssse3 sse4_1 avx avx2 avx512f avx512_bf16 amx_tile amx_bf16 fma f16c sme smep sev aes hypervisor"
    cpuinfo.write_text(f"processor : 0\nmodel name : A\nflags\t\t: {flags}\nprocessor : 1\nflags : sse\n")
    known = {"sse", "ssse3", "sse4_1", "avx", "avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "fma", "f16c"}
    assert set(vector_instructions(cpuinfo)) == known
    cpuinfo.write_text("processor : 0\nFeatures : fp asimd asimdhp sve sve2 sme i8mm bf16 paca\n")
    assert set(vector_instructions(cpuinfo)) == {"asimd", "asimdhp", "sve", "sve2", "sme", "i8mm", "bf16"}


def test_bandwidth_is_the_bytes_over_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s = [8.0, 2.0, 4.0, 2.5, 16.0]
    looks = [0.0]
    for each in took_s:
        looks += [looks[-1] + each, looks[-1] + each]  # the end of one and the beginning of the next
    monkeypatch.setattr(time, "perf_counter", iter(looks).__next__)
    assert bandwidth_bytes_per_s(1000) == 4 * 1000 / 2.0


def write_system(folder: Path, available_kb: int, limit: str | None) -> tuple[Path, Path]:
    meminfo = folder / "meminfo"
    meminfo.write_text(f"MemTotal:  900 kB\nMemAvailable:  {available_kb} kB\nHugePages_Free:  0\n")
    if limit is not None:
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("300000\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    return meminfo, folder


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 512_000), ("max", 512_000), ("600000", 350_000), ("100000", 0), ("9000000", 512_000)]
)
def test_available_memory_is_the_machines_or_the_containers(tmp_path: Path, limit: str | None, expected: int) -> None:
    assert available_bytes(*write_system(tmp_path, 500, limit)) == expected


def test_available_memory_is_what_the_process_may_still_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    page = resource.getpagesize()
    (tmp_path / "statm").write_text("100 60 20 1 0 40 0\n")
    for most, expected in ((140 * page, 40 * page), (90 * page, 0), (resource.RLIM_INFINITY, sys.maxsize)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=most: (soft, resource.RLIM_INFINITY))
        assert unmapped_bytes(tmp_path / "statm") == expected
    system = write_system(tmp_path, 500, None)
    monkeypatch.setattr(machine, "unmapped_bytes", lambda: 7)
    assert available_bytes(*system) == 7


def test_without_meminfo_half_of_the_physical_memory_counts(tmp_path: Path) -> None:
    half = available_bytes(tmp_path / "none", tmp_path)
    assert half > 0
    if Path("/proc/meminfo").exists():
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        assert half == pytest.approx(total / 2, rel=0.01)


@pytest.mark.full
def test_the_peak_is_reset_after_memory_is_freed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
def test_changed_sources_have_another_digest(tmp_path: Path, name: str) -> None:
    """A changed line, kernels included, makes other sources; compiled or cached files in the folders do not."""
    for each in ("a.py", "deep/b.cpp", "deep/c.hpp"):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text("one")
    before = sources_digest(tmp_path)
    (tmp_path / "deep" / "b.pyc").write_text("noise")
    assert sources_digest(tmp_path) == before
    (tmp_path / name).write_text("two")
    assert sources_digest(tmp_path) != before
    assert len(sources_digest()) == 8
