"""Checkpoints of `speculators` compute here what the package computes, and ours are read by it: equal logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import InvalidRequest, ModelError, UnsupportedModel
from forerun.heads.convert import convert
from forerun.heads.eagle.drafter import EagleBlueprint
from forerun.heads.folder import HeadFolder
from forerun.heads.student import StudentSizes
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from forerun.train.kinds import make_student
from heads.conversions import CLOSE, assert_comes_back, changed, expected, no_package
from heads.package import ANCHORS, CHECKPOINTS, DEPTHS, FOLDER, TAPS, TARGET, guesses_of, load, logits_of
from heads.trained import eagle_of
from kit.unchecked import unchecked

NAMES = list(CHECKPOINTS)


def own_logits(folder: Path, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer says here behind each place, and behind the next token after each, read as a guess.

    Of P-EAGLE the second is what it says in masked places, as `guesses_of` has it of the package.
    """
    target = Blueprint.of(str(TARGET), dtype="float32")
    plan = EagleBlueprint.of(HeadFolder.of(str(folder), target))
    decoder = plan.load(512, target.load(64).decoder)
    runner = Runner.of(decoder, 2048)
    assert plan.tensors.form.taps == TAPS
    fused, text, second = decoder.fuse(states), tokens.tolist(), []
    first = decoder.logits(runner.read([Read(0, text)], inputs=fused).hidden)
    if decoder.mask is not None:
        masks = decoder.mask.expand(DEPTHS - 1, -1)
        for place in ANCHORS:
            read = Read(1 + place, [*text[: place + 1], *[plan.tensors.form.mask_token or 0] * len(masks)])
            hidden = runner.read([read], inputs=torch.cat([fused[: place + 1], masks])).hidden
            second.append(decoder.logits(hidden[place:])[None])
        return first, torch.cat(second)
    for place in range(len(text)):
        own = runner.read([Read(1 + place, text[: place + 1])], inputs=fused[: place + 1]).hidden[-1:]
        guess = [*text, 0][place + 1]
        second.append(decoder.logits(runner.read([Read(1 + place, [guess])], inputs=own).hidden))
    return first, torch.cat(second)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_the_package_gives_its_logits_as_it_is_and_converted(name: str, tmp_path: Path) -> None:
    known = expected(name)
    convert(str(FOLDER / name), "eagle", tmp_path / "authors", str(TARGET))
    for folder in (FOLDER / name, tmp_path / "authors"):
        for found, wanted in zip(
            own_logits(folder, known["states"], known["tokens"]), (known["first"], known["second"]), strict=True
        ):
            torch.testing.assert_close(found, wanted, **CLOSE)
    assert known["first"].std() > 0.1, "the logits say nothing"


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_it_is_what_the_package_saved(name: str, tmp_path: Path) -> None:
    assert_comes_back(name, "eagle", tmp_path)


@no_package
@pytest.mark.parametrize("options", [{}, {"norm_before_fc": True}, {"fc_norm": True, "norm_output": True}], ids=str)
def test_the_package_computes_what_we_compute_with_a_layer_of_ours(options: dict[str, Any], tmp_path: Path) -> None:
    ours = eagle_of(TARGET, tmp_path / "ours", eagle_aux_hidden_state_layer_ids=list(TAPS), **options)
    convert(str(ours), "speculators", tmp_path / "theirs", str(TARGET))
    known = expected("llama")
    found = own_logits(ours, known["states"], known["tokens"])
    with unchecked():
        theirs = logits_of(load(tmp_path / "theirs"), known["states"], known["tokens"])
    for own, wanted in zip(found, theirs, strict=True):
        torch.testing.assert_close(own, wanted, **CLOSE)


@no_package
@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_logits_are_the_packages(name: str, tmp_path: Path) -> None:
    known = expected(name)
    convert(str(FOLDER / name), "eagle", tmp_path / "there")
    convert(str(tmp_path / "there"), "speculators", tmp_path / "back", str(TARGET))
    with unchecked():
        heard = guesses_of if name == "peagle" else logits_of
        theirs = heard(load(tmp_path / "back"), known["states"], known["tokens"])
    for own, wanted in zip(theirs, (known["first"], known["second"]), strict=True):
        torch.testing.assert_close(own, wanted, **CLOSE)


@pytest.mark.parametrize(("kind", "format_name"), [("block", "dflash"), ("mtp", "mtp")])
def test_what_is_trained_in_a_portable_form_is_written_for_the_package(
    kind: str, format_name: str, tmp_path: Path
) -> None:
    taps = {"taps": (1, 3)} if kind == "block" else {}
    for portable in (None, True):
        student = make_student(kind, Blueprint.of(str(TARGET)), StudentSizes(portable=portable, **taps), 0)
        folder = tmp_path / f"{portable}"
        folder.mkdir()
        student.write(student.weights, folder)
    with pytest.raises(UnsupportedModel, match="speculators"):
        convert(str(tmp_path / "None"), "speculators", tmp_path / "refused", str(TARGET))
    written = convert(str(tmp_path / "True"), "speculators", tmp_path / "theirs", str(TARGET))
    assert written.as_object()["draft"] is None, "it is for other programs"
    convert(str(tmp_path / "theirs"), format_name, tmp_path / "back", str(TARGET))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("True", "back"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_portable_block_with_a_selector_has_no_confidence_head(tmp_path: Path) -> None:
    target = Blueprint.of(str(TARGET))
    own = {"taps": (1, 3), "portable": True, "selector_rank": 8}
    student = make_student("block", target, StudentSizes(**own), 0)
    student.write(student.weights, tmp_path)
    convert(str(tmp_path), "speculators", tmp_path / "theirs", str(TARGET))
    with pytest.raises(InvalidRequest, match="no confidence head beside a selector"):
        make_student("block", target, StudentSizes(**own, confidence=True), 0)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"speculators_model_type": "peagle"}, "mask_token_id is None; peagle has one"),
        ({"speculators_model_type": "xpress"}, "xPress combines the guesses"),
        ({"speculators_model_type": "strange"}, "is in none of the layouts"),
        ({"num_hidden_layers": 2}, "no tensor layers.1"),
        ({"vocab_size": 999}, "vocab_size is 999; .* has 512"),
        ({"vocab_size": 500}, "another one of the target's 500 tokens"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128"),
        ({"norm_before_fc": False}, "input_norm.weight is none of the EAGLE"),
        ({"fc_norm": True, "norm_before_fc": False}, "no tensor fc_norm.0.weight"),
        ({"draft_vocab_size": 61}, "d2t has another size|has shape"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "from 0 to 5"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight has shape"),
    ],
    ids=str,
)
def test_what_is_not_run_or_does_not_fit_is_refused_and_nothing_is_written(
    keys: dict[str, object], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=told):
        convert(str(changed("llama", tmp_path / "in", **keys)), "eagle", tmp_path / "out", str(TARGET))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_layer_without_embedding_and_head_is_given_its_targets(tmp_path: Path) -> None:
    ours = eagle_of(TARGET, tmp_path / "ours", 512)
    tensors = load_file(ours / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k not in ("lm_head.weight", "d2t")}, ours / "model.safetensors")
    with pytest.raises(
        UnsupportedModel, match=r"uses its target's embed_tokens.weight, lm_head.weight: name that with --model"
    ):
        convert(str(ours), "speculators", tmp_path / "out")
    convert(str(ours), "speculators", tmp_path / "out", str(TARGET))
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(written[name], load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"])
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told["speculators_config"]["verifier"] == {
        "name_or_path": str(TARGET),
        "architectures": ["LlamaForCausalLM"],
    }
