"""The training loop, for any kind: the loss it reaches, its number format, and that it resumes to the same weights."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from forerun.heads.fresh import TargetTables
from forerun.heads.mtp.student import MtpStudent
from forerun.heads.sizes import StudentSizes
from forerun.heads.student import Predictions, Student, TargetText, TextBatch
from forerun.models.loading import Blueprint
from forerun.store import Journal
from forerun.train.answers import AnswerSource
from forerun.train.held_out import HeldOutFigures, judge_held_out
from forerun.train.kinds import make_student
from forerun.train.objective import StepFigures, confidence_loss
from forerun.train.settings import TrainSettings
from forerun.train.state import TrainFolder
from forerun.train.trainer import Trainer
from kit.checkpoints import TARGET
from kit.unchecked import unchecked
from train.material import no_report, source_for

IDS = 400


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with unchecked():
        yield


@dataclass(frozen=True, kw_only=True)
class TwoHeads(Student):
    """Head d predicts the token d places behind the root, from the state before the root and the root's embedding.

    It records the number format of its logits, separately for steps and evaluations.
    """

    kind = "two-heads"
    table: Tensor
    formats: dict[bool, set[torch.dtype]] = field(default_factory=lambda: {True: set(), False: set()})

    @classmethod
    def fresh(cls) -> "TwoHeads":
        dice, target = torch.Generator().manual_seed(0), Blueprint.of(str(TARGET))
        weights = {f"heads.{d}.weight": torch.randn(64, 128, generator=dice) * 0.02 for d in range(2)}
        more: dict[str, Any] = {"depth_weights": (1.0, 0.8), "vocabulary": torch.arange(3, 3 + IDS)}
        return cls.untrained(target, {}, weights, table=TargetTables.of(target).embedding, **more)

    @override
    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        first = batch.first_root
        assert first > 0
        state = batch.taps[:, first - 1 : -1, 0].float()
        x = torch.cat([state, functional.embedding(batch.read[:, first:], self.table)], dim=-1)
        heads = (functional.linear(x, self.weights[f"heads.{d}.weight"]) for d in range(2))
        assert self.vocabulary is not None
        logits = [functional.linear(state + functional.silu(h), self.table[self.vocabulary]) for h in heads]
        self.formats[dice is not None].update(each.dtype for each in logits)
        return Predictions(logits, batch.roots)


def trainer_in(folder: Path, student: Student, source: AnswerSource) -> Trainer:
    place = TrainFolder(folder)
    place.claim(student.description, force=False)
    return Trainer(student, source, place, source.held_out(no_report), None, no_report)


@pytest.mark.short("decay")
@pytest.mark.parametrize("place_weights", ["decay", "d-pace"])
def test_heads_for_several_depths_are_trained_by_the_same_loop(place_weights: str, tmp_path: Path) -> None:
    """A new kind needs only a class: here heads on the last state, for two depths and a part of the vocabulary."""
    settings = TrainSettings(
        steps=24, max_tokens=24, look_every=12, rate=0.02, draft_depth=3, place_weights=place_weights, held_out=6
    )
    student = TwoHeads.fresh()
    source = source_for(student, settings, tmp_path)
    trainer = trainer_in(tmp_path / "out", student, source)
    before, state = trainer.best, trainer.run()
    after = judge_held_out(source.objective, student, trainer.held_out, no_report)
    assert state.stopped == "all steps are done"
    assert after.overlap > 1.5 * before.overlap
    assert after.tokens_per_round[0] > before.tokens_per_round[0] + 0.03
    assert len(after.tokens_per_round) == 3
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {*student.weights, "d2t"}
    again = trainer_in(tmp_path / "out", TwoHeads.fresh(), source)
    source.llm.close()
    assert all(torch.equal(again.student.weights[name], tensor) for name, tensor in student.weights.items())


@pytest.mark.short("True")
@pytest.mark.parametrize("bfloat16", [False, True])
def test_only_products_of_training_steps_are_in_bfloat16_and_only_if_set(bfloat16: bool, tmp_path: Path) -> None:
    settings = TrainSettings(steps=2, batch=2, max_tokens=12, draft_depth=2, held_out=1, bfloat16=bfloat16)
    student = TwoHeads.fresh()
    source = source_for(student, settings, tmp_path)
    state = trainer_in(tmp_path / "out", student, source).run()
    source.llm.close()
    assert student.formats == {True: {torch.bfloat16 if bfloat16 else torch.float32}, False: {torch.float32}}
    assert {tensor.dtype for tensor in state.weights.values()} == {torch.float32}


def test_seconds_are_those_of_all_steps_and_patience_counts_evaluations_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainSettings(steps=3, batch=1, max_tokens=8, draft_depth=2, patience=2, held_out=1, look_every=9)
    student = TwoHeads.fresh()
    source = source_for(student, settings, tmp_path)
    trainer = trainer_in(tmp_path / "out", student, source)
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("forerun.train.trainer.time", clock)
    assert trainer.run().seconds == 3
    trainer.state.stopped, stopped = "", []
    for number, (overlap, rise) in enumerate([(0.5, 0.0), (0.4, 0.0), (0.6, 0.0), (0.9, 0.02), (0.5, 0.0)]):
        figures = HeldOutFigures(overlap, (0.5,), (1.5,), rise)  # a tuned target must not get worse by 2 %
        monkeypatch.setattr("forerun.train.trainer.judge_held_out", lambda *_, figures=figures: figures)
        trainer.student.set_weights({name: torch.full_like(each, number) for name, each in student.weights.items()})
        trainer.evaluate()
        stopped.append(bool(trainer.state.stopped))
    assert stopped == [False, False, False, False, True]
    assert all(bool((each == 2).all()) for each in trainer.state.best.values())
    source.settings = replace(settings, steps=4)
    longer = trainer_in(tmp_path / "out", student, source)
    source.llm.close()
    assert not longer.state.stopped
    longer.evaluate()
    assert not longer.state.stopped, "more steps get the whole patience"


def first_tokens(text: TargetText, count: int) -> TargetText:
    return replace(text, tokens=text.tokens[:count], taps=text.taps[: count - 1], last=text.last[: count - 1])


@pytest.mark.parametrize("place_weights", ["decay", "d-pace"])
def test_loss_and_gradients_of_a_step_do_not_depend_on_the_parts_it_is_split_into(
    place_weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With answers of different lengths, so that weights, roots and answers have different shares."""
    settings = TrainSettings(
        steps=1, batch=3, max_tokens=16, draft_depth=3, held_out=1, place_weights=place_weights, loss="kl"
    )
    student = TwoHeads.fresh()
    source = source_for(student, settings, tmp_path)
    trainer = trainer_in(tmp_path / "out", student, source)
    lengths = zip(source.of_step(0, no_report), (1, 3, 16), strict=True)
    texts = [first_tokens(text, text.num_prompt + length) for text, length in lengths]
    monkeypatch.setattr(source, "of_step", lambda *_: texts)
    gradients, figures = list[Tensor](), []

    def keep(weights: Iterable[Tensor], *_: object) -> None:
        gradients.append(torch.cat([each.grad.flatten() for each in weights if each.grad is not None]))
        for each in student.weights.values():
            each.grad = None

    monkeypatch.setattr("forerun.train.trainer.step_optimizers", keep)
    for most in (1 << 25, 1):
        monkeypatch.setattr("forerun.train.trainer.MOST_LOGITS", most)
        figures.append(astuple(trainer.step()))
    source.llm.close()
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-4


