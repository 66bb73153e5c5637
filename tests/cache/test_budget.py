"""The memory that there is, read from files as the system writes them."""

from pathlib import Path

import pytest

from forerun.cache.budget import available_bytes, default_budget


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
def test_available_memory_is_the_machines_or_the_containers(tmp_path, limit, expected):
    assert available_bytes(*write_system(tmp_path, 500, limit)) == expected


def test_without_meminfo_half_of_the_physical_memory_counts(tmp_path):
    half = available_bytes(tmp_path / "none", tmp_path)
    assert half > 0
    if Path("/proc/meminfo").exists():
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        assert half == pytest.approx(total / 2, rel=0.01)


def test_the_default_budget_leaves_a_fifth(monkeypatch):
    monkeypatch.setattr("forerun.cache.budget.available_bytes", lambda: 1000)
    assert default_budget() == 800
