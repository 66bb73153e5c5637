"""Damaged files of an interrupted training are named and refused, or made again; none raises a raw error."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun.errors import FolderTaken
from forerun.train.answers import FIELDS, AnswerCache, read_vocabulary
from forerun.train.state import CHECKPOINT, HEAD, LOG, TrainFolder, TrainState
from models.damage import VALUES, places

ABOUT: dict[str, Any] = {"settings": {"steps": 10, "hours": None}, "student": {"kind": "eagle"}, "data": {"a": 1}}
LONGER = ABOUT | {"settings": {"steps": 20, "hours": None}}


def refusal(work: Callable[[], object]) -> str | None:
    """The message of the FolderTaken that the work raises; None if it raises nothing."""
    try:
        work()
    except FolderTaken as error:
        return str(error)
    return None


@pytest.fixture
def folder(tmp_path: Path) -> TrainFolder:
    """The folder of a training that has reached step 3 of 10."""
    folder = TrainFolder(tmp_path / "out")
    folder.claim(ABOUT, force=False)
    folder.save(TrainState(step=3, weights={"a": torch.ones(5)}, optimizers=[{"m": torch.ones(3)}], asked=10.0))
    return folder


@pytest.mark.parametrize("about", [ABOUT, LONGER], ids=["the same training", "a longer one"])
def test_no_value_of_the_settings_raises_raw(folder: TrainFolder, about: dict[str, Any]) -> None:
    path = folder.state_folder / HEAD
    whole = json.loads(path.read_text())
    for place in places(whole, 2):
        for value in VALUES.values():
            path.write_text(json.dumps(place.replaced(whole, value)))
            message = refusal(lambda: folder.claim(about, force=False))
            assert message is None or "--force" in message
    path.write_text("[" * 100_000)
    with pytest.raises(FolderTaken, match="is damaged"):
        folder.claim(about, force=False)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_byte_of_a_checkpoint_raises_raw(folder: TrainFolder) -> None:
    path, dice = folder.state_folder / CHECKPOINT, random.Random(1)
    whole = path.read_bytes()
    num_refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        changed[dice.randrange(min(len(whole), 600))] = dice.choice([0, 1, 127, 128, 255])
        path.write_bytes(changed)
        message = refusal(folder.load)
        assert message is None or "is damaged" in message
        num_refused += message is not None
    assert num_refused > 50


@pytest.mark.parametrize("step", VALUES)
def test_the_log_is_kept_up_to_a_damaged_line(folder: TrainFolder, step: str) -> None:
    lines = [{"step": 0}, {"step": VALUES[step]}, {"step": 2}] if step != "absent" else [{"step": 0}, {}, {"step": 2}]
    (folder.folder / LOG).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    kept = folder.log(3).entries
    assert kept[:1] == lines[:1]
    assert len(kept) == (3 if isinstance(VALUES[step], int) and VALUES[step] <= 3 else 1)


def test_a_vocabulary_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[" * 100_000)
    with pytest.raises(FolderTaken, match="is damaged: start over with --force"):
        read_vocabulary(tmp_path / "ids.json", 4, 9)


@pytest.mark.parametrize("texts", ["[3]", '["a"]', "{}", "[" * 10_000, '[{"tokens": 5}]', "[[]]"])
def test_a_damaged_group_of_answers_is_made_again(tmp_path: Path, texts: str) -> None:
    cache, tensors = AnswerCache(tmp_path), {"0.taps": torch.zeros(3, 1, 2), "0.last": torch.zeros(3, 2)}
    fields: dict[str, Any] = dict.fromkeys(FIELDS, 1) | {"tokens": [1, 2, 3], "is_cut": False}
    save_file(tensors, cache.path(0), {"texts": json.dumps([fields])})
    assert cache.load(0) is not None
    save_file(tensors, cache.path(0), {"texts": texts})
    assert not cache.load(0)


def test_what_cannot_be_read_is_named_and_nothing_is_started_over(folder: TrainFolder) -> None:
    path = folder.state_folder / CHECKPOINT
    path.unlink()
    path.mkdir()
    with pytest.raises(FolderTaken, match=r"checkpoint.pt cannot be read \(Is a directory\): make it a readable file"):
        folder.load()


@pytest.mark.parametrize("ids", [[1, 1], [2, 1], [-1, 2], [1, 9], [1, True], [0], [0, 1, 2], {}])
def test_a_vocabulary_that_was_never_chosen_is_refused(tmp_path: Path, ids: object) -> None:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(ids))
    with pytest.raises(FolderTaken, match="is damaged: start over with --force"):
        read_vocabulary(path, 2, 9)
    path.write_text("[3, 8]")
    assert read_vocabulary(path, 2, 9) == [3, 8]
    with pytest.raises(FolderTaken, match=r"cannot be read \(Is a directory\)"):
        read_vocabulary(tmp_path, 2, 9)
