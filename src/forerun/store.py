"""Store: atomic writes of files and folders, journals, and the folder of forerun's own files."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

PART = ".part"
logger = logging.getLogger(__name__)


def cache_folder(kind: str) -> Path:
    """The cache folder for one kind of file, such as "kernels"; it is not created.

    Raises OSError if the user has no home folder.
    """
    try:
        from platformdirs import user_cache_path

        base = user_cache_path("forerun", appauthor=False)
    except ImportError:  # the core also runs without it, with only the dependencies of torch and transformers
        base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "forerun")
    except RuntimeError:  # there is no home folder; earlier versions of platformdirs return a path that starts with "~"
        base = Path()
    if not base.is_absolute():
        raise OSError("no home folder is known: set XDG_CACHE_HOME to a folder of your own")
    return base / kind


def replace_file(path: Path, data: bytes | Iterable[bytes], like: Path | None = None) -> None:
    """Replace a file atomically, and sync it to disk; readable by this user alone, or with the mode of `like`."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:32]}.")
    try:
        with open(handle, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        if like is not None:
            shutil.copymode(like, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)  # an interrupt may come after the replacement
        raise


def keep_measured(file: Callable[[], Path], measured: object, what: str) -> None:
    """Save measured values as JSON in a cache file. If this fails, a warning says that `what` is measured again at
    every start."""
    try:
        path = file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps(measured, indent=0).encode())
    except OSError as error:
        logger.warning(
            "%s cannot be saved (%s), so every start measures them again, which takes seconds. Set XDG_CACHE_HOME to a "
            "folder that you can write to.",
            what,
            error,
        )


def read_measured(file: Callable[[], Path]) -> dict[str, Any]:
    """The values that `keep_measured` saved, whose form is not checked; none if the file is not a JSON object."""
    try:
        measured = parsed(file().read_bytes())
    except OSError:
        return {}
    return measured if isinstance(measured, dict) else {}


@contextmanager
def writable(folder: Path, option: str = "out") -> Iterator[None]:
    """Turns an OSError about writing to the folder into InvalidRequest."""
    try:
        yield
    except OSError as error:
        if isinstance(error, NotADirectoryError | FileExistsError):
            file = next((path for path in (folder, *folder.parents) if path.is_file()), error.filename or folder)
            raise InvalidRequest(option, f"{file} is not a folder: name another one.") from error
        problem = error.strerror or error
        raise InvalidRequest(option, f"{folder} cannot be written ({problem}): name another folder.") from error


def write_whole(path: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Replace a file atomically by a text, by bytes, or by what a function writes to a path, and sync it to disk.

    The file's mode stays. Only one process may write the file. A temporary file of a killed process is overwritten;
    if this raises, no temporary file is left.
    """
    part = path.with_name(f".{path.name}{PART}")
    try:
        if callable(content):
            content(part)
        else:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
        if path.exists():
            shutil.copymode(path, part)
        sync(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, with PyTorch's format as the default `metadata`. Raises OSError if that fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata or {"format": "pt"})
    except SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def save_json(values: Mapping[str, Any], path: Path) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(dict(values), indent=2) + "\n", encoding="utf-8")


def save_pickle(value: object, path: Path) -> None:
    """Write a file for torch.load. Raises OSError if that fails."""
    import torch

    with path.open("wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:  # torch cannot finish the file; the OSError with the reason is the context
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def part_of(folder: Path) -> str:
    """The name of the temporary folder of `whole_folder`."""
    return f".{folder.name}{PART}"


def names_in(folder: Path) -> list[str]:
    """The sorted names in a folder, except a temporary folder that a killed process left there."""
    return sorted(path.name for path in folder.iterdir() if path.name != part_of(folder))


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty temporary folder, which atomically becomes `folder` at the end of the block; removed if that raises.

    If `folder` exists, its files are replaced one by one, config.json, by which a model's folder is recognised, after
    the weights. Only one process may write the folder. A temporary folder of a killed process is removed first.
    """
    part = (folder if folder.is_dir() else folder.parent) / part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        files = sorted((path.relative_to(part) for path in part.rglob("*") if path.is_file()), reverse=True)
        mode = part.stat().st_mode & 0o666  # according to the umask; safetensors' files are for their owner only
        for file in files:
            (part / file).chmod(mode)
            sync(part / file)
        if folder.is_dir():
            for file in files:
                (folder / file).parent.mkdir(exist_ok=True)
                os.replace(part / file, folder / file)
        else:
            part.rename(folder)
        sync(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(slots=True)
class Journal:
    """A file of JSON lines, to which a run appends; only one process may write it.

    `entries` are the values of the lines, None for a damaged one. An incomplete last line is dropped.
    """

    path: Path
    entries: list[Any]

    @classmethod
    def read(cls, path: Path) -> Journal:
        """The journal in a file, which is not changed; an empty journal if there is no file. Raises OSError."""
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        while lines and not (lines[-1].endswith(b"\n") and parsed(lines[-1]) is not None):
            lines.pop()
        return cls(path, [parsed(line) for line in lines])

    def keep(self, count: int) -> None:
        """Truncate the journal after its first `count` entries. Raises OSError."""
        del self.entries[count:]
        with self.path.open("ab+") as file:
            file.seek(0)
            file.truncate(sum(map(len, file.read().splitlines(keepends=True)[:count])))

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append an entry, and sync it to disk. Raises OSError, without a change of the file."""
        line = json.dumps(entry).encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:
            size, left = file.tell(), line
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
        self.entries.append(json.loads(line))


def parsed(line: bytes) -> Any:
    """The value of a line; None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The values inside nested objects, by their keys joined with dots."""
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, inner in value.items() for k, v in flat(inner, f"{name}.{key}" if name else key).items()}
