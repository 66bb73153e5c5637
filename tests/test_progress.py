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


def test_a_long_description_leaves_room_for_bar_share_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, terminal = [100.0], Terminal()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with progress.LoadingBar(Console(file=terminal, width=80, force_terminal=True, color_system=None)) as report:
        for step in range(4):
            clock[0] += 100
            report(f"loading /{'folder/' * 20}[red]model.gguf", step / 4)
    assert "loading /folder" in terminal.getvalue()
    assert "/[red]model.gguf" in terminal.getvalue()
    assert "━" * 7 in terminal.getvalue()
    assert "75 % 0:01:40" in terminal.getvalue(), "the time left follows from the mean speed of the stage"


@pytest.mark.parametrize(
    ("shares", "drawn"),
    [
        ((0.5, 0.5), "50 % -:--:--"),
        ((0.5, 0.6), "60 % 0:00:40"),
        ((0.5, 0.6, 0.600001, 0.600002), "60 % 0:02:00"),
        ((0.0, 0.1, 0.9, 0.0, 0.5), "50 % 0:00:10"),
    ],
    ids=["resumed", "advancing", "slow", "again"],
)
def test_the_time_left_counts_only_the_work_of_this_run(
    shares: tuple[float, ...], drawn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, terminal = [100.0], Terminal()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with progress.LoadingBar(Console(file=terminal, width=80, force_terminal=True, color_system=None)) as report:
        for done in shares:
            clock[0] += 10
            report("work", done)
    assert drawn in terminal.getvalue()


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


def test_long_work_writes_a_line_for_each_stage_and_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = [100.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    bar = progress.LoadingBar(Console(file=file, width=20), lines=True)
    for second in range(1, 101):
        clock[0] += 1
        if second != 50:  # a stage between two lines has none
            bar("training" if second < 90 else "measuring", second / 100, f"loss [{second}] of a long text")
        else:
            bar("saving", 0.0)
        if second % 5 == 0 and second != 50:
            bar.print_line()
    expected = [f"training {second}%: loss [{second}] of a long text\n" for second in (5, 35, 65)]
    assert file.getvalue() == "".join([*expected, "measuring 90%: loss [90] of a long text\n"])


def test_stages_that_alternate_have_a_line_each_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = [100.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    bar = progress.LoadingBar(Console(file=file), lines=True)
    for step in range(12):
        clock[0] += 5
        bar(("generating", "training")[step % 2], step / 12)
        bar.print_line()
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["generating", "training"] * 2


def test_lines_are_written_while_a_stage_reports_nothing_and_end_with_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "STAGE_S", 0.001)
    lines, terminal = io.StringIO(), Terminal()
    with (
        progress.LoadingBar(Console(file=lines), lines=True) as bar,
        progress.LoadingBar(Console(file=terminal), lines=True),
    ):
        for stage in ("loading", "measuring"):
            bar(stage, 0.5)
            deadline = time.monotonic() + 60
            while stage not in lines.getvalue() and time.monotonic() < deadline:
                time.sleep(0.001)
        bar("loading", 1.0)
    written = lines.getvalue()
    assert written.startswith("loading 50%\nmeasuring 50%\n")
    bar("measuring", 1.0)
    time.sleep(0.02)
    assert (lines.getvalue(), terminal.getvalue()) == (written, "")


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
