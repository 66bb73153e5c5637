"""The folder of a training: which one may go on, and damaged files, which are refused by name or made again."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun.draft.auto import RECORD
from forerun.errors import FolderTaken, InvalidRequest
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


def test_only_a_finished_training_may_be_given_more_steps(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path)
    about = {"settings": {"steps": 3, "hours": None, "rate": 1.0}}
    longer, other = ({"settings": about["settings"] | more} for more in ({"steps": 5}, {"steps": None, "hours": 9.0}))
    folder.claim(about, force=False)
    for state in (None, TrainState(step=2, asked=3.0), TrainState(step=2, stopped="it is over", asked=2.0)):
        if state is not None:
            folder.save(state)
        with pytest.raises(FolderTaken, match="with --steps 3: finish it with --steps 3 first"):
            folder.claim(longer, force=False)
        folder.claim(about, force=False)
    folder.save(TrainState(step=3, stopped="it is over", asked=3.0))
    with pytest.raises(FolderTaken, match=r"--hours was None and is 9\.0; --steps was 3 and is None"):
        folder.claim(other, force=False)
    (tmp_path / RECORD).write_text("of the shorter one")
    folder.claim(longer, force=False)
    assert not (tmp_path / RECORD).exists()
    with pytest.raises(FolderTaken, match=r"--steps was 5 and is 3"):
        folder.claim(about, force=False)
    with pytest.raises(FolderTaken, match="unfinished training with --steps 5"):
        folder.claim({"settings": about["settings"] | {"steps": 7}}, force=False)


@pytest.mark.parametrize("torn", ['{"step": 5, "lo', '{"step": 9, "loss": 1.0}\n{"step": 10', "\n"])
def test_journal_lines_after_the_saved_state_are_dropped(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    kept = '{"step": 1, "loss": 3.0}\n{"step": 4, "held_out": {"overlap": 0.5}}\n'
    path.write_text(kept + torn)
    log = TrainFolder(tmp_path).log(4)
    assert path.read_text() == kept
    log.add({"step": 5, "loss": 2.0})
    assert [line["step"] for line in TrainFolder(tmp_path).log(9).entries] == [1, 4, 5]


def test_a_state_is_replaced_as_a_whole_and_damage_is_reported(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path / "out")
    folder.claim({"a": 1}, force=False)
    assert folder.load() is None
    folder.save(TrainState(step=3, weights={"w": torch.ones(2)}))
    (folder.state_folder / ".checkpoint.pt.part").write_bytes(b"half of a ")  # what a kill leaves
    state = folder.load()
    assert state is not None
    assert (state.step, state.weights["w"].tolist()) == (3, [1.0, 1.0])
    folder.claim({"a": 1}, force=False)
    path = folder.state_folder / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FolderTaken, match=r"checkpoint\.pt is damaged .*start over with --force"):
        folder.load()
    folder.claim({"student": {"kind": "medusa", "heads": 2}}, force=True)
    with pytest.raises(FolderTaken, match="has a training of the kind medusa, not eagle: name another folder"):
        folder.claim({"student": {"kind": "eagle", "layers": 1}}, force=False)
    folder.claim({"a": 2}, force=True)
    assert folder.load() is None


@pytest.mark.parametrize("below", ["", "inside"])
def test_a_file_in_the_place_of_a_folder_is_reported_by_name(below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InvalidRequest, match=f"{file} is not a folder: name another one"):
        TrainFolder(file / below).claim({"settings": {}}, force=False)
    assert file.read_text() == "mine"


def test_an_interrupted_training_says_where_it_continues(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path)
    assert folder.next_start() == "starts again, as nothing was saved yet"
    folder.claim({"settings": {}}, force=False)
    folder.save(TrainState(step=12))
    assert folder.next_start() == "resumes at step 12"
