"""Processes that train together: they learn what one process would, and go on after a kill to the same weights."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forerun.errors import InvalidRequest
from forerun.models.spec import ModelSpec
from forerun.store import Journal
from forerun.train.report import series
from forerun.train.settings import TrainSettings
from forerun.train.state import CHECKPOINT, STATE
from forerun.train.team import Team
from kit.checkpoints import TARGET
from train.material import environment, finish, write_prompts

TOGETHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]


def command(folder: Path, *more: str, together: bool) -> list[str]:
    """The real command in one process, or in two."""
    prompts = write_prompts(folder.parent)
    options = ["-n", "24", "--held-out", "6", "--look-every", "3", "--batch", "4", "--heads", "2", "--json", *more]
    task = ["--model", str(TARGET), "--data", str(prompts), "--out", str(folder)]
    return [sys.executable, *(TOGETHER if together else ["-m"]), "forerun", "train", "medusa", *task, *options]


@pytest.mark.full
def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    """From the same answers in every step, so to the same weights up to the order of sums; only one process reports."""
    reports = {
        name: json.loads(finish(command(tmp_path / name, "--steps", "6", together=name == "two")))
        for name in ("one", "two")
    }
    assert reports["two"]["folder"] == str(tmp_path / "two")
    assert (reports["two"]["steps"], reports["two"]["processes"]) == (6, 2)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in reports)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=2e-3, rtol=0)
    for keys in (("loss",), ("overlap",), ("held_out", "overlap")):
        logs = [series(Journal.read(tmp_path / name / "train.jsonl").entries, *keys) for name in reports]
        assert [step for step, _ in logs[0]] == [step for step, _ in logs[1]]
        assert [value for _, value in logs[0]] == pytest.approx([value for _, value in logs[1]], rel=1e-3)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in reports]
    assert files[0] == files[1]


@pytest.mark.full
def test_processes_that_are_killed_continue_to_the_same_weights(tmp_path: Path) -> None:
    more = ["--steps", "60", "--checkpoint-every", "1"]
    folder = tmp_path / "out"
    finish(command(tmp_path / "whole", *more, together=True))
    process = subprocess.Popen(command(folder, *more, together=True), env=environment(), start_new_session=True)
    deadline = time.monotonic() + 120
    while not (folder / STATE / CHECKPOINT).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finish(command(folder, *more, together=True))
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.full
def test_two_processes_choose_the_draft_vocabulary_that_one_chooses(tmp_path: Path) -> None:
    """From the answers of both."""
    found = []
    for name in ("one", "two"):
        arguments = command(tmp_path / name, "--steps", "3", together=name == "two")
        place = arguments.index("--heads")
        arguments[place : place + 2] = ["--draft-vocab", "100"]
        arguments[arguments.index("medusa")] = "eagle"
        finish(arguments)
        found.append((tmp_path / name / STATE / "vocabulary.json").read_text())
    assert found[0] == found[1]


def test_the_processes_shares_hold_every_answer_once() -> None:
    shares = [Team(3, rank).numbers(range(8)) for rank in range(3)]
    assert sorted(chain(*shares)) == list(range(24))
    for step in range(2):  # of four answers each
        assert sorted(chain(*(own[4 * step : 4 * step + 4] for own in shares))) == list(
            range(12 * step, 12 * step + 12)
        )
    assert list(Team().numbers(range(5))) == list(range(5))


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    assert Team(4).own_share(TrainSettings(batch=8)).batch == 2
    with pytest.raises(InvalidRequest, match=r"8 answers cannot be shared evenly by 3 processes: use --batch 9"):
        Team(3).own_share(TrainSettings(batch=8))


def test_each_process_uses_another_gpu() -> None:
    placed = [Team(2, rank, rank).placed(ModelSpec("x", device="cuda")).device for rank in range(2)]
    assert placed == ["cuda:0", "cuda:1"]
    for spec in (ModelSpec("x"), ModelSpec("x", device="cuda:1")):
        assert Team(2, 1, 1).placed(spec) == spec
    assert Team().placed(ModelSpec("x", device="cuda")).device == "cuda"
