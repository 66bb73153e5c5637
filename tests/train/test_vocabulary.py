"""A draft of few tokens has those that the target says most often, and goes on with the same ones."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forerun.errors import FolderTaken, InvalidRequest
from forerun.heads.eagle.student import EagleStudent
from forerun.heads.student import StudentSizes
from forerun.models.loading import Blueprint
from forerun.train.answers import AnswerSource, draft_vocabulary
from forerun.train.settings import TrainSettings
from forerun.train.state import TrainFolder
from kit.checkpoints import TARGET
from train.material import quiet, read_prompts, source_of, write_prompts
from train.test_train_command import QUICK, invoke

SETTINGS = TrainSettings(steps=3, batch=4, max_tokens=24, held_out=6)


@pytest.fixture
def source(tmp_path: Path) -> AnswerSource:
    target, data = Blueprint.of(str(TARGET)), read_prompts([write_prompts(tmp_path)], SETTINGS)
    return source_of(data, SETTINGS, EagleStudent.fresh(target, StudentSizes(mlp=64, draft_vocab=100), 0))


def test_it_has_the_tokens_of_the_answers_that_are_learnt_from(source: AnswerSource, tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path / "out")
    folder.claim({}, force=False)
    said = Counter[int]()
    for step in range(3):
        for text in source.of_step(step, quiet):
            said.update(text.tokens[text.num_prompt :])
    few, many = len(said) // 2, len(said) + 20
    ids = draft_vocabulary(source, few, folder, quiet)
    assert len(set(ids)) == few
    assert list(ids) == sorted(ids)
    assert min(said[token] for token in ids) >= max(said[token] for token in said.keys() - set(ids))
    source.of_step = None  # type: ignore[assignment,method-assign]
    assert draft_vocabulary(source, few, folder, quiet) == ids, "an answer is counted again"
    with pytest.raises(FolderTaken, match="is damaged: start over with --force"):
        draft_vocabulary(source, many, folder, quiet)
    with pytest.raises(InvalidRequest, match="513 must be at most 512"):
        draft_vocabulary(source, 513, folder, quiet)


def test_tokens_that_no_answer_has_follow_by_the_prompts_and_then_by_their_ids(
    source: AnswerSource, tmp_path: Path
) -> None:
    folder = TrainFolder(tmp_path / "out")
    folder.claim({}, force=False)
    said = {t for step in range(3) for x in source.of_step(step, quiet) for t in x.tokens[x.num_prompt :]}
    read = {token for prompt in source.data.train for token in prompt}
    others = sorted(set(range(512)) - said - read)
    ids = draft_vocabulary(source, len(said | read) + 5, folder, quiet)
    assert set(ids) == said | read | set(others[:5])


@pytest.mark.full
def test_the_trained_head_is_over_these_tokens(tmp_path: Path) -> None:
    out, prompts = tmp_path / "out", write_prompts(tmp_path)
    arguments = ["eagle", "--draft-vocab", "90", "--mlp", "32", "--steps", "2", "--batch", "2", *QUICK]
    result = invoke(*arguments, "--data", str(prompts), "--out", str(out))
    assert result.exit_code == 0, result.output
    stored, ids = load_file(out / "model.safetensors"), json.loads((out / "state" / "vocabulary.json").read_text())
    assert (torch.arange(90) + stored["d2t"]).tolist() == ids
    assert stored["lm_head.weight"].shape == (90, 64)
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 90
    untrained = EagleStudent.fresh(Blueprint.of(str(TARGET)), StudentSizes(mlp=32, draft_vocab=ids), 0).weights[
        "lm_head.weight"
    ]
    assert (stored["lm_head.weight"] - untrained).abs().max() < 0.1, "its rows are not those of its tokens"
    assert invoke(*arguments, "--data", str(prompts), "--out", str(out)).exit_code == 0


def test_what_cannot_be_is_refused() -> None:
    target = Blueprint.of(str(TARGET))
    with pytest.raises(InvalidRequest, match="the target's head has all tokens"):
        EagleStudent.fresh(target, StudentSizes(shared_head=True, draft_vocab=100), 0)
    with pytest.raises(InvalidRequest, match="513 must be at most 512"):
        EagleStudent.fresh(target, StudentSizes(draft_vocab=513), 0)
    with pytest.raises(InvalidRequest, match="5 is not for medusa"):
        StudentSizes(draft_vocab=5).only("medusa", "heads")
