"""Progress goes to the callback if there is one, else to an interactive terminal, else nowhere."""

import io
import sys
import time

import pytest
from rich.console import Console
from rich.progress import Progress
from typing_extensions import override

from forerun import progress
from forerun.streams import show_error


class Terminal(io.StringIO):
    """A stream that a person watches."""

    @override
    def isatty(self) -> bool:
        return True


def shown_by(bar: bool, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, num_steps: int = 10) -> str:
    """The output of so many steps that take a second each."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.reporting(None, bar) as report:
        for step in range(1, num_steps + 1):
            clock[0] += 1
            report("generating", step / 10)
    return stream.getvalue()


def test_a_terminal_gets_a_bar_and_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert "generating" in shown_by(True, Terminal(), monkeypatch)
    assert shown_by(True, Terminal(), monkeypatch, num_steps=1) == "", "work that is over soon shows no bar"
    assert shown_by(False, Terminal(), monkeypatch) == ""
    assert shown_by(True, io.StringIO(), monkeypatch) == ""


def test_a_callback_gets_every_step_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, reported = Terminal(), list[tuple[str, float]]()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.reporting(lambda what, done: reported.append((what, done)), True) as report:
        report("a", 0.5)
        report("a", 1.0)
    assert reported == [("a", 0.5), ("a", 1.0)]
    assert terminal.getvalue() == ""


def test_a_bar_is_drawn_ten_times_a_second_at_most_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, drawn = [100.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(Progress, "update", lambda _bar, _task, completed, **_: drawn.append(completed))
    with progress.reporting(None, True) as report:
        clock[0] += progress.PATIENCE_S
        for step in range(1, 1001):
            clock[0] += 0.001
            report("generating", step / 1000)
    assert 5 <= len(drawn) <= 12
    assert drawn[-1] == 1.0


def test_the_bar_is_removed_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress.LoadingBar, "stop", lambda _bar: stopped.append(True))
    with pytest.raises(ValueError, match="on purpose"), progress.reporting(None, True):
        raise ValueError("on purpose")
    assert stopped == [True]


def test_long_work_writes_its_progress_to_a_file_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = [100.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with progress.LoadingBar(Console(file=file), lines_s=30.0) as bar:
        for step in range(1, 101):
            clock[0] += 1
            bar("training", step / 100, f"loss [{step}]")
    assert file.getvalue() == "".join(f"training {step}%: loss [{step}]\n" for step in (30, 60, 90))
    with progress.LoadingBar(Console(file=Terminal()), lines_s=30.0) as bar:
        clock[0] += 99
        bar("training", 0.1)
    assert "training 10%" not in file.getvalue()


def test_a_message_is_printed_above_the_bar_and_not_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with progress.LoadingBar(Console(stderr=True, force_terminal=True, width=60)) as bar:
        bar("loading", 0.5)
        show_error("no room")
    before, _, _ = screen.getvalue().partition("no room")
    line = before.rsplit("\x1b[2K", 1)[-1]  # what was written since a line was last erased
    assert "error: " in line
    assert "loading" not in line
