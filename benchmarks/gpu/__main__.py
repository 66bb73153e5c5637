"""Test and measure a GPU within minutes; `scripts/gpu` is this command.

    scripts/gpu                                  # all parts, within 9 minutes: the card, then the tests
    scripts/gpu kernels speed --seconds 300      # some groups, or parts by name, in this order
    scripts/gpu all --output FOLDER              # repeated with the same folder, it runs the parts that are not done
    scripts/gpu --dry-run                        # tiny shapes on a CPU: shows that it runs, measures nothing
    python -m benchmarks.gpu --into-results FOLDER [--results benchmarks/RESULTS.md]

The exit status is 0 if all parts are done, 1 if one failed, 3 if some were stopped or skipped for lack of time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import chosen
from benchmarks.gpu.report import insert, section, states, tables_of
from benchmarks.gpu.run import run_parts
from benchmarks.gpu.setting import Setting

FAILED, STOPPED = 1, 3
SECONDS = 540.0


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("parts", nargs="*", help="tests, kernels, speed, or parts by name; all by default")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the time limit of the run (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="folder of the results (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU; measures nothing")
    parser.add_argument("--into-results", type=Path, metavar="FOLDER", help="print the RESULTS section of this run")
    parser.add_argument("--results", type=Path, metavar="FILE", help="insert that section into this file instead")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the parts, or print or insert the section of an earlier run; returns the exit status."""
    began, options = time.monotonic(), options_of()
    if options.into_results:
        text = section(tables_of(options.into_results))
        insert(options.results, text) if options.results else print(text)
        return 0
    try:
        parts = chosen(options.parts)
    except ValueError as error:
        sys.exit(str(error))
    options.output.mkdir(parents=True, exist_ok=True)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when the kernels are defined
    signal.signal(signal.SIGTERM, stop)
    setting = Setting(options.dry_run, options.output.resolve() / "rows.jsonl")
    ends = run_parts(parts, setting, began + options.seconds)
    print(states(tables_of(options.output)))
    print(f"{options.output}/report.md, report.json, rows.jsonl, log.txt")
    if "failed" in ends.values():
        return FAILED
    return 0 if set(ends.values()) == {"done"} else STOPPED


def stop(*_: Any) -> None:
    """Handle SIGTERM: the exit also ends the part that is running."""
    sys.exit(STOPPED)


if __name__ == "__main__":
    sys.exit(main())
