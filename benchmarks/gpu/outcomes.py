"""A pytest plugin that appends the outcome of each test to the journal when the test ends.

It must not import forerun, because pytest loads it before the hooks that check shapes.
"""

from __future__ import annotations

import json
import os
from typing import Any

JOURNAL, PART = "FORERUN_GPU_JOURNAL", "FORERUN_GPU_PART"  # environment variables


def pytest_runtest_logreport(report: Any) -> None:
    """The hook that pytest calls with each report. With several processes only their controller writes: it gets every
    worker's reports."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    entry = {"part": os.environ[PART], "table": "tests", "test": report.nodeid, "outcome": report.outcome,
             "seconds": round(report.duration, 2)}  # fmt: skip
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        entry["said"] = str(crash.message)[:400]
    with open(os.environ[JOURNAL], "ab", buffering=0) as file:
        file.write(json.dumps(entry).encode() + b"\n")
