"""Heads trained together with their target (Medusa-2): the target stays near, and drafts are accepted more often."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.draft.auto import DrafterRecord
from forerun.errors import FolderTaken, InvalidRequest
from forerun.heads.medusa.student import check_free
from forerun.heads.sizes import StudentSizes
from forerun.models.loading import Blueprint
from forerun.store import Journal
from forerun.train.held_out import judge_held_out
from forerun.train.kinds import make_student
from forerun.train.report import series
from forerun.train.settings import TrainSettings
from kit.checkpoints import TARGET
from kit.command import command
from train.material import answers, no_report, source_for, write_prompts

STEPS, DEPTH = 40, 2
TRAIN = ["-n", "24", "--held-out", "6", "--look-every", "20", "--threads", "1", "--heads", "2", "--rate", "0.01"]


def trained(folder: Path, *more: str) -> Any:
    """Trains heads for the stories target; returns the command's report."""
    prompts = write_prompts(folder.parent)
    own = ["--model", str(TARGET), "--data", str(prompts), "--steps", str(STEPS), "--out", str(folder), "--json"]
    result = command("train", "medusa", *TRAIN, *own, *more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def best_look(folder: Path) -> float:
    """The overlap of the distributions on the same answers, at the best evaluation."""
    looks = series(Journal.read(folder / "train.jsonl").entries, "held_out", "overlap")
    return float(max(value for _, value in looks))


@pytest.mark.full
def test_a_tuned_target_stays_near_is_drafted_exactly_and_accepts_more(tmp_path: Path) -> None:
    tuned, heads = tmp_path / "tuned", tmp_path / "heads"
    trained(tmp_path / "alone")
    report = trained(heads, "--tune-target", str(tuned))
    rise = report["tuned_target"]["loss_rise"]
    assert report["best_step"] > 0
    assert 0 < rise <= 0.01
    assert best_look(heads) > best_look(tmp_path / "alone")
    drafted, accepted = answers(str(report["draft"]), tuned)
    assert accepted > 0
    assert drafted == answers(None, tuned)[0]
    record, new = DrafterRecord.read(heads), Blueprint.of(str(tuned))
    assert record is not None
    assert record.target == new.weights_digest() != Blueprint.of(str(TARGET)).weights_digest()
    assert list(record.tokens_per_round) == report["trained"]["tokens_per_round"]
    assert new.config == Blueprint.of(str(TARGET)).config
    assert {path.name for path in tuned.iterdir()} >= {path.name for path in TARGET.glob("tokenizer*")}
    assert not list(tmp_path.glob(".*"))


def test_a_student_computes_the_target_as_it_is_and_its_distance_is_zero_before_the_first_step(tmp_path: Path) -> None:
    settings = TrainSettings(steps=1, max_tokens=16, held_out=3)
    target = Blueprint.of(str(TARGET))
    student = make_student("medusa", target, StudentSizes(heads=2, tune_target=tmp_path / "tuned"), 0)
    plain = make_student("medusa", target, StudentSizes(heads=2), 0)
    source = source_for(plain, settings, tmp_path)
    texts, objective = source.held_out(no_report), source.objective
    found, wanted = (judge_held_out(objective, each, texts, no_report) for each in (student, plain))
    source.llm.close()
    assert found.overlap == pytest.approx(wanted.overlap, abs=1e-4)
    assert found.tokens_per_round == wanted.tokens_per_round
    assert found.target_rise == pytest.approx(0, abs=1e-6)
    assert wanted.target_rise is None


def test_a_folder_of_the_users_is_not_overwritten_by_a_tuned_target(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    check_free(mine, tmp_path / "heads")
    (mine / ".mine.part").mkdir()  # as a kill leaves it
    check_free(mine, tmp_path / "heads")
    (mine / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(FolderTaken, match=r"mine is not the tuned target of .*heads: name another folder"):
        check_free(mine, tmp_path / "heads")
    (mine / "config.json").write_text(json.dumps({"forerun_tuned": str(tmp_path / "heads")}))
    check_free(mine, tmp_path / "heads")
    with pytest.raises(FolderTaken):
        check_free(mine, tmp_path / "others")
    with pytest.raises(InvalidRequest, match="is the folder of the heads"):
        check_free(tmp_path / "heads", tmp_path / "heads")
