"""An MTP module in training: it goes on to the very same weights, and weighs its steps as FastMTP does."""

from pathlib import Path

import pytest
import torch

from forerun.heads.mtp.student import MtpStudent
from forerun.heads.student import Student, StudentSizes
from forerun.models.loading import Blueprint
from forerun.train.settings import TrainSettings
from forerun.train.state import TrainFolder
from forerun.train.trainer import Trainer
from kit.checkpoints import TARGET
from kit.unchecked import unchecked
from train.material import objective_of, quiet, read_prompts, source_of, write_prompts


class Stop(Exception):
    """What ends a training in its middle."""


@pytest.mark.full
def test_a_training_that_is_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    settings = TrainSettings(steps=8, max_tokens=16, look_every=4, checkpoint_every=3, held_out=4, batch=4, rate=0.01)
    data, target = read_prompts([write_prompts(tmp_path)], settings), Blueprint.of(str(TARGET))

    def trainer(folder: str, stop_at: int | None = None) -> Trainer:
        student = MtpStudent.fresh(target, StudentSizes(mlp=32), 0)
        assert isinstance(student, Student)
        source = source_of(data, settings, student)
        place = TrainFolder(tmp_path / folder)
        place.claim(student.about, force=False)
        texts = source.held_out(quiet)

        def report(stage: str, done: float, note: str = "") -> None:
            if stage == "training" and stop_at is not None and done >= stop_at / 8:
                raise Stop

        return Trainer(student, source, objective_of(source), settings, place, texts, None, report)

    with unchecked():
        whole = trainer("whole").run()
        for stop_at in (2, 5):
            with pytest.raises(Stop):
                trainer("broken", stop_at).run()
        again = trainer("broken").run()
    assert again.step == whole.step == 8
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in whole.weights.items())
    fresh = MtpStudent.fresh(target, StudentSizes(mlp=32), 0).weights
    assert not any(torch.equal(fresh[name], tensor) for name, tensor in whole.weights.items())


def test_early_steps_weigh_more() -> None:
    """The shares that FastMTP (2509.18362) gives three steps."""
    weights = MtpStudent.fresh(Blueprint.of(str(TARGET)), StudentSizes(), 0).depth_weights
    assert [round(each / sum(weights[:3]), 2) for each in weights[:3]] == [0.51, 0.31, 0.18]
