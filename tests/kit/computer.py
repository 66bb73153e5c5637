"""A machine whose compiler, cache folder and processor a test chooses."""

import _ctypes
import logging
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from forerun.kernels import library
from forerun.kernels.library import LibraryStore


@dataclass(frozen=True)
class Computer:
    """A machine with a fake compiler that copies `library` to its output file and counts its calls."""

    folder: Path
    library: Path
    real_compiler: str

    @property
    def num_compiled(self) -> int:
        return (self.folder / "calls").read_text().count("compile") if (self.folder / "calls").exists() else 0

    @property
    def last_arguments(self) -> list[str]:
        """The arguments of the compiler's last call."""
        return (self.folder / "arguments").read_text().splitlines()[-1].split()

    @property
    def cache_folder(self) -> Path:
        """The folder in which compiled libraries are cached."""
        return self.folder / "cache" / "forerun" / "kernels"

    def file(self, suffix: str) -> Path:
        """The only file in the cache folder with this ending."""
        (file,) = self.cache_folder.glob(f"*{suffix}")
        return file

    def store(self) -> LibraryStore:
        """The store of the library there."""
        return LibraryStore.open(self.cache_folder, self.file(".so").stem)


def forget() -> None:
    """Clear the process's memory of the library, so that the next call searches as in a new process."""
    library.process_library.cache_clear()
    library.warn_of_torch.cache_clear()


def restart() -> None:
    """`forget`, and close the library: the system would not read the file of an open one again."""
    if (found := library.process_library().found) is not None:
        _ctypes.dlclose(found._handle)
    forget()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def shared_library(command: str, path: Path, source: str) -> Path:
    """A shared library, compiled from `source` with the real compiler."""
    call = [command, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(call, input=source, text=True, check=True)
    return path


def library_works() -> bool:
    answer: int = library.library().answer()
    return answer == 42


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of forerun's warnings in the log."""
    records = (record for record in caplog.records if record.name.startswith("forerun"))
    return [record.getMessage() for record in records if record.levelno == logging.WARNING]
