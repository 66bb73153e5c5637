"""Runs the tests of `tests/gpu`, one file at a time. A file that is run again skips the tests that have passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.outcomes import JOURNAL, PART
from benchmarks.gpu.setting import Setting

from forerun.store import Journal

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "tests" / "gpu"
PROCESSES = 12  # that share the GPU
NO_TESTS = 5  # pytest's exit status if all tests are deselected


def test_files() -> list[Path]:
    """The files of `tests/gpu`, sorted by name."""
    return sorted(FOLDER.glob("test_*.py"))


def run_file(setting: Setting, path: Path) -> None:
    """Run the tests of one file; raises AssertionError if one fails."""
    entries = Journal.read(setting.journal).entries
    outcomes = {e["test"]: e["outcome"] for e in entries if isinstance(e, dict) and e.get("table") == "tests"}
    passed = [f"--deselect={test}" for test, outcome in outcomes.items() if outcome == "passed"]
    processes = [] if setting.dry else [f"-n{PROCESSES}"]
    command = [sys.executable, "-m", "pytest", str(path), "--no-header", "--tb=short", "-rf",
               "-pno:cacheprovider", "-pbenchmarks.gpu.outcomes", *processes, *passed]  # fmt: skip
    paths = os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    env = outer | {JOURNAL: str(setting.journal), PART: setting.part, "PYTHONPATH": paths}
    status = subprocess.run(command, cwd=PROJECT, env=env).returncode
    assert status in (0, NO_TESTS), f"pytest ended with {status}"
