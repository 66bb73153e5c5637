"""Progress: a bar for long work if standard error is a terminal; for work of minutes or hours, lines of text otherwise.

This file decides when a bar is shown, how often it is drawn, and how lines look. Callers report a description of their
work and the finished fraction; the report can go to a callback of the user instead.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from forerun.annotations import ProgressCallback

PATIENCE_S = 2.0  # shorter work shows no bar
STAGE_S = 5.0  # time between lines of text
LINES_S = 30.0  # between two lines about the same stage of the work
REDRAW_S = 0.1  # drawing takes tens of microseconds, too long to do it for every token


def rounded_duration(seconds: float) -> str:
    """A rounded duration with its unit."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} seconds"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 90 else f"{seconds / 3600:.1f} hours"


class LoadingBar:
    """A progress callback that shows a bar after two seconds if `console`, by default standard error, is a terminal.

    Otherwise, with `lines`, a thread prints the last report every `STAGE_S` seconds, unless there was a line about the
    same stage of the work in the last `LINES_S` seconds.
    """

    def __init__(self, console: Console | None = None, lines: bool = False) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._started_s = time.monotonic()
        self._drawn_s = 0.0
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        # By stage: the time and the share of its first report, and its last share.
        self._began: dict[str, tuple[float, float, float]] = {}
        self._reported = ("", "")  # the stage of the last report, and its text
        self._printed_s: dict[str, float] = {}  # by stage: the time of its last line
        self._ended = Event()
        self._lines = Thread(target=self._print_lines, name="forerun-progress", daemon=True) if lines else None

    def __enter__(self) -> LoadingBar:
        if self._lines is not None and not self.is_shown:
            self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._ended.set()
        if self._lines is not None and self._lines.is_alive():
            self._lines.join()

    def _print_lines(self) -> None:
        while not self._ended.wait(STAGE_S):
            self.print_line()

    def print_line(self) -> None:
        """Print the last report, unless there is a line about its stage that is younger than `LINES_S`."""
        now_s, (stage, report) = time.monotonic(), self._reported
        if report and now_s - self._printed_s.get(stage, -math.inf) >= LINES_S:
            self._printed_s[stage] = now_s
            self._console.print(report, markup=False, soft_wrap=True)

    @property
    def is_shown(self) -> bool:
        """Whether the console is a terminal."""
        return self._console.is_terminal

    def stop(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._tasks = None, {}

    def __call__(self, what: str, done: float, detail: str = "") -> None:
        """Report that the fraction `done` of the work `what` is finished; `detail` is the part that runs now."""
        if not self.is_shown:
            self._reported = what, f"{what} {done:.0%}" + (f": {detail}" if detail else "")
            return
        now_s = time.monotonic()
        began_s, done_before, last = self._began.get(what, (now_s, done, done))
        if done < last:  # the stage begins again, for another model or drafter
            began_s, done_before = now_s, done
        self._began[what] = began_s, done_before, done
        if now_s - self._started_s < PATIENCE_S:
            return
        if done < 1 and now_s - self._drawn_s < REDRAW_S and not detail:
            return
        self._drawn_s = now_s
        width = self._console.width // 8
        if self._bar is None:
            text, share = TextColumn("{task.description}", markup=False), TextColumn("{task.percentage:3.0f} %")
            columns = text, BarColumn(width), share, TextColumn("{task.fields[left]}")
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
        room = max(12, self._console.width - width - 16)  # beside the bar, the share and the time
        shown, half = f"{what} {detail}".rstrip(), room // 2
        shown = shown if len(shown) <= room else f"{shown[: half - 1]}…{shown[-half:]}"
        known = done - done_before >= 0.001
        left = timedelta(seconds=round((now_s - began_s) / (done - done_before) * (1 - done))) if known else "-:--:--"
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(shown, total=1.0, left=left, visible=False)
        self._bar.update(self._tasks[what], completed=done, description=shown, left=left, visible=True)


@contextmanager
def reporting(report: ProgressCallback | None, bar: bool) -> Iterator[ProgressCallback]:
    """The callback for progress: `report` if given, else a bar if `bar` and standard error is a terminal, else none."""
    if report is not None or not bar or not sys.stderr.isatty():
        yield report or (lambda _what, _done: None)
        return
    with LoadingBar() as shown:
        yield shown
