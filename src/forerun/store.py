"""Store: files and folders that are written whole or not at all, and where forerun keeps files of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.errors import InvalidRequest

PART = ".part"


def cache_folder(kind: str) -> Path:
    """The folder for one kind of file, such as "kernels"; nothing is made there.

    Raises OSError where the user has no home folder.
    """
    try:
        from platformdirs import user_cache_path

        base = user_cache_path("forerun", appauthor=False)
    except ImportError:  # the core also runs with what torch and transformers install, which does not include it
        base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "forerun")
    except RuntimeError:  # platformdirs knows of no home; earlier versions give a path that begins with "~"
        base = Path()
    if not base.is_absolute():
        raise OSError("no home folder is known: set XDG_CACHE_HOME to a folder of your own")
    return base / kind


def replace_file(path: Path, data: bytes | Iterable[bytes], like: Path | None = None) -> None:
    """Put a file in its place, whole and on disk; readable by this user alone, or by whom `like` is."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        if like is not None:
            shutil.copymode(like, name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


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
