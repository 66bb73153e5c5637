"""Files that commands write: checked before any work is done, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

import typer

from forerun.errors import InvalidRequest
from forerun.options import OutputOptions
from forerun.store import write_whole


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
    """Where a command's JSON object goes: to standard output, to a file, to both, or nowhere."""

    as_json: bool
    file: Destination | None

    @classmethod
    def of(cls, options: OutputOptions) -> Result:
        """What the options ask for. Raises InvalidRequest for a file that cannot be written."""
        return cls(options.as_json, None if options.output is None else Destination("output", options.output))

    def tell(self, told: Mapping[str, Any]) -> None:
        """Write the object, on one line, to where it is wanted."""
        line = dumps(told) + "\n"
        if self.as_json:
            typer.echo(line, nl=False)
        if self.file is not None:
            self.file.write(line)
