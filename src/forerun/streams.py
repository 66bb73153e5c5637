"""The standard streams: what is written to which, and how the program ends when one of them cannot be written.

Standard output carries only the answer; errors, cards beside an answer, and bars go to standard error. If the reader of
standard output goes away (`| head -1`), the program ends without a message, like other programs; if a disk is full, it
ends with one line. A server goes on instead, whatever becomes of its standard error.
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

MISTAKE = 2
FAULT = 3
READER_GONE = 141  # what a shell reports of a program that a closed pipe has killed: 128 + SIGPIPE
MOST_PENDING = 1 << 12  # texts that nobody has taken yet
PATIENCE_S = 1.0  # at the end, for a reader that is slow


def show_error(error: object) -> None:
    """Print one line on standard error: what is wrong and what to do."""
    _show_line("error", "red", error)


def _show_line(kind: str, colour: str, message: object) -> None:
    from rich.console import Console
    from rich.text import Text

    line = " ".join(str(message).split())
    Console(stderr=True, soft_wrap=True).print(Text(f"{kind}: ", f"bold {colour}"), Text(line, colour), sep="")


class WarningLines(logging.Handler):
    """Shows what the library warns of, each on one line on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one warning."""
        _show_line("warning", "yellow", record.getMessage())


def show_warnings() -> None:
    """Show what the library warns of in the form of the command line's other messages, from here on."""
    logging.getLogger("forerun").addHandler(WarningLines(logging.WARNING))


@contextmanager
def warnings_held_back() -> Iterator[None]:
    """Within it warnings wait for its end, so that none is shown in the middle of a text that is streamed."""
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
            handler.close()  # shows what waits


def show_note(text: str) -> None:
    """Print one line on standard error that is not an error."""
    print(text, file=sys.stderr)


def end_at_faults() -> None:
    """Give an error that nothing was prepared for a status of its own, since 1 says that tokens differ."""

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAULT)

    sys.excepthook = end


def guard_streams() -> None:
    """Make writing to the standard streams end the program in an orderly way where it fails, from here on."""
    for number in range(3):  # a socket in the place of a closed stream would get what libraries write there
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Nowhere()  # a process may be started without
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
        setattr(sys, name, Guarded(stream))


class Nowhere(io.TextIOBase):
    """A text stream whose text is dropped."""

    def write(self, text: str) -> int:
        """Take the text as written."""
        return len(text)


class Guarded:
    """A text stream whose failures to write raise SystemExit with the status that the program shall end with."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text to the stream; how many characters that were."""
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        """Hand over what the stream holds back."""
        try:
            self._stream.flush()
        except OSError as error:
            self._end(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _end(self, error: OSError) -> NoReturn:
        """Drop what cannot be written, say so where that can be read, and exit."""
        broken, self._stream = self._stream, Nowhere()
        with suppress(OSError, ValueError):  # what is left in its buffer is written once more when it is closed
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
    """Within it nobody who writes to standard error waits or fails, whatever becomes of the text."""
    before = sys.stderr
    try:
        number = before.fileno()
    except (OSError, ValueError):  # it is in memory, or nowhere
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
    """A text stream that a thread of its own writes to a file descriptor.

    A reader that is slow, or has stopped, holds nobody up: of what it has not taken MOST_PENDING texts are kept. What
    is written beyond that, and what the system refuses, is dropped; later text is tried again.
    """

    encoding = "utf-8"

    def __init__(self, number: int, encoding: str | None) -> None:
        self.number = number
        self.encoding = encoding or "utf-8"
        self.pending: Queue[bytes | None] = Queue(MOST_PENDING)
        self.thread = threading.Thread(target=self.run, name="forerun-stderr", daemon=True)
        self.thread.start()

    def write(self, text: str) -> int:
        """Take the text."""
        with suppress(Full):
            if not self.closed:
                self.pending.put_nowait(text.encode(self.encoding, "replace"))
        return len(text)

    def fileno(self) -> int:
        """The descriptor."""
        return self.number

    def isatty(self) -> bool:
        """Whether a person may be looking."""
        return os.isatty(self.number)

    def close(self) -> None:
        """Write what is left, as far as it is taken soon, and take nothing any more."""
        super().close()
        with suppress(Full):  # nobody reads
            self.pending.put(None, timeout=PATIENCE_S)
            self.thread.join(PATIENCE_S)

    def run(self) -> None:
        """Write until it is closed."""
        for data in iter(self.pending.get, None):
            left = memoryview(data)
            with suppress(OSError):
                while left:
                    left = left[os.write(self.number, left) :]
