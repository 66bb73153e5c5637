"""Files and folders are written whole or not at all, and a journal goes on wherever it was cut off."""

import errno
import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from forerun.errors import InvalidRequest
from forerun.store import Journal, save_pickle, save_tensors, whole_folder, writable, write_whole

HEAD = {"forerun_test": 1, "about": {"settings": {"depths": [0, 3]}, "machine": "this"}}
ENTRIES = st.lists(st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.text(max_size=9)), max_size=5)


def opened(path: Path, head: object = HEAD, fresh: bool = False) -> Journal:
    return Journal.of_run(path, head, "test", "state", "file", fresh)  # type: ignore[arg-type]


def files_in(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@settings(deadline=None)
@given(ENTRIES, st.floats(0, 1), st.sampled_from([b"", b"\n", b"\x00\xff\n", b'{"a": \n']))
def test_a_journal_goes_on_wherever_it_was_cut(entries: list[dict[str, object]], share: float, torn: bytes) -> None:
    with TemporaryDirectory() as name:
        path = Path(name) / "below" / "journal"
        journal = opened(path)
        for entry in entries:
            journal.add(entry)
        whole = path.read_bytes()
        cut = round(share * len(whole))
        num_whole = whole[:cut].count(b"\n")
        at_an_end = whole[cut : cut + 1] == b"\n"  # what is torn there would complete the line
        path.write_bytes(whole[:cut] + (torn if num_whole and not at_an_end else b""))
        again = opened(path)
        count = max(0, num_whole - 1)
        assert again.entries == [HEAD, *entries[:count]]
        for entry in entries[count:]:
            again.add(entry)
        assert path.read_bytes() == whole
        again.keep(1)
        assert opened(path).entries == [HEAD]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("text", ['{"some": "thing"}\n', "notes of mine", "notes\nof mine", "[1]\n"])
def test_what_is_no_journal_of_this_kind_is_refused_and_stays(text: str, fresh: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(InvalidRequest, match=r"state: .*/file is not a journal of a test: name another file"):
        opened(tmp_path / "file", fresh=fresh)
    assert files_in(tmp_path) == {"file": text}


@pytest.mark.parametrize(
    ("about", "differing"),
    [
        ({"settings": {"depths": [0, 4]}, "machine": "this"}, "settings.depths"),
        ({"settings": {"depths": [0, 3]}, "machine": "that", "more": 1}, "machine, more"),
        (HEAD["about"], "its form"),
    ],
)
def test_a_run_with_other_settings_is_told_which_and_may_begin_anew(
    about: dict[str, object], differing: str, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    opened(path).add({"a": 1})
    before, other = path.read_bytes(), {"forerun_test": 2, "about": about}
    with pytest.raises(InvalidRequest, match=rf"is of a test with other settings \({differing}\): name another file"):
        opened(path, other)
    assert path.read_bytes() == before
    assert opened(path, other, fresh=True).entries == opened(path, other).entries == [other]


def test_a_damaged_entry_between_others_is_none(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(json.dumps(HEAD).encode() + b"\nbroken\n{}\n")
    assert opened(tmp_path / "journal").entries == [HEAD, None, {}]


def test_an_entry_that_cannot_be_written_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path / "journal")
    before = (tmp_path / "journal").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        journal.add({"a": 1})
    assert (tmp_path / "journal").read_bytes() == before
    assert journal.entries == [HEAD]


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
