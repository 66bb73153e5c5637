"""The standard streams: what is written to which, and how the program ends when one of them cannot be written.

Standard output gets only the answer; errors, cards and bars go to standard error. If the reader of standard output ends
(`| head -1`), the program ends without a message, like other programs; if a disk is full, it ends with one line. A
server continues instead, even if its standard error cannot be written.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from queue import Full, Queue
from types import TracebackType
from typing import Any, NoReturn, cast

from forerun.errors import DrafterFileError

MISTAKE = 2
FAULT = 3
READER_GONE = 141  # the status of a program that was killed by a closed pipe: 128 + SIGPIPE
MOST_PENDING = 1 << 12  # texts that wait to be written
PATIENCE_S = 1.0  # waiting time for a slow reader at the end


def show_error(error: object) -> None:
    """Print one line on standard error: what is wrong and what to do. A traceback of the user's code is above it."""
    sys.stderr.write(error.trace if isinstance(error, DrafterFileError) else "")
    _show_line("error", "red", error)


def _show_line(kind: str, colour: str, message: object) -> None:
    from rich.console import Console
    from rich.text import Text

    line, console = " ".join(str(message).split()), Console(stderr=True, soft_wrap=True)
    with console.capture() as captured:
        console.print(Text(f"{kind}: ", f"bold {colour}"), Text(line, colour), sep="")
    sys.stderr.write(captured.get())  # a progress bar replaces this stream, and prints the line above itself
    sys.stderr.flush()


class WarningLines(logging.Handler):
    """Shows each warning of the library as one line on standard error; below it the traceback, if it has one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one warning."""
        _show_line("warning", "yellow", record.getMessage())
        if record.exc_info:
            print(logging.Formatter().formatException(record.exc_info), file=sys.stderr)


def show_warnings() -> None:
    """Show the library's warnings in the form of the command line's other messages, from now on."""
    logging.getLogger("forerun").addHandler(WarningLines(logging.WARNING))


@contextmanager
def warnings_held_back() -> Iterator[None]:
    """Holds warnings back until the end of the block, so that none is shown in the middle of a streamed text."""
    logger = logging.getLogger("forerun")
    before = logger.handlers
    waiting = [MemoryHandler(MOST_PENDING, logging.CRITICAL + 1, handler) for handler in before]
    for handler, shown in zip(waiting, before, strict=True):
        handler.setLevel(shown.level)
    logger.handlers = [*waiting]
    try:
        yield
    finally:
        logger.handlers = before
        for handler in waiting:
            handler.close()  # shows the warnings


def show_note(text: str) -> None:
    """Print one line on standard error that is not an error."""
    print(text, file=sys.stderr)


def end_at_faults() -> None:
    """End the program with status FAULT after an unexpected error, since status 1 means that tokens differ."""

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAULT)

    sys.excepthook = end


def guard_streams() -> None:
    """From now on, end the program in an orderly way if writing to a standard stream fails."""
    for number in range(3):  # else the next socket may get the number of a closed stream, and its output
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = io.StringIO()  # a closed stream reads as an empty one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or (Closed() if name == "stdout" else Nowhere())  # the process has no such stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # writes "?" for a character that the terminal's encoding lacks
        setattr(sys, name, Guarded(stream))


@contextmanager
def reading_input() -> Iterator[None]:
    """Within the block, end the program with one line if standard input cannot be read."""
    try:
        yield
    except OSError as error:
        show_error(f"standard input cannot be read: {error.strerror}")
        raise SystemExit(MISTAKE) from None


class Nowhere(io.TextIOBase):
    """A text stream that discards its text."""

    def write(self, text: str) -> int:
        return len(text)


class Closed(Nowhere):
    """A text stream that cannot be written."""

    def write(self, text: str) -> int:
        """Raise the system's error for a file that is not open."""
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


class Guarded:
    """A text stream that raises SystemExit, with the right status, if it cannot be written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text to the stream; returns the number of characters."""
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        """Write the stream's buffer."""
        try:
            self._stream.flush()
        except OSError as error:
            self._end(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _end(self, error: OSError) -> NoReturn:
        """Discard further text, print an error if standard error works, and exit."""
        broken, self._stream = self._stream, Nowhere()
        with suppress(OSError, ValueError):  # its buffer is written again when it is closed: let that go to devnull
            number, nowhere = broken.fileno(), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
        if error.errno == errno.EPIPE:
            raise SystemExit(READER_GONE) from None
        if sys.stdout is cast(Any, self):
            show_error(f"standard output cannot be written: {error.strerror}")
        raise SystemExit(MISTAKE) from None


@contextmanager
def unfailing_stderr() -> Iterator[None]:
    """Within the block, writing to standard error never waits and never fails; text may be dropped."""
    before = sys.stderr
    try:
        number = before.fileno()
    except (OSError, ValueError):  # it is in memory, or closed
        yield
        return
    stream = BackgroundStream(number, before.encoding)
    sys.stderr = stream
    try:
        yield
    finally:
        sys.stderr = before
        stream.close()


class BackgroundStream(io.TextIOBase):
    """A text stream whose own thread writes to a file descriptor, so that writing never waits for a slow reader.

    Up to MOST_PENDING texts wait to be written. Further text, and text that cannot be written, is dropped; later text
    is tried again.
    """

    encoding = "utf-8"

    def __init__(self, number: int, encoding: str | None) -> None:
        self.number = number
        self.encoding = encoding or "utf-8"
        self.pending: Queue[bytes | None] = Queue(MOST_PENDING)
        self.thread = threading.Thread(target=self.run, name="forerun-stderr", daemon=True)
        self.thread.start()

    def write(self, text: str) -> int:
        """Queue the text; drop it if the queue is full."""
        with suppress(Full):
            if not self.closed:
                self.pending.put_nowait(text.encode(self.encoding, "replace"))
        return len(text)

    def fileno(self) -> int:
        """The file descriptor."""
        return self.number

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return os.isatty(self.number)

    def close(self) -> None:
        """Accept no more text, and write the queued text, waiting at most PATIENCE_S for the reader."""
        super().close()
        with suppress(Full):  # nobody reads
            self.pending.put(None, timeout=PATIENCE_S)
            self.thread.join(PATIENCE_S)

    def run(self) -> None:
        """The thread: write queued text until the stream is closed."""
        for data in iter(self.pending.get, None):
            left = memoryview(data)
            with suppress(OSError):
                while left:
                    left = left[os.write(self.number, left) :]