def test_each_step_has_its_own_roots_loss_depth_and_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrainSettings(
        steps=4, batch=1, max_tokens=4, held_out=1, whole=True, first_share=0.5, kl_share=0.25, loss="tv"
    )
    student = TwoHeads.fresh()
    source = source_for(student, settings, tmp_path)
    trainer = trainer_in(tmp_path / "out", student, source)
    source.llm.close()
    seen, rates, short = list[tuple[object, ...]](), list[float](), replace(student)
    monkeypatch.setattr(TwoHeads, "at_depth_1", lambda _: short)
    monkeypatch.setattr("forerun.train.trainer.step_optimizers", lambda *more: rates.append(more[-1]))

    def loss(by: Student, batch: TextBatch, dice: torch.Generator, name: str) -> tuple[Tensor, StepFigures]:
        seen.append((dice.initial_seed(), by is short, batch.first_root, name))
        return student.weights["heads.0.weight"].sum(), StepFigures(1.0, 1.0, 1, 1.0)

    trainer.objective = SimpleNamespace(loss=loss, num_ids=512)  # type: ignore[assignment]
    monkeypatch.setattr(source, "of_step", lambda *_: trainer.held_out)
    for step in (0, 1, 2, 3, 1):
        trainer.state.step = step
        trainer.step()
    assert seen[4] == seen[1]
    assert len({seed for seed, *_ in seen}) == 4
    assert [rest for _, *rest in seen[:4]] == [[True, 0, "kl"], [True, 0, "tv"], [False, 0, "tv"], [False, 0, "tv"]]
    assert rates == [1.0, 0.75, 0.5, 0.25, 0.75]
    temperatures = [TrainSettings(steps=1, temperature=each).law_temperature for each in (0.0, 1e-9, 0.5, None)]
    assert temperatures == [1.0, 1.0, 0.5, 1.0], "as sampled later, but greedy sampling learns from the whole law"


