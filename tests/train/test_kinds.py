"""Another kind needs a module alone: heads on the target's last state, for two depths and a part of the vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from forerun.heads.student import Predictions, Student, TextBatch
from forerun.models.loading import Blueprint
from forerun.models.weights import Checkpoint
from forerun.train.held_out import judge_held_out
from forerun.train.settings import TrainSettings
from forerun.train.state import TrainFolder
from forerun.train.trainer import Trainer
from kit.checkpoints import TARGET
from kit.unchecked import unchecked
from train.material import objective_of, quiet, read_prompts, source_of, write_prompts

IDS = 400


@dataclass
class TwoHeads:
    """Head d guesses the token d places behind the root, from the state before the root and the root's embedding."""

    weights: dict[str, Tensor]
    table: Tensor
    taps: tuple[int, ...] = (-1,)
    depth_weights: tuple[float, ...] = (1.0, 0.8)
    vocabulary: Tensor = field(default_factory=lambda: torch.arange(3, 3 + IDS))
    most_depth: int | None = None
    about: Mapping[str, Any] = field(default_factory=lambda: {"kind": "two heads"})

    @classmethod
    def fresh(cls) -> "TwoHeads":
        table = Checkpoint(Blueprint.of(str(TARGET)).folder, torch.float32).take("model.embed_tokens.weight", (512, 64))
        dice = torch.Generator().manual_seed(0)
        weights = {f"heads.{d}.weight": torch.randn(64, 128, generator=dice) * 0.02 for d in range(2)}
        return cls({name: tensor.requires_grad_() for name, tensor in weights.items()}, table)

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        first = batch.first_root
        assert first > 0
        state = batch.taps[:, first - 1 : -1, 0].float()
        x = torch.cat([state, functional.embedding(batch.read[:, first:], self.table)], dim=-1)
        heads = (functional.linear(x, self.weights[f"heads.{d}.weight"]) for d in range(2))
        logits = [functional.linear(state + functional.silu(h), self.table[self.vocabulary]) for h in heads]
        return Predictions(logits, batch.roots, {"small": 1e-4 * logits[1].square().mean()})

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in weights.items()}, folder / "heads.safetensors"
        )

    def spec(self, folder: Path) -> str:
        return f"two-heads:{folder}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place_weights", ["decay", "d-pace"])
def test_heads_for_several_depths_are_trained_by_the_same_loop(place_weights: str, tmp_path: Path) -> None:
    settings = TrainSettings(
        steps=24, max_tokens=24, look_every=12, rate=0.02, draft_depth=3, place_weights=place_weights, held_out=6
    )
    student = TwoHeads.fresh()
    assert isinstance(student, Student)
    source = source_of(read_prompts([write_prompts(tmp_path)], settings), settings, student)
    folder = TrainFolder(tmp_path / "out")
    folder.claim(student.about, force=False)
    with unchecked():
        texts = source.held_out(quiet)
        trainer = Trainer(student, source, objective_of(source), settings, folder, texts, None, quiet)
        before = trainer.best
        state = trainer.run()
        after = judge_held_out(objective_of(source), student, texts, quiet)
    assert state.stopped == "all steps are taken"
    assert after.overlap > 1.5 * before.overlap
    assert after.tokens_per_round[0] > before.tokens_per_round[0] + 0.03
    assert len(after.tokens_per_round) == 3
    assert set(load_file(tmp_path / "out" / "heads.safetensors")) == set(student.weights)
    guesses = {name: tensor.clone() for name, tensor in student.weights.items()}
    again = Trainer(TwoHeads.fresh(), source, objective_of(source), settings, folder, texts, None, quiet)
    source.llm.close()
    assert all(torch.equal(again.student.weights[name], tensor) for name, tensor in guesses.items())


@dataclass
class Watched(TwoHeads):
    """It notes the number format of its logits, apart for steps and for looks."""

    formats: dict[bool, set[torch.dtype]] = field(default_factory=lambda: {True: set(), False: set()})

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        found = super().predict(batch, dice)
        self.formats[dice is not None].update(logits.dtype for logits in found.logits)
        return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_products_of_steps_alone_are_in_bfloat16_where_that_is_asked_for(bfloat16: bool, tmp_path: Path) -> None:
    settings = TrainSettings(steps=2, batch=2, max_tokens=12, draft_depth=2, held_out=1, bfloat16=bfloat16)
    student = Watched.fresh()
    assert isinstance(student, Watched)
    source = source_of(read_prompts([write_prompts(tmp_path)], settings), settings, student)
    folder = TrainFolder(tmp_path / "out")
    folder.claim(student.about, force=False)
    with unchecked():
        texts = source.held_out(quiet)
        state = Trainer(student, source, objective_of(source), settings, folder, texts, None, quiet).run()
    source.llm.close()
    assert student.formats == {True: {torch.bfloat16 if bfloat16 else torch.float32}, False: {torch.float32}}
    assert {tensor.dtype for tensor in state.weights.values()} == {torch.float32}
