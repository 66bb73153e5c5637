"""What every command runs with: the effect of Ctrl-C, and the files that it writes.

Files are checked before any work is done, and written whole or not at all.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forerun.errors import InvalidRequest
from forerun.options import INTERRUPTED, OutputOptions
from forerun.store import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType


@contextmanager
def importing() -> Iterator[None]:
    """Within it, Ctrl-C ends the process at once and without a word; behind it, Ctrl-C is a KeyboardInterrupt.

    An interrupted import has nothing to save, and its traceback would fill the screen.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(slots=True)
class Interrupt:
    """Whether Ctrl-C was pressed."""

    asked: bool = False


@contextmanager
def patient_interrupt() -> Iterator[Interrupt]:
    """Within it the first Ctrl-C is only noted, so that a round is never torn; a second one acts at once."""
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        interrupt.asked = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class Destination:
    """A file that an option names and that is written when the work is done. Making one checks that it can be."""

    option: str
    path: Path

    def __post_init__(self) -> None:
        folder = self._file.parent
        if not folder.is_dir():
            raise InvalidRequest(self.option, f"the folder {folder} is not there: make it, or name another file.")
        if self.path.is_dir():
            raise InvalidRequest(self.option, f"{self.path} is a folder: name a file in it.")
        if self.path.exists() and not os.access(self.path, os.W_OK):
            raise InvalidRequest(self.option, f"{self.path} may not be written: name another file.")
        if self._replaced and not os.access(folder, os.W_OK):
            raise InvalidRequest(self.option, f"the folder {folder} may not be written: name another file.")

    @classmethod
    def of_picture(cls, path: Path | None) -> Destination | None:
        """That of a picture, if one is asked for. Raises InvalidRequest for a file of another kind."""
        picture = None if path is None else cls("picture", path)
        if path is not None and path.suffix != ".svg":
            raise InvalidRequest("picture", f"{path} must be a .svg file.")
        return picture

    @property
    def _file(self) -> Path:
        """The file itself, behind any links to it."""
        return self.path.resolve()

    @property
    def _replaced(self) -> bool:
        """Whether the file is replaced as a whole; a device or a pipe is written to."""
        return self.path.is_file() or not self.path.exists()

    def write(self, content: str | bytes) -> None:
        """Write the file. Where that fails, what was there before is there still, and InvalidRequest is raised."""
        try:
            if self._replaced:
                write_whole(self._file, content)
            else:
                self.path.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            problem = f"{self.path} cannot be written ({error.strerror}): name another file."
            raise InvalidRequest(self.option, problem) from error


@dataclass(frozen=True, slots=True)
class Result:
    """Where what a command found goes: to people, as cards, or as one JSON object; and as that into a file, if any."""

    as_json: bool
    file: Destination | None

    @classmethod
    def of(cls, options: OutputOptions) -> Result:
        """What the options ask for. Raises InvalidRequest for a file that cannot be written."""
        return cls(options.as_json, None if options.output is None else Destination("output", options.output))

    def tell(self, told: Mapping[str, Any], *cards: RenderableType, no_color: bool | None = None) -> None:
        """Print the cards, or the object on one line instead; write that line into the file."""
        line = dumps(told) + "\n"
        if self.as_json:
            typer.echo(line, nl=False)
        elif cards:
            from rich.console import Console

            console = Console(no_color=no_color, highlight=False)
            for card in cards:
                console.print(card)
        if self.file is not None:
            self.file.write(line)
