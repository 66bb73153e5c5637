"""The library of compiled kernels in this process: from the wheel, from the user's cache folder, or newly compiled.

A wheel contains libraries for several processors, next to this file. Without one for this processor, and in a source
checkout, the kernels are compiled at first use and stored in the user's cache folder.

A library runs with all rights of the user who loads it, and a truncated one kills the process when a missing page is
accessed. So a file in the cache is loaded only if it and its folders belong to this user, nobody else may write to
them, and its bytes have the stored digest; otherwise it is compiled again. If the cache folder cannot be used, a folder
of the user in the system's folder for temporary files takes its place, under the same rules; if that cannot be used
either, every process compiles into its own temporary folder. Both are said in a warning.
"""

from __future__ import annotations

import ctypes
import logging
import os
import stat
import tempfile
import threading
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from forerun.annotations import ProgressCallback
from forerun.kernels.build import TIMEOUT_S, NoKernels, compile_to, compiler, library_name
from forerun.kernels.variants import loadable
from forerun.store import cache_folder, replace_file

WHEEL = Path(__file__).parent / "lib"
HAS_OWNERS = hasattr(os, "geteuid")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

logger = logging.getLogger(__name__)


class Library:
    """The kernels of one process. All calls have the result of the first one, a library or an error."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.found: ctypes.CDLL | None = None
        self.missing: str | None = None

    def get(self, progress: ProgressCallback | None) -> ctypes.CDLL:
        """The library. Raises NoKernels."""
        with self.lock:
            if self.found is None and self.missing is None:
                try:
                    self.found = find_or_compile(progress)
                except NoKernels as error:
                    self.missing = str(error)
        if self.found is None:
            raise NoKernels(self.missing)
        return self.found


@cache
def process_library() -> Library:
    """The Library of this process."""
    return Library()


def library(progress: ProgressCallback | None = None) -> ctypes.CDLL:
    """The compiled kernels, compiled if needed. Raises NoKernels, or DeviceUnavailable for an invalid FORERUN_ISA."""
    return process_library().get(progress)


@cache
def warn_of_torch(reason: str) -> None:
    """Warn, once for each reason, that torch's operators are used instead of the kernels."""
    logger.warning(
        "No compiled kernels: %s. torch's operators are used instead: a token takes two to four times as long, and the "
        "fingerprint is another. To use them without this warning, set --kernels torch (kernels='torch').",
        reason,
    )


def from_wheel() -> ctypes.CDLL | None:
    """The wheel's library for this processor, or for FORERUN_ISA; None if there is none.

    The libraries are not linked to an OpenMP runtime, because its file has another name in every build of torch. They
    use torch's runtime, whose functions are global once torch is imported, so both share one pool of threads.
    """
    for path in (WHEEL / f"{variant.name}.so" for variant in loadable()):
        if path.exists():
            import torch  # noqa: F401

            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                logger.warning("%s cannot be loaded (%s): compiling the kernels instead.", path, error)
                return None
    return None


def find_or_compile(progress: ProgressCallback | None) -> ctypes.CDLL:
    """Load the wheel's library, else the stored one, else compile and store it. Raises NoKernels."""
    if (lib := from_wheel()) is not None:
        return lib
    command = compiler()
    name = library_name(command)
    for place in (kernels_folder, substitute_folder):
        with suppress(OSError):  # `compile_and_load` tries again, and reports it
            if place().is_dir() and (lib := LibraryStore.open(place(), name).load()) is not None:
                return lib
    if progress is not None:
        progress("compiling kernels, once on this machine", 0.0)
    try:
        with tempfile.TemporaryDirectory(prefix="forerun-", ignore_cleanup_errors=True) as folder:
            return compile_and_load(name, command, Path(folder) / f"{name}.so")
    except OSError as error:
        raise NoKernels(
            f"the compiled library cannot be loaded ({error}): set TMPDIR to a folder where programs may run"
        ) from error


