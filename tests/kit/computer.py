"""A machine whose compiler, cache folder and processor are those that a test gives it."""

import _ctypes
import logging
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from forerun.kernels import library


@dataclass(frozen=True)
class Computer:
    """A machine with a compiler of our own, that copies `library` where it is asked to and counts its calls."""

    folder: Path
    library: Path
    real_compiler: str

    @property
    def num_compiled(self) -> int:
        return (self.folder / "calls").read_text().count("compile") if (self.folder / "calls").exists() else 0

    @property
    def last_arguments(self) -> list[str]:
        """What the compiler was given last."""
        return (self.folder / "arguments").read_text().splitlines()[-1].split()

    @property
    def kept(self) -> Path:
        """Where the library is kept."""
        return self.folder / "cache" / "forerun" / "kernels"

    def file(self, suffix: str) -> Path:
        """The one file there with this ending."""
        (found,) = self.kept.glob(f"*{suffix}")
        return found

    def store(self) -> library.LibraryStore:
        """The store of the library there."""
        return library.LibraryStore.open(self.kept, self.file(".so").stem)


def forget() -> None:
    """The next call finds nothing known, as in a new process."""
    library.process_library.cache_clear()
    library.warn_of_torch.cache_clear()


def restart() -> None:
    """The same, and the library is closed: the system would not look at the file of an open one again."""
    if (found := library.process_library().found) is not None:
        _ctypes.dlclose(found._handle)
    forget()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def shared_library(command: str, path: Path, source: str) -> Path:
    """A real one."""
    call = [command, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(call, input=source, text=True, check=True)
    return path


def works() -> bool:
    found: int = library.library().answer()
    return found == 42


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the package said to its users."""
    own = (record for record in caplog.records if record.name.startswith("forerun"))
    return [record.getMessage() for record in own if record.levelno == logging.WARNING]
