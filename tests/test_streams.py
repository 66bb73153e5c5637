"""Where a standard stream cannot be written the program ends with one line, or none, and a status of its own."""

import errno
import io
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typing_extensions import override

from forerun import streams
from forerun.streams import FAULT, MISTAKE, READER_GONE, Guarded, guard_streams, show_warnings, warnings_held_back
from kit.checkpoints import SRC, TARGET
from kit.command import apart, command
from kit.servers import TEMPLATE


def forerun(line: str) -> subprocess.CompletedProcess[str]:
    """A shell line in which `forerun` is the real command."""
    env = os.environ | {"PYTHONPATH": str(SRC), "FORERUN": f"{sys.executable} -W error -m forerun"}
    shell = ["bash", "-c", line.replace("forerun", "$FORERUN")]
    return subprocess.run(shell, env=env, capture_output=True, text=True, check=False, timeout=600)


class Memory(io.TextIOWrapper):
    """A stream that can be read afterwards, or cannot be written at all."""

    def __init__(self, failure: int = 0) -> None:
        super().__init__(io.BytesIO(), "utf-8", write_through=True)
        self.failure = failure

    @override
    def write(self, text: str) -> int:
        if self.failure:
            raise OSError(self.failure, os.strerror(self.failure))
        return super().write(text)

    @property
    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()


@pytest.mark.parametrize("where", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("code", "status"), [(errno.EPIPE, READER_GONE), (errno.ENOSPC, MISTAKE), (errno.EIO, MISTAKE)]
)
def test_a_stream_that_cannot_be_written_ends_the_program(
    where: str, code: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Memory()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, where, Memory(code))
    guard_streams()
    with pytest.raises(SystemExit) as end:
        print("text", file=getattr(sys, where))
    assert end.value.code == status
    lines = 1 if where == "stdout" and status == MISTAKE else 0
    assert stream.text.count("\n") == lines
    print("more", file=getattr(sys, where), flush=True)  # goes nowhere, and does not fail again


def test_a_guarded_stream_is_the_stream_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Memory()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", None)  # a process may be started without one
    guard_streams()
    print("text", end="")
    assert isinstance(sys.stdout, Guarded)
    assert stream.text == "text"
    assert not sys.stdout.isatty()
    print("nowhere", file=sys.stderr)


def test_full_disks_and_readers_that_go_away_leave_no_traceback() -> None:
    full = forerun("forerun --version > /dev/full")
    assert full.returncode == MISTAKE
    assert full.stderr == "error: standard output cannot be written: No space left on device\n"
    gone = forerun("forerun --version | true; exit ${PIPESTATUS[0]}")
    assert gone.returncode in (0, READER_GONE)  # whichever of the two was faster
    assert gone.stderr == ""
    slow = forerun("forerun bench --help | (exec <&-; sleep 0.1); exit ${PIPESTATUS[0]}")
    assert (slow.returncode, slow.stderr) == (READER_GONE, "")
    closed = forerun("forerun --version >&-")
    assert closed.returncode == MISTAKE, "the answer is lost"
    assert closed.stderr == "error: standard output cannot be written: Bad file descriptor\n"
    silent = forerun("forerun --version 2>&-")
    assert (silent.returncode, silent.stdout) == (0, forerun("forerun --version").stdout)
    assert forerun("forerun --version >&- 2>&-").returncode == MISTAKE


@pytest.mark.short("generate")
@pytest.mark.parametrize("name", ["generate", "chat"])
def test_standard_input_that_is_closed_is_empty_and_one_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
    words = [name, "-m", str(tmp_path / "model"), *["-n", "2", "--seed", "1", "-"] * (name == "generate")]
    line, empty = " ".join(["forerun", *words]), command(*words, stdin="")
    closed = forerun(f"{line} <&-")
    assert (closed.returncode, closed.stdout) == (empty.exit_code, empty.stdout)
    unreadable = forerun(f"{line} 0> {tmp_path / 'file'}")
    assert unreadable.returncode == MISTAKE
    assert unreadable.stderr.endswith("error: standard input cannot be read: Bad file descriptor\n")


def test_a_fault_has_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 says that tokens differ, which a traceback must not say. In the program as it is started."""
    code = """
import sys
from forerun import cli
from forerun.__main__ import main

def fails(*_: object) -> None:
    print("so far", end="")
    1 / 0

cli.Program.invoke = fails
sys.argv = ["forerun", "demo"]
main()
"""
    run = apart("-c", code)
    assert run.returncode == FAULT
    assert run.stdout == "so far"
    assert "ZeroDivisionError" in run.stderr
    assert streams.FAULT not in (0, 1, 2)


def test_warnings_of_the_library_are_one_line_and_an_error_s_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("forerun")
    before = logger.handlers[:]
    try:
        show_warnings()
        logging.getLogger("forerun.models").warning("slow\nfor %d reasons", 2)
        logging.getLogger("forerun.models").info("nothing")
        try:
            raise IndexError("no such token")
        except IndexError as error:
            logging.getLogger("forerun.engine").warning("the drafter failed", exc_info=error)
    finally:
        logger.handlers[:] = before
    first, second, *trace = capsys.readouterr().err.splitlines()
    assert (first, second) == ("warning: slow for 2 reasons", "warning: the drafter failed")
    assert trace[0] == "Traceback (most recent call last):", "who writes a drafter has to see the error"
    assert trace[-1] == "IndexError: no such token"


def test_warnings_wait_for_the_end_of_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("forerun")
    before = logger.handlers[:]
    try:
        show_warnings()
        with warnings_held_back():
            logging.getLogger("forerun.engine").warning("slow")
            logging.getLogger("forerun.engine").info("nothing")
            assert capsys.readouterr().err == ""
        assert capsys.readouterr().err == "warning: slow\n"
        logging.getLogger("forerun.engine").warning("slower")
        assert capsys.readouterr().err == "warning: slower\n"
    finally:
        logger.handlers[:] = before
