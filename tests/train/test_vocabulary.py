"""A part of the vocabulary has the tokens that the target emits most often, and a resumed training keeps it."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forerun.errors import FolderTaken, InvalidRequest
from forerun.heads.eagle.student import EagleStudent
from forerun.heads.fresh import TargetTables
from forerun.heads.sizes import StudentSizes
from forerun.models.loading import Blueprint
from forerun.train.answers import AnswerSource, draft_vocabulary
from forerun.train.settings import TrainSettings
from forerun.train.state import TrainFolder
from kit.checkpoints import TARGET
from kit.command import command
from train.material import no_report, source_for, write_prompts
from train.test_train_command import QUICK

SETTINGS = TrainSettings(steps=3, batch=4, max_tokens=24, held_out=6)


@pytest.fixture
def source(tmp_path: Path) -> AnswerSource:
    student = EagleStudent.fresh(Blueprint.of(str(TARGET)), StudentSizes(mlp=64, draft_vocab=100), 0)
    return source_for(student, SETTINGS, tmp_path)


def test_it_has_the_commonest_tokens_of_answers_then_of_prompts_and_then_the_low_ids(
    source: AnswerSource, tmp_path: Path
) -> None:
    folder, emitted = TrainFolder(tmp_path / "out"), Counter[int]()
    for step in range(3):
        for text in source.of_step(step, no_report):
            emitted.update(text.tokens[text.num_prompt :])
    read = Counter(token for prompt in source.data.train for token in prompt)
    ranked = sorted(range(512), key=lambda token: (-emitted[token], -read[token], token))
    for size in (len(emitted) // 2, len(emitted.keys() | read) + 5):
        folder.claim({}, force=True)
        assert draft_vocabulary(source, size, folder, no_report) == sorted(ranked[:size])
    source.of_step = None  # type: ignore[assignment,method-assign]
    assert draft_vocabulary(source, size, folder, no_report) == sorted(ranked[:size]), "an answer is counted again"
    with pytest.raises(FolderTaken, match="is damaged: start over with --force"):
        draft_vocabulary(source, size + 1, folder, no_report)
    with pytest.raises(InvalidRequest, match="513 must be at most 512"):
        draft_vocabulary(source, 513, folder, no_report)


@pytest.mark.full
def test_the_trained_head_is_over_these_tokens(tmp_path: Path) -> None:
    out, prompts = tmp_path / "out", write_prompts(tmp_path)
    arguments = ["eagle", "--draft-vocab", "90", "--mlp", "32", "--steps", "2", "--batch", "2", *QUICK]
    result = command("train", *arguments, "--data", str(prompts), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "--draft-vocab" not in result.stderr
    stored, ids = load_file(out / "model.safetensors"), json.loads((out / "state" / "vocabulary.json").read_text())
    assert (torch.arange(90) + stored["d2t"]).tolist() == ids
    assert stored["lm_head.weight"].shape == (90, 64)
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 90
    untrained = TargetTables.of(Blueprint.of(str(TARGET))).head.weight[ids]
    assert (stored["lm_head.weight"] - untrained).abs().max() < 0.1, "its rows are not those of its tokens"
    assert command("train", *arguments, "--data", str(prompts), "--out", str(out)).exit_code == 0


def test_a_warning_says_that_a_large_head_makes_drafting_expensive(tmp_path: Path) -> None:
    """Before anything is written, and not where the head is a small part of a pass."""
    result = command("train", "mtp", *QUICK, "--data", str(tmp_path / "none.txt"), "--out", str(tmp_path / "out"))
    assert "output matrix of 512 tokens, 13% of a pass" in result.stderr.replace("\n", " ")
    assert "--draft-vocab 85" in result.stderr
