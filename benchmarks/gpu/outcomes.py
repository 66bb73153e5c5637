"""A plugin of pytest: each test's outcome is a line of the journal as soon as it is known.

It must not import forerun, since pytest loads it before the hooks that check shapes.
"""

from __future__ import annotations

import json
import os
from typing import Any

JOURNAL, PART = "FORERUN_GPU_JOURNAL", "FORERUN_GPU_PART"  # environment variables


def pytest_runtest_logreport(report: Any) -> None:
    """pytest's hook. Where several processes run tests, the one that hands them out is told of all."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    entry = {"part": os.environ[PART], "table": "tests", "test": report.nodeid, "outcome": report.outcome,
             "seconds": round(report.duration, 2)}  # fmt: skip
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        entry["said"] = str(crash.message)[:400]
    with open(os.environ[JOURNAL], "ab", buffering=0) as file:
        file.write(json.dumps(entry).encode() + b"\n")
