"""`auto` chooses the best drafter in or next to the target's folder, by the record files of drafters alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from forerun.draft.auto import NAMES, RECORD, DrafterRecord, resolve_auto
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.drafters import PLANNERS
from forerun.errors import UnknownDrafter
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.projections import FINAL_NORM
from forerun.sampling.params import SamplingParams
from heads.trained import heads_of
from kit.checkpoints import SMALL, TARGET

AUTO = DraftSpec("auto")


@pytest.fixture
def target(tmp_path: Path) -> Blueprint:
    """A target in a folder to which a test adds drafters next to it."""
    shutil.copytree(TARGET, tmp_path / "family" / "target")
    return Blueprint.of(str(tmp_path / "family" / "target"))


def put(folder: Path, of: Blueprint, **values: object) -> Path:
    """Write a record into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    record = DrafterRecord("medusa", "", of.weights_digest(), 1.0, (0.5,), (1.5, 1.7), 1.2)
    (folder / RECORD).write_text(replace(record, **values).text())  # type: ignore[arg-type]
    return folder


def test_the_drafter_with_the_largest_predicted_speed_up_is_chosen(target: Blueprint) -> None:
    family = target.folder.parent
    put(family / "a", target, tokens_per_round=(9.0,))
    best = put(family / "b", target, drafter="early-exit", argument="2:", speed_up=1.3)
    put(family / "c", target, speed_up=1.25)
    assert resolve_auto(AUTO, target) == DraftSpec("early-exit", argument=f"2:{best}")
    inside = put(target.folder / "mine", target, drafter="eagle", speed_up=1.4)
    assert resolve_auto(AUTO, target) == DraftSpec("eagle", argument=str(inside))
    mixed = resolve_auto(parse_spec("mix[suffix,auto]"), target)
    assert mixed.members == (DraftSpec("suffix"), DraftSpec("eagle", argument=str(inside)))


def test_a_drafter_without_times_is_chosen_only_if_no_timed_one_is_faster(target: Blueprint) -> None:
    family = target.folder.parent
    put(family / "timed", target, speed_up=0.9, tokens_per_round=(9.0,))
    put(family / "few", target, speed_up=None, tokens_per_round=(1.5, 1.6))
    many = put(family / "many", target, speed_up=None, tokens_per_round=(1.4, 1.8))
    assert resolve_auto(AUTO, target) == DraftSpec("medusa", argument=str(many))
    faster = put(family / "faster", target, speed_up=1.01)
    assert resolve_auto(AUTO, target) == DraftSpec("medusa", argument=str(faster))


@pytest.mark.parametrize(
    "values", [{"target": "another"}, {"speed_up": 1.0}, {"speed_up": 0.7}, {"tokens_per_round": ()}]
)
def test_without_a_useful_drafter_it_is_suffix(values: dict[str, object], target: Blueprint) -> None:
    assert resolve_auto(AUTO, target) == DraftSpec("suffix")
    put(target.folder.parent / "a", target, **values)
    assert resolve_auto(AUTO, target) == DraftSpec("suffix")


def test_a_drafter_is_found_for_every_number_format_of_its_target_and_for_no_other_model(
    target: Blueprint, tmp_path: Path
) -> None:
    """A target is recognised by its norms, which all formats store; a record may name a second drafter for a mix."""
    source = load_file(target.folder / "model.safetensors")
    rounded = {name: t if name.endswith("norm.weight") else (t * 64).round() / 64 for name, t in source.items()}
    other = rounded | {FINAL_NORM: source[FINAL_NORM] * 1.5}
    found = put(target.folder.parent / "a", target, target="another", model=target.norms_digest(), mixed_with="suffix")
    own = DraftSpec("medusa", argument=str(found))
    for tensors, expected in ((source, own), (rounded, own), (other, None)):
        save_file(tensors, target.folder / "model.safetensors", {"format": "pt"})
        again = Blueprint.of(str(target.folder))
        assert resolve_auto(parse_spec("mix[ngram,auto]"), again).members[1] == (expected or DraftSpec("suffix"))
        mixed = DraftSpec("suffix") if expected is None else DraftSpec("mix", members=(DraftSpec("suffix"), own))
        assert resolve_auto(AUTO, again) == mixed


@pytest.mark.parametrize("values", [{"drafter": "telepathy"}, {"mixed_with": "telepathy:2"}], ids=str)
def test_a_record_of_a_newer_versions_drafter_is_left_out_with_a_warning(
    values: dict[str, object], target: Blueprint, caplog: pytest.LogCaptureFixture
) -> None:
    put(target.folder.parent / "newer", target, speed_up=9.0, **values)
    assert resolve_auto(AUTO, target) == DraftSpec("suffix")
    assert "newer/drafter.json is ignored: it names the drafter telepathy" in caplog.text
    known = put(target.folder.parent / "known", target)
    assert resolve_auto(AUTO, target) == DraftSpec("medusa", argument=str(known))
    assert set(NAMES) == PLANNERS.keys() - {"auto", "cascade", "mix", "python"}


CHANGES: list[dict[str, object]] = [{"mixed_with": 5}, {"mixed_with": "no such["}, {"temperature": 10**400}]


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"drafter": "medusa"}', *CHANGES], ids=str)
def test_damaged_records_and_impossible_values_are_ignored(damage: str | dict[str, object], target: Blueprint) -> None:
    file = put(target.folder.parent / "a", target) / RECORD
    file.write_text(damage if isinstance(damage, str) else json.dumps(json.loads(file.read_text()) | damage))
    assert DrafterRecord.read(file.parent) is None
    assert resolve_auto(AUTO, target) == DraftSpec("suffix")


def test_a_record_survives_writing_and_reading(target: Blueprint, tmp_path: Path) -> None:
    folder = tmp_path / "of, [brackets]"
    draft = str(DraftSpec("early-exit", argument=f"2:{folder}"))
    found = {"target": "x", "temperature": 0.0, "acceptance_at_depth": (0.5, 0.25), "tokens_per_round": (1.5,)}
    record = DrafterRecord.of(draft, folder, **found)
    folder.mkdir()
    (folder / RECORD).write_text(record.text())
    assert DrafterRecord.read(folder) == record
    assert str(record.spec(folder)) == draft


def test_other_weights_have_another_digest_and_other_settings_the_same(target: Blueprint, tmp_path: Path) -> None:
    assert Blueprint.of(str(target.folder), dtype="float32").weights_digest() == target.weights_digest()
    config = json.loads((target.folder / "config.json").read_text())
    (target.folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 3}))
    assert Blueprint.of(str(target.folder)).weights_digest() == target.weights_digest()
    other = Blueprint.of(str(SMALL))
    assert other.weights_digest() != target.weights_digest()


def test_an_engine_drafts_with_the_chosen_drafter_and_logs_it(target: Blueprint) -> None:
    folder = heads_of(TARGET, target.folder.parent / "heads", 3)
    put(folder, target)
    params = SamplingParams(seed=4, max_tokens=40)
    plain = LLM(str(target.folder), dtype="float32").generate("Once upon a time", params)[0]
    llm = LLM(str(target.folder), "auto", dtype="float32", speculation=3)
    assert llm.draft_name == f"medusa:{folder}"
    assert llm.generate("Once upon a time", params)[0].outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.stats.num_accepted > 0
    with pytest.raises(UnknownDrafter, match="without an argument"):
        LLM(str(target.folder), "auto:x")
