"""What commands share: handling of Ctrl-C, values of options, and output files.

Output files are checked before any work is done, and written completely or not at all.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.options import INTERRUPTED, OutputOptions
from forerun.store import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType

Number = TypeVar("Number", int, float)
SvgSource = Callable[[], str]  # returns an SVG


@contextmanager
def importing() -> Iterator[None]:
    """Context for slow imports: Ctrl-C ends the process at once; afterwards, Ctrl-C raises KeyboardInterrupt.

    An interrupted import has nothing to save, and its traceback would be long.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def patient_interrupt() -> Iterator[Event]:
    """Context in which the first Ctrl-C is only recorded, so that a round completes; a second one raises."""
    interrupt = Event()
    before = signal.getsignal(signal.SIGINT)

    def record(*_: object) -> None:
        interrupt.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, record)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def numbers(name: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Parse numbers separated by commas. Raises InvalidRequest naming the option."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(name, f"{text!r} must be numbers separated by commas, such as 0,1.") from None


def object_value(name: str, text: str, example: str) -> dict[str, Any]:
    """Parse the JSON object of an option. Raises InvalidRequest."""
    try:
        value = loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(name, f"{shown(text)} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise InvalidRequest(name, f"{shown(text)} is not an object such as {example}.")
    return value


@dataclass(frozen=True, slots=True)
class Destination:
    """An output file of an option. Creating the object checks that the file can be written (InvalidRequest)."""

    option: str
    path: Path
    suffix: str = ""  # that the name must have

    def __post_init__(self) -> None:
        try:
            self._check(self._file.parent)
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            reason = getattr(error, "strerror", None) or error
            problem = f"{self.path} cannot be used ({reason}): name another file."
            raise InvalidRequest(self.option, problem) from error

    def _check(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InvalidRequest(self.option, f"the folder {folder} does not exist: create it, or name another file.")
        if self.path.is_dir():
            raise InvalidRequest(self.option, f"{self.path} is a folder: name a file in it.")
        if self.path.exists() and not os.access(self.path, os.W_OK):
            raise InvalidRequest(self.option, f"{self.path} is not writable: name another file.")
        if self._replaced and not os.access(folder, os.W_OK):
            raise InvalidRequest(self.option, f"the folder {folder} is not writable: name another file.")
        if self.path.suffix != (self.suffix or self.path.suffix):
            raise InvalidRequest(self.option, f"{self.path} must be a {self.suffix} file.")

    @classmethod
    def if_given(cls, option: str, path: Path | None, suffix: str = "") -> Destination | None:
        """The file of an option; None without the option."""
        return None if path is None else cls(option, path, suffix)

    @property
    def _file(self) -> Path:
        """The file with links resolved."""
        return self.path.resolve()

    @property
    def _replaced(self) -> bool:
        """Whether the file is replaced atomically; devices and pipes are written to directly."""
        return self.path.is_file() or not self.path.exists()

    def write(self, content: str | bytes) -> None:
        """Write the file. If that fails, its old content remains, and InvalidRequest is raised."""
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
    """The output of a command: cards for people or one JSON object; a JSON file and a picture if requested."""

    as_json: bool
    file: Destination | None = None
    picture: Destination | None = None

    @classmethod
    def of(cls, options: OutputOptions, picture: Path | None = None, option: str = "picture") -> Result:
        """Create it from the options; `option` names the picture. Raises InvalidRequest for an unusable file."""
        if_given = Destination.if_given
        return cls(options.as_json, if_given("output", options.output), if_given(option, picture, ".svg"))

    def write(
        self, values: Mapping[str, Any], *cards: RenderableType, drawing: SvgSource = str, no_color: bool | None = None
    ) -> None:
        """Print the cards or, with --json, the values as one line of JSON; write that line and the drawing to files."""
        line = dumps(values) + "\n"
        if self.as_json:
            typer.echo(line, nl=False)
        elif cards:
            from rich.console import Console

            console = Console(no_color=no_color, highlight=False)
            for card in cards:
                console.print(card)
        if self.file is not None:
            self.file.write(line)
        if self.picture is not None:
            self.picture.write(drawing())
