"""A block drafter in training: what its confidence learns, and that it goes on after a stop to the same weights."""

from pathlib import Path

import pytest
import torch

from forerun.heads.block.student import BlockStudent
from forerun.heads.student import StudentSizes, TextBatch
from forerun.models.loading import Blueprint
from forerun.train.answers import AnswerSource
from forerun.train.objective import confidence_loss
from forerun.train.settings import TrainSettings
from forerun.train.state import TrainFolder
from forerun.train.trainer import Trainer
from kit.checkpoints import TARGET
from kit.unchecked import unchecked
from train.material import objective_of, quiet, read_prompts, source_of, write_prompts

SHAPE = StudentSizes(layers=1, mlp=64, block=4, markov_rank=16)


class Stopped(Exception):
    """What ends a training in the middle of a step."""


def fresh() -> BlockStudent:
    return BlockStudent.fresh(Blueprint.of(str(TARGET)), SHAPE, 0)


def trained(source: AnswerSource, settings: TrainSettings, folder: Path, stop_at: tuple[int, ...] = ()) -> BlockStudent:
    """A student at the end of its training, which was stopped in these steps and begun again each time."""
    stops = list(stop_at)
    TrainFolder(folder).claim(fresh().about, force=False)
    texts = source.held_out(quiet)
    while True:
        student = fresh()
        place = TrainFolder(folder)
        place.claim(student.about, force=False)
        trainer = Trainer(student, source, objective_of(source), settings, place, texts, None, quiet)
        plain_step = trainer.step

        def step(trainer: Trainer = trainer, plain_step: object = plain_step) -> object:
            if stops and trainer.state.step == stops[0]:
                del stops[0]
                raise Stopped
            return plain_step()  # type: ignore[operator]

        trainer.step = step  # type: ignore[method-assign,assignment]
        try:
            trainer.run()
            return student
        except Stopped:
            continue


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_training_that_was_stopped_ends_with_the_same_weights(bfloat16: bool, tmp_path: Path) -> None:
    settings = TrainSettings(
        steps=6, batch=4, max_tokens=16, look_every=4, checkpoint_every=2, held_out=3, bfloat16=bfloat16, passes=2
    )
    source = source_of(read_prompts([write_prompts(tmp_path)], settings), settings, fresh())
    with unchecked():
        whole = trained(source, settings, tmp_path / "whole")
        parts = trained(source, settings, tmp_path / "parts", (1, 3, 5))
    source.llm.close()
    before = fresh().weights
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, parts.weights[name]), name
        assert not torch.equal(tensor, before[name]), name
        assert tensor.isfinite().all()


@pytest.mark.full
def test_confidence_learns_the_overlap_of_the_laws(tmp_path: Path) -> None:
    settings = TrainSettings(steps=30, max_tokens=24, look_every=30, held_out=4, rate=0.01)
    source = source_of(read_prompts([write_prompts(tmp_path)], settings), settings, fresh())
    objective = objective_of(source)
    with unchecked():
        student = trained(source, settings, tmp_path / "out")
        batch = TextBatch.of(source.held_out(quiet))
        source.llm.close()
        with torch.no_grad():
            predictions = student.predict(batch, None)
        found = list(objective.depths(student, predictions, batch))
    weights = [each.counted.float() for each in found]
    overlaps = [each.laws.overlap.view(own.shape) for each, own in zip(found, weights, strict=True)]
    told = [logits.sigmoid() for logits in predictions.confidence]
    for depth, own in enumerate(weights):
        mean, said = ((values[depth] * own).sum() / own.sum() for values in (overlaps, told))
        assert abs(float(mean) - float(said)) < 0.1, depth
    errors = [(a - b).abs()[w > 0].mean() for a, b, w in zip(told, overlaps, weights, strict=True)]
    assert float(torch.stack(errors).mean()) < 0.15
    best = confidence_loss([overlap.clamp(1e-4, 0.999).logit() for overlap in overlaps], found, weights)
    now = confidence_loss(predictions.confidence, found, weights)
    ignorant = confidence_loss([torch.zeros_like(each) for each in told], found, weights)
    assert best < now < 0.8 * ignorant
