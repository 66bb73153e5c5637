"""Runs parts one after the other, each in its own process and with a time limit.

The folder contains `rows.jsonl`, to which each row is added as soon as it is measured; `report.json` and `report.md`,
which are rewritten from it every few seconds; and `log.txt`, everything that the parts printed. A part that is done is
not run again. The parent process never uses the GPU, so an error there ends with the process of the part.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.gpu.parts import CARD, MeasuredPart
from benchmarks.gpu.report import write_report
from benchmarks.gpu.setting import Setting

from forerun.store import Journal

POLL_S, REPORT_S = 0.05, 2.0
TAIL_LINES = 12  # of a failed part's output, which are printed
LEAST_SHARE = 0.25  # a part starts only if this share of its time limit is left


def run_parts(parts: Sequence[MeasuredPart], setting: Setting, until_s: float) -> dict[str, str]:
    """Run the parts until `until_s`, a time of `time.monotonic`, and return the final state of each.

    States are done (now or in an earlier run), failed, stopped (at its time limit) and skipped (for lack of time).
    If querying the card fails, no other part is started.
    """
    log, states = setting.journal.parent / "log.txt", {}
    for part in parts:
        if part.name in done(setting.journal):
            states[part.name] = "done"
            continue
        left_s = until_s - time.monotonic()
        if left_s < LEAST_SHARE * part.limit_s:
            states[part.name] = "skipped"
            end(setting, part.name, "skipped", 0.0)
            continue
        print(f"{part.name} ...", flush=True)
        states[part.name] = attempt(part, setting, min(part.limit_s, left_s), log)
        if part.name == CARD and states[CARD] != "done":
            break
    write_report(setting.journal.parent)
    return states


def done(journal: Path) -> set[str]:
    """The names of the parts that were completed, in this run or an earlier one."""
    return {e["end"] for e in Journal.read(journal).entries if isinstance(e, dict) and e.get("state") == "done"}


def end(setting: Setting, name: str, state: str, seconds: float) -> None:
    """Add the final state of a part to the journal."""
    journal = Journal.read(setting.journal)
    journal.keep(len(journal.entries))  # removes a last line that is incomplete because its writer was killed
    journal.add({"end": name, "state": state, "seconds": round(seconds, 1)})


def attempt(part: MeasuredPart, setting: Setting, limit_s: float, log: Path) -> str:
    """Run one part in its own process, with its output in the log, and return its final state."""
    began = reported = time.monotonic()
    size = log.stat().st_size if log.exists() else 0
    child = os.fork()
    if child == 0:
        work(part, setting, log)
    with suppress(OSError):  # the child does this too, since either may run first
        os.setpgid(child, child)
    try:
        state = ""
        while not state:
            pid, status = os.waitpid(child, os.WNOHANG)
            now = time.monotonic()
            if pid:
                state = "failed" if status else "done"
            elif now - began > limit_s:
                state = "stopped"
            elif now - reported > REPORT_S:
                reported = now
                write_report(setting.journal.parent)
            time.sleep(0 if state else POLL_S)
    finally:
        kill(child)
    seconds = time.monotonic() - began
    end(setting, part.name, state, seconds)
    write_report(setting.journal.parent)
    print(f"{part.name}: {state}, {seconds:.1f} s", flush=True)
    if state != "done":
        output = log.read_bytes()[size:].decode(errors="replace").splitlines()
        print("\n".join(f"  | {line}" for line in output[-TAIL_LINES:]), flush=True)
    return state


def work(part: MeasuredPart, setting: Setting, log: Path) -> None:
    """Run the part in the child process, and end the process: this function never returns."""
    status = 1
    try:
        os.setpgid(0, 0)  # so that the part and the processes that it starts can be ended together
        with log.open("ab", buffering=0) as file:
            file.write(f"\n== {part.name}\n".encode())
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if setting.dry:
            torch.set_num_threads(1)  # with more, threads wait for each other while other programs use the cores
        with torch.inference_mode():
            part.body(replace(setting, part=part.name))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def kill(child: int) -> None:
    """End the processes of a part that are still running."""
    try:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return