class Stopped(Exception):
    """What ends a training in the middle of a step."""


@pytest.mark.short("block-*-False")
@pytest.mark.parametrize(
    ("kind", "sizes", "bfloat16"),
    [
        ("block", StudentSizes(layers=1, mlp=64, block=4, markov_rank=16), False),
        ("block", StudentSizes(layers=1, mlp=64, block=4, markov_rank=16), True),
        ("mtp", StudentSizes(mlp=32), False),
    ],
)
def test_a_training_that_was_stopped_ends_with_the_same_weights(
    kind: str, sizes: StudentSizes, bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainSettings(
        steps=6, batch=4, max_tokens=16, look_every=4, checkpoint_every=2, held_out=3, bfloat16=bfloat16, passes=2
    )
    fresh = lambda: make_student(kind, Blueprint.of(str(TARGET)), sizes, 0)  # noqa: E731
    source, plain_step, stops = source_for(fresh(), settings, tmp_path), Trainer.step, [1, 3, 5]
    whole = trainer_in(tmp_path / "whole", fresh(), source).run().weights

    def step(own: Trainer) -> object:
        if stops and own.state.step == stops[0]:
            del stops[0]
            raise Stopped
        return plain_step(own)

    monkeypatch.setattr(Trainer, "step", step)
    for _ in range(3):
        with pytest.raises(Stopped):
            trainer_in(tmp_path / "parts", fresh(), source).run()
    parts = trainer_in(tmp_path / "parts", fresh(), source).run().weights
    source.llm.close()
    steps = [
        [each["step"] for each in Journal.read(tmp_path / name / "train.jsonl").entries] for name in ("whole", "parts")
    ]
    assert steps[0] == steps[1] == [0, 1, 4, 6]
    for name, tensor in fresh().weights.items():
        assert torch.equal(whole[name], parts[name]), name
        assert not torch.equal(whole[name], tensor), name
        assert whole[name].isfinite().all()


@pytest.mark.full
def test_confidence_learns_the_overlap_of_the_distributions(tmp_path: Path) -> None:
    settings = TrainSettings(steps=30, max_tokens=24, look_every=30, held_out=4, rate=0.01)
    sizes = StudentSizes(layers=1, mlp=64, block=4, markov_rank=16)
    student = make_student("block", Blueprint.of(str(TARGET)), sizes, 0)
    source = source_for(student, settings, tmp_path)
    trainer = trainer_in(tmp_path / "out", student, source)
    trainer.run()
    batch, objective = TextBatch.of(trainer.held_out), source.objective
    with torch.no_grad():
        predictions = student.predict(batch, None)
    laws = list(objective.depths(student, predictions, batch))
    source.llm.close()
    weights = [each.counted.float() for each in laws]
    overlaps = [each.laws.overlap.view(weight.shape) for each, weight in zip(laws, weights, strict=True)]
    estimates = [logits.sigmoid() for logits in predictions.confidence]
    for depth, weight in enumerate(weights):
        mean, estimate = ((values[depth] * weight).sum() / weight.sum() for values in (overlaps, estimates))
        assert abs(float(mean) - float(estimate)) < 0.1, depth
    errors = [(a - b).abs()[w > 0].mean() for a, b, w in zip(estimates, overlaps, weights, strict=True)]
    assert float(torch.stack(errors).mean()) < 0.15
    best = confidence_loss([overlap.clamp(1e-4, 0.999).logit() for overlap in overlaps], laws, weights)
    now = confidence_loss(predictions.confidence, laws, weights)
    ignorant = confidence_loss([torch.zeros_like(each) for each in estimates], laws, weights)
    assert best < now < 0.8 * ignorant


def test_early_steps_weigh_more() -> None:
    """The weights that FastMTP (2509.18362) gives three steps."""
    weights = MtpStudent.depth_weights
    assert [round(each / sum(weights[:3]), 2) for each in weights[:3]] == [0.51, 0.31, 0.18]
