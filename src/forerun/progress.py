"""Progress: a bar for work that takes long, where standard error is a terminal; lines elsewhere, of work of hours.

This file decides when a bar is shown, how often it is drawn, and how lines look. Callers report what they do and which
share of it is done; the same report can go to a callback of the user instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from forerun.annotations import ProgressCallback

PATIENCE_S = 2.0  # work that is over before that shows no bar
REDRAW_S = 0.1  # drawing takes tens of microseconds, which every token of a batch would feel


class LoadingBar:
    """A progress callback that shows a bar once the work has taken two seconds, if a person is looking: on standard
    error, unless told otherwise.

    Where nobody is, it prints a line every `lines_s` seconds, or nothing without them.
    """

    def __init__(self, console: Console | None = None, lines_s: float | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._lines_s = lines_s
        self._started_s = self._told_s = time.monotonic()
        self._drawn_s = 0.0
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_shown(self) -> bool:
        """Whether a person may see it, and what is printed beside it."""
        return self._console.is_terminal

    def stop(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._tasks = None, {}

    def __call__(self, what: str, done: float, detail: str = "") -> None:
        """`done` is the fraction of `what` that is finished; `detail` says what of it runs now."""
        now_s = time.monotonic()
        if not self.is_shown:
            if self._lines_s is not None and now_s - self._told_s >= self._lines_s:
                self._told_s = now_s
                self._console.print(f"{what} {done:.0%}" + (f": {detail}" if detail else ""), markup=False)
            return
        if now_s - self._started_s < PATIENCE_S:
            return
        if done < 1 and now_s - self._drawn_s < REDRAW_S and not detail:
            return
        self._drawn_s = now_s
        if self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %")
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=1.0)
        self._bar.update(self._tasks[what], completed=done, description=f"{what} {detail}".rstrip())


@contextmanager
def reporting(report: ProgressCallback | None, bar: bool) -> Iterator[ProgressCallback]:
    """Where to report progress: `report` if there is one, else a bar on a terminal if one is wanted, else nowhere."""
    if report is not None or not bar or not sys.stderr.isatty():
        yield report or (lambda _what, _done: None)
        return
    with LoadingBar() as shown:
        yield shown
