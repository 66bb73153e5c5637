"""Past answers on disk: none is lost when a process dies, and files that are not understood are not changed."""

import os
import random
import stat
import warnings
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from forerun.draft.plan import DraftContext
from forerun.draft.text import suffix_past
from forerun.draft.text.suffix import SuffixDrafter
from forerun.draft.text.suffix_past import SLACK, PastAnswers, PastFile, write_all
from forerun.drafters import plan_drafter
from forerun.errors import PastFileError, UnknownDrafter, VocabularyMismatch
from forerun.models.loading import Blueprint
from kit.checkpoints import TARGET

TENANTS = ("", "a", "b\n\ud800{")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def opened(path: Path, max_bytes: int = 1 << 20, vocabulary: str = "v") -> PastAnswers:
    """The past answers as a new process loads them."""
    return PastAnswers(6, max_bytes, PastFile(path, vocabulary))


def contents(past: PastAnswers) -> list[tuple[str, str, list[int]]]:
    return [(kept.name, kept.tenant, list(kept.tokens)) for kept in past.answers.values()]


def answer(dice: random.Random) -> list[int]:
    return [dice.randrange(3) for _ in range(dice.randrange(1, 20))]


def fill(past: PastAnswers, count: int, seed: int = 0) -> None:
    dice = random.Random(seed)
    for seq_id in range(count):
        past.add(seq_id, dice.choice(TENANTS), answer(dice))