def compile_and_load(name: str, command: str, path: Path) -> ctypes.CDLL:
    """Compile to `path`, and load a stored copy; with a warning, `path` itself if it cannot be stored."""
    try:
        return stored(kernels_folder(), name, command, path)
    except OSError as error:
        problem = error
    try:
        folder = substitute_folder()
        lib, instead = stored(folder, name, command, path), f"They are in {folder} until the system empties that folder"
    except OSError:
        if not path.exists():
            compile_to(path, command)
        lib, instead = ctypes.CDLL(str(path)), "So every start compiles them again, which can take a minute or two"
    logger.warning(
        "The compiled kernels cannot be stored in the cache folder (%s). %s: set XDG_CACHE_HOME to a folder of your "
        "own that you can write to.",
        problem,
        instead,
    )
    return lib


def stored(folder: Path, name: str, command: str, path: Path) -> ctypes.CDLL:
    """The library in this folder, else compiled to `path`, if it is not there yet, and stored. Raises OSError."""
    store = LibraryStore.open(folder, name)
    with FileLock(store.folder / f"{name}.lock", timeout=TIMEOUT_S):
        if (lib := store.load()) is not None:  # another process compiled it while this one waited
            return lib
        if os.path.lexists(store.path):
            logger.warning("%s is damaged, or another user may write to it: compiling it again.", store.path)
        if not path.exists():
            compile_to(path, command)
        store.keep(path.read_bytes())
        return ctypes.CDLL(str(store.path))


def kernels_folder() -> Path:
    """The folder of libraries in the user's cache folder. Raises OSError if there is no home folder."""
    return cache_folder("kernels")


def substitute_folder() -> Path:
    """This user's folder of libraries in the system's folder for temporary files.

    Raises PermissionError if other users could put another folder in its place.
    """
    temporary = Path(tempfile.gettempdir())
    about = temporary.stat()
    if not HAS_OWNERS or about.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{temporary} belongs to another user")
    if others_may_write(about) and not about.st_mode & stat.S_ISVTX:
        raise PermissionError(f"other users may replace folders in {temporary}")
    return temporary / f"forerun-{os.geteuid()}" / "kernels"


class LibraryStore:
    """Stores one library and its digest, in a folder to which only this user may write."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.path = folder / f"{name}.so"
        self.digest = folder / f"{name}.sha256"

    @classmethod
    def open(cls, folder: Path, name: str) -> LibraryStore:
        """The store in this folder, which is created with its parent. Raises OSError if that is not possible."""
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (belongs_to_user(each.lstat()) and belongs_to_user(each.stat())):
                raise PermissionError(f"{each} belongs to another user")
            if others_may_write(each.stat()):  # the files in it are checked one by one
                each.chmod(stat.S_IMODE(each.stat().st_mode) & ~OTHERS_WRITE)
        return cls(folder, name)

    def load(self) -> ctypes.CDLL | None:
        """The stored library; None if there is none or it fails a check."""
        data, digest = trusted_bytes(self.path), trusted_bytes(self.digest)
        if data is not None and digest == digest_of(data):
            with suppress(OSError):
                return ctypes.CDLL(str(self.path))
        return None

    def keep(self, data: bytes) -> None:
        """Write a library and its digest. If the process dies in between, `load` rejects the files."""
        replace_file(self.path, data)
        replace_file(self.digest, digest_of(data))


def digest_of(data: bytes) -> bytes:
    """The SHA-256 of a library, in hex."""
    return sha256(data).hexdigest().encode()


def belongs_to_user(about: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user; True on Windows, which protects the folder itself."""
    return not HAS_OWNERS or about.st_uid == os.geteuid()


def others_may_write(about: os.stat_result) -> bool:
    """Whether any other user may write to a file or folder."""
    return HAS_OWNERS and bool(about.st_mode & OTHERS_WRITE)


def trusted_bytes(path: Path) -> bytes | None:
    """The bytes of a file of this user; None if it is missing or other users may write to it."""
    try:
        about = path.lstat()
        trusted = stat.S_ISREG(about.st_mode) and belongs_to_user(about) and not others_may_write(about)
        return path.read_bytes() if trusted else None
    except OSError:
        return None
