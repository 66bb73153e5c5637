"""Files and folders of a training: written whole or not at all, whatever moment the process is killed at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.errors import InvalidRequest

PART = ".part"


@contextmanager
def writable(folder: Path, option: str = "out") -> Iterator[None]:
    """Within it, a system that refuses to write there raises InvalidRequest."""
    try:
        yield
    except OSError as error:
        if isinstance(error, NotADirectoryError | FileExistsError):
            file = next((path for path in (folder, *folder.parents) if path.is_file()), error.filename or folder)
            raise InvalidRequest(option, f"{file} is no folder, where one is wanted: name another one.") from error
        problem = error.strerror or error
        raise InvalidRequest(option, f"{folder} cannot be written ({problem}): name another folder.") from error


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written beside its place, bring it to the disk, and let it take the place of what was there."""
    part = path.with_name(f".{path.name}{PART}")
    write(part)
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Have files written into an empty folder, and let each take its place in `folder`, in the order of their names."""
    part = folder / f".{folder.name}{PART}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write(part)
    for path in sorted(part.iterdir()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(path, folder / path.name)
    part.rmdir()
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
