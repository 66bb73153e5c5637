"""Store: files and folders that are written whole or not at all, journals, and where forerun keeps files of its own."""

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


def keep_measured(file: Callable[[], Path], measured: object, what: str) -> None:
    """Replace a file of forerun's own by these values as JSON, whole; where that is not possible, the log says that
    `what` is measured again at every start."""
    try:
        path = file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps(measured, indent=0).encode())
    except OSError as error:
        logger.warning(
            "%s cannot be kept (%s), so every start measures them again, which takes seconds. Set XDG_CACHE_HOME to a "
            "folder of your own that you can write to.",
            what,
            error,
        )


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


def write_whole(path: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Let a text, bytes, or what a function writes to the path that it gets, take a file's place, whole and on disk.

    Who may read the file before may read it afterwards. Only one process may write it. What a killed one left beside it
    is written over; nothing is left where this raises.
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
    """Write a safetensors file, of PyTorch's format unless `metadata` says otherwise. Raises OSError where the system
    refuses it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata or {"format": "pt"})
    except SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def save_pickle(value: object, path: Path) -> None:
    """Write a file that torch.load reads. Raises OSError where the system refuses it."""
    import torch

    with path.open("wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:  # of a file that cannot be ended, while an OSError tells why is on its way
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def part_of(folder: Path) -> str:
    """The name of what is written before it has its place in a folder."""
    return f".{folder.name}{PART}"


def names_in(folder: Path) -> list[str]:
    """What a folder holds, in order, but for what a killed process left of `whole_folder`."""
    return sorted(path.name for path in folder.iterdir() if path.name != part_of(folder))


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder, which becomes `folder` at the end of the block, whole and on disk; nothing is left of it where
    the block raises.

    Where `folder` is there already, each file takes its place in it, config.json, by which a folder is recognised,
    behind the weights. Only one process may write the folder. What a killed one left is removed first.
    """
    part = (folder if folder.is_dir() else folder.parent) / part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        files = sorted((path.relative_to(part) for path in part.rglob("*") if path.is_file()), reverse=True)
        mode = part.stat().st_mode & 0o666  # by the umask; safetensors leaves its files to their owner alone
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
    """Bring a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(slots=True)
class Journal:
    """JSON lines in a file, from which a run that was stopped goes on; only this process writes it.

    `entries` are those of the lines, None for a damaged one. A last line that a kill cut off is not among them.
    """

    path: Path
    entries: list[Any]

    @classmethod
    def read(cls, path: Path) -> Journal:
        """What a file holds, which stays as it is; an empty journal where there is none. Raises OSError."""
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        while lines and not (lines[-1].endswith(b"\n") and parsed(lines[-1]) is not None):
            lines.pop()
        return cls(path, [parsed(line) for line in lines])

    @classmethod
    def of_run(cls, path: Path, head: Mapping[str, Any], what: str, option: str, place: str, fresh: bool) -> Journal:
        """The journal of one run, whose first entry is `head`, ready to go on; with `fresh` it is begun anew.

        The first key of `head` is the sign by which a journal of this kind is known; `about` is all that decides the
        result. `what` the run is, the `option` that names the file, and the `place` that it names are for messages.
        Raises InvalidRequest, with the file as it was, for a file of another kind, and without `fresh` for one of a run
        with another head; OSError where the system refuses the file.
        """
        journal, begun = cls.read(path), json.dumps(head).encode()
        before = journal.entries[0] if journal.entries else None
        if path.exists() and not begun.startswith(path.read_bytes()):  # there is more than a part of the first line
            if not isinstance(before, dict) or next(iter(head)) not in before:
                raise InvalidRequest(option, f"{path} is no journal of a {what}: name another {place}.")
            if before != json.loads(begun) and not fresh:
                old, new = flat(before.get("about")), flat(json.loads(begun)["about"])
                differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
                raise InvalidRequest(
                    option,
                    f"{path} is of a {what} with other settings ({', '.join(differing) or 'its form'}): name another "
                    f"{place}, or start over with --fresh.",
                )
        if fresh or before is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            journal.keep(0)
            journal.add(head)
        else:
            journal.keep(len(journal.entries))
        return journal

    def keep(self, count: int) -> None:
        """Go on behind the first `count` entries; what the file has behind them is dropped. Raises OSError."""
        del self.entries[count:]
        with self.path.open("ab+") as file:
            file.seek(0)
            file.truncate(sum(map(len, file.read().splitlines(keepends=True)[:count])))

    def add(self, entry: Mapping[str, Any]) -> None:
        """One more entry, which is on disk when this returns. Raises OSError, with the file as it was."""
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
    """A line's value; None where it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The values inside an object, by the names that lead to them, with dots between."""
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, inner in value.items() for k, v in flat(inner, f"{name}.{key}" if name else key).items()}
