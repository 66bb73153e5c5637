"""Runs parts one after the other, each in a process of its own and no longer than it may.

The folder holds `rows.jsonl`, to which everything is added as it is learned; `report.json` and `report.md`, which are
made from it again and again; and `log.txt`, all that the parts printed. A part that was done is not run again. The
process that looks after the others never touches the GPU, so that what a part breaks there is gone with the part.
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
TAIL_LINES = 12  # of what a failed part printed
LEAST_SHARE = 0.25  # of its limit has to be left for a part to be begun


def run_parts(parts: Sequence[MeasuredPart], setting: Setting, until_s: float) -> dict[str, str]:
    """What became of each part: done (now or before), failed, stopped at its limit, or skipped for want of time.

    `until_s` is a time of `time.monotonic`. Nothing else is begun where the card cannot be asked.
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
    """The parts that need not be run again."""
    return {e["end"] for e in Journal.read(journal).entries if isinstance(e, dict) and e.get("state") == "done"}


def end(setting: Setting, name: str, state: str, seconds: float) -> None:
    """Write down what became of a part."""
    journal = Journal.read(setting.journal)
    journal.keep(len(journal.entries))  # without a line that a kill cut off
    journal.add({"end": name, "state": state, "seconds": round(seconds, 1)})


def attempt(part: MeasuredPart, setting: Setting, limit_s: float, log: Path) -> str:
    """Run one part in a process of its own; what it prints goes into the log."""
    began, told, size = time.monotonic(), time.monotonic(), log.stat().st_size if log.exists() else 0
    child = os.fork()
    if child == 0:
        work(part, setting, log)
    with suppress(OSError):  # the child does it too: whoever comes first
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
            elif now - told > REPORT_S:
                told = now
                write_report(setting.journal.parent)
            time.sleep(0 if state else POLL_S)
    finally:
        kill(child)
    seconds = time.monotonic() - began
    end(setting, part.name, state, seconds)
    write_report(setting.journal.parent)
    print(f"{part.name}: {state}, {seconds:.1f} s", flush=True)
    if state != "done":
        said = log.read_bytes()[size:].decode(errors="replace").splitlines()
        print("\n".join(f"  | {line}" for line in said[-TAIL_LINES:]), flush=True)
    return state


def work(part: MeasuredPart, setting: Setting, log: Path) -> None:
    """The child's whole life; it never returns."""
    status = 1
    try:
        os.setpgid(0, 0)  # so that all its processes can be ended together
        with log.open("ab", buffering=0) as file:
            file.write(f"\n== {part.name}\n".encode())
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if setting.dry:
            torch.set_num_threads(1)  # of many, most wait where other programs keep the cores busy
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
    """End a part's processes, whatever is left of them."""
    try:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return