def in_a_process(work: Callable[[], None]) -> int:
    """Start `work` in a forked process; its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)  # a copy of the test run must not go on with the tests
    return child


def end_of(child: int) -> int:
    """Wait for a process; its exit status."""
    return os.waitpid(child, 0)[1]


def test_answers_are_restored_in_the_next_process(path: Path) -> None:
    """In the next process too, and in the one after that; sequences are numbered from 0 in each."""
    known: list[tuple[str, str, list[int]]] = []
    for process in range(3):
        past = opened(path)
        assert contents(past) == known
        fill(past, 5, seed=process)
        known = contents(past)
        assert len(known) == 5 * (process + 1)
    again = opened(path)
    for tenant, tree in past.trees.items():
        assert again.trees[tenant].root == tree.root
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # they are a user's texts


def test_a_sequence_that_came_back_is_restored_once(path: Path) -> None:
    past = opened(path)
    for answer_tokens in ([1, 2], [1, 2, 3], [1, 2, 3, 4]):
        past.reopen(7)
        past.add(7, "a", answer_tokens)
    assert len(path.read_bytes().splitlines()) == 4
    assert [tokens for _, _, tokens in contents(opened(path))] == [[1, 2, 3, 4]]


def test_processes_that_share_a_file_lose_no_answer(path: Path) -> None:
    """Although processes start one after the other, and each start rewrites the file without dead entries."""
    past = opened(path)
    for _ in range(SLACK + 9):
        past.add(0, "", [1, 2, 3])

    def work(tenant: str) -> None:
        own = opened(path)
        for seq_id in range(40):
            own.add(seq_id, tenant, [seq_id])

    children = [in_a_process(partial(work, str(seed))) for seed in range(4)]
    assert [end_of(child) for child in children] == [0] * 4
    found = contents(opened(path))
    for seed in range(4):
        assert [tokens for _, tenant, tokens in found if tenant == str(seed)] == [[i] for i in range(40)]
    assert len(found) == 161


def test_all_complete_answers_are_restored_wherever_a_write_was_cut_short(path: Path) -> None:
    """The file is cut at every byte; answers that are added afterwards are not lost, either."""
    past = opened(path)
    fill(past, 2)
    known, data = contents(past), path.read_bytes()
    ends = [i for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(1, len(data)):
        path.write_bytes(data[:cut])
        if cut <= ends[0]:
            with pytest.raises(PastFileError, match="no file of past answers: name another file"):
                opened(path)
            assert path.read_bytes() == data[:cut]
            continue
        whole = sum(end <= cut for end in ends[1:])  # a line that only lacks its line break is complete
        found = opened(path)
        assert contents(found) == known[:whole]
        found.add(0, "z", [1, 1])
        assert contents(opened(path)) == [*known[:whole], (found.name(0), "z", [1, 1])]


def test_a_damaged_file_is_refused_and_not_changed(path: Path) -> None:
    """With bytes changed, removed or inserted at random, the file is refused, or valid answers are read."""
    past, dice = opened(path), random.Random(0)
    fill(past, 4)
    data, num_refused = path.read_bytes(), 0
    for _ in range(150):
        at, what = dice.randrange(len(data)), bytes([dice.randrange(256)])
        damaged = data[:at] + what * dice.randrange(3) + data[at + dice.randrange(2) :]
        path.write_bytes(damaged)
        refusal = None
        try:
            found = opened(path)
        except (PastFileError, VocabularyMismatch) as error:
            refusal = str(error)
        if refusal is None:
            for _, tenant, tokens in contents(found):
                assert isinstance(tenant, str)
                assert all(type(token) is int and token >= 0 for token in tokens)
            continue
        num_refused += 1
        assert str(path) in refusal
        assert "name another file" in refusal
        assert path.read_bytes() == damaged
    assert num_refused > 50


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "line 3 of .* is damaged: delete that line, or name another file"),
        (b"[1]", "line 3"),
        (b'{"name":"x","tenant":"a"}', "line 3"),
        (b'{"name":"x","tenant":1,"tokens":[]}', "line 3"),
        (b'{"name":"x","tenant":"a","tokens":[true]}', "line 3"),
        (b'{"name":"x","tenant":"a","tokens":[-1]}', "line 3"),
        (b'{"name":"x","tenant":"a","tokens":[99999999999]}', "line 3"),
        (b"[" * 100_000, "line 3"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(path: Path, line: bytes, message: str) -> None:
    fill(opened(path), 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], line + b"\n", *lines[2:]]))
    with pytest.raises(PastFileError, match=message):
        opened(path)


@pytest.mark.parametrize("data", [b"my diary\n", b"my diary", b"\x89PNG\r\n\x1a\n", b"\n", b"{}\n", b"[]\n{}\n"])
def test_a_file_of_another_kind_is_refused_and_not_changed(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(PastFileError, match="no file of past answers: name another file, or one that does not exist"):
        opened(path)
    assert path.read_bytes() == data


def test_files_of_other_tokenizers_and_versions_are_refused(path: Path) -> None:
    fill(opened(path), 3)
    data = path.read_bytes()
    with pytest.raises(VocabularyMismatch, match="another tokenizer's ids: name another file"):
        opened(path, vocabulary="w")
    assert path.read_bytes() == data
    for form, shown in ((b"2", "2"), (b'"%s"' % (b"x" * 5000), "'xxx.*")):
        path.write_bytes(data.replace(b'form":1', b'form":' + form, 1))
        with pytest.raises(PastFileError, match=f"has format {shown}, this version reads 1") as raised:
            opened(path)
        assert len(str(raised.value)) < 500


def test_a_path_that_cannot_be_written_is_refused_at_once(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"")
    places = [tmp_path / "no" / "folder", tmp_path, path / "below", Path("/dev/full")]
    for place in places:
        with pytest.raises(PastFileError, match=f"{place} .*: name a file in a folder that exists"):
            opened(place)
    if os.geteuid():  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(PastFileError, match="Permission denied"):
            opened(tmp_path / "new")
        tmp_path.chmod(0o700)
    assert len(contents(opened(path))) == 0  # an empty file is a new one


class Full(FileIO):
    """A file on a disk that is nearly full."""

    @override
    def write(self, data: Any) -> int:
        return super().write(data[: len(data) // 2])


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a\0b", "\ud800", "x" * 5000, f"{'x' * 300}/y", "x" * 250])
def test_an_invalid_path_is_refused_by_name(name: str) -> None:
    context = DraftContext(target := Blueprint.of(str(TARGET)), target.tokenizer(), print)
    with pytest.raises(PastFileError, match="cannot be used for past answers") as refusal:
        plan_drafter(f'suffix:"{name}"', context)
    assert len(str(refusal.value)) < 500


def test_a_lock_that_cannot_be_created_ends_in_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past = opened(path)
    assert past.file is not None
    monkeypatch.setattr(past.file, "path", Path("/proc/answers.jsonl"))  # where root may write and nothing can be
    with pytest.warns(RuntimeWarning, match="no longer stored there"):
        past.add(1, "", [1, 2])


def test_processes_with_different_tokenizers_do_not_mix_ids_in_a_new_file(path: Path) -> None:
    first, second = opened(path), opened(path, vocabulary="w")  # the file is not there yet
    first.add(1, "", [1, 2])
    with pytest.warns(RuntimeWarning, match="another tokenizer's ids"):
        second.add(1, "", [3, 4])
    assert contents(opened(path)) == contents(first)


def test_the_next_answer_does_not_continue_a_line_of_a_killed_process(path: Path) -> None:
    past = opened(path)
    past.add(1, "", [1, 2])
    with path.open("ab") as file:
        file.write(b'{"name":"other","tok')
    past.add(2, "", [3, 4])
    assert contents(opened(path)) == contents(past)


def test_a_line_is_written_atomically(path: Path) -> None:
    path.write_bytes(b"before\n")
    with Full(path, "a") as file, pytest.raises(OSError, match="No space"):
        write_all(file, b"a line\n")
    assert path.read_bytes() == b"before\n"


def test_a_full_disk_is_a_warning_and_leaves_the_file_unchanged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning is given; drafting goes on, and the file is unchanged."""
    past = opened(path)
    fill(past, 3)
    data = path.read_bytes()

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(suffix_past, "write_all", fails)
    with pytest.warns(RuntimeWarning, match="no longer stored"):
        past.add(10, "a", [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        past.add(11, "a", [2])
    assert len(past.answers) == 5
    assert path.read_bytes() == data


def test_a_removed_file_is_created_again(path: Path) -> None:
    past = opened(path)
    fill(past, 3)
    path.unlink()
    past.add(9, "a", [5, 6])
    assert [tokens for _, _, tokens in contents(opened(path))] == [[5, 6]]


def test_answers_beyond_the_size_limit_are_removed_from_the_file_at_a_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest answers are restored; if most of a file is dead it is rewritten, atomically."""
    past = opened(path)
    fill(past, 5 * SLACK)
    known, data = contents(past), path.read_bytes()
    path.chmod(0o640)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    small = opened(path, max_bytes=40_000)
    kept = len(small.answers)
    assert 10 < kept < SLACK
    assert contents(small) == known[-kept:]
    assert path.read_bytes() == data
    assert {found.name for found in path.parent.iterdir()} == {path.name, f".{path.name}.lock"}
    monkeypatch.undo()
    assert contents(opened(path, max_bytes=40_000)) == known[-kept:]
    assert len(path.read_bytes().splitlines()) == 1 + kept
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert contents(opened(path)) == known[-kept:]


def test_an_answer_larger_than_the_size_limit_is_not_written(path: Path) -> None:
    past = opened(path, max_bytes=10_000)
    past.add(0, "a", [1, 2])
    data = path.read_bytes()
    past.add(1, "a", list(range(500)))
    assert path.read_bytes() == data


def test_a_drafter_spelled_with_a_file_uses_it(path: Path) -> None:
    """The file is checked when the drafter is planned; each drafter loads what those before it stored."""
    target = Blueprint.of(str(TARGET), dtype="float32")
    context, runner = DraftContext(target, target.tokenizer()), target.load(64)
    plan = plan_drafter(f"suffix:{path}", context)
    assert not plan.models
    first = plan.build({}, None, runner)
    assert isinstance(first, SuffixDrafter)
    assert not list(path.parent.iterdir()), "there is nothing to keep yet"
    first.past.add(0, "a", [1, 2, 3])
    second = plan.build({}, None, runner)
    assert isinstance(second, SuffixDrafter)
    assert contents(second.past) == contents(first.past)
    assert isinstance(plan_drafter("suffix", context).build({}, None, runner), SuffixDrafter)
    path.write_bytes(b"damaged")
    with pytest.raises(PastFileError):
        plan_drafter(f"suffix:{path}", context)
    with pytest.raises(UnknownDrafter, match="no list"):
        plan_drafter("suffix[ngram]", context)
