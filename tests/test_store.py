"""Files and folders are written whole or not at all, and a journal goes on wherever it was cut off."""

import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import InvalidRequest
from forerun.store import Journal, replace_file, save_pickle, save_tensors, whole_folder, writable, write_whole


def files_in(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_an_entry_that_cannot_be_written_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "journal").write_bytes(before := b'{"a": 0}\n')
    journal = Journal.read(tmp_path / "journal")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        journal.add({"a": 1})
    assert (tmp_path / "journal").read_bytes() == before
    assert journal.entries == [{"a": 0}]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write(part: Path) -> None:
    for name in ("config.json", "model.safetensors", "below/a.jinja"):
        (part / name).parent.mkdir(exist_ok=True)
        (part / name).write_text("new")


def test_a_folder_appears_whole_and_replaces_files_one_by_one(tmp_path: Path) -> None:
    folder, left = tmp_path / "folder", tmp_path / ".folder.part"
    left.mkdir()
    (left / "left").write_text("by a kill")
    for _ in range(2):
        with whole_folder(folder) as part:
            write(part)
        assert files_in(tmp_path) == {
            f"folder/{n}": "new" for n in ("config.json", "model.safetensors", "below/a.jinja")
        }
        (folder / "config.json").write_text("old")
    (folder / "mine").write_text("mine")
    with whole_folder(folder) as part:
        (part / "config.json").write_text("newer")
    assert files_in(folder) | {"below/a.jinja": "", "model.safetensors": ""} == {
        "config.json": "newer", "mine": "mine", "below/a.jinja": "", "model.safetensors": "",
    }  # fmt: skip
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_who_may_read_the_files_of_a_folder_is_decided_by_the_umask(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        with whole_folder(tmp_path / "folder") as part:
            save_file({"a": torch.zeros(1)}, part / "model.safetensors")  # for its owner alone
            (part / "config.json").write_text("{}")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "folder").iterdir()} == {mode}


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Within it the system refuses to let a file grow further, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("save", [save_tensors, save_pickle])
def test_tensors_that_the_system_refuses_are_an_error_of_the_system(
    save: Callable[[dict[str, torch.Tensor], Path], None], tmp_path: Path
) -> None:
    tensors = {"a": torch.arange(100_000)}
    with pytest.raises(InvalidRequest, match="File too large"), writable(tmp_path), files_of_at_most(100_000):
        save(tensors, tmp_path / "model")
    with pytest.raises(FileNotFoundError):
        save(tensors, tmp_path / "none" / "model")
    save(tensors, tmp_path / "model")
    load = load_file if save is save_tensors else torch.load
    assert torch.equal(load(tmp_path / "model")["a"], tensors["a"])


def test_files_of_a_folder_are_replaced_the_configuration_behind_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = list[str]()
    monkeypatch.setattr(os, "replace", lambda _, path: replaced.append(path.name))
    with whole_folder(tmp_path) as part:
        write(part)
    assert replaced.index("model.safetensors") < replaced.index("config.json")


@pytest.mark.parametrize("exists", [False, True])
def test_a_block_that_raises_changes_nothing(exists: bool, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if exists:
        folder.mkdir()
        (folder / "config.json").write_text("old")
    before = files_in(tmp_path)

    def half() -> None:
        with whole_folder(folder) as part:
            write(part)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert files_in(tmp_path) == before
    assert folder.exists() == exists


@pytest.mark.parametrize("content", ["new", lambda part: part.write_text("new")])
def test_a_file_is_replaced_whole(
    content: str | Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, content)
    assert path.read_text() == "old"
    write_whole(path, content)
    assert files_in(tmp_path) == {"file": "new"}


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_of_a_replacement_is_raised_as_it_is(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "times.json", os.replace
    path.write_bytes(b"old")

    def interrupted(source: str, target: Path) -> None:
        if late:
            replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, b"new")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {path.name: b"new" if late else b"old"}
