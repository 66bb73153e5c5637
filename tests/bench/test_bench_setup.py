"""A benchmark's key holds everything its result depends on, and memory is planned for its texts."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from forerun.bench.material import Passage
from forerun.bench.measure import Models, about, draft_fingerprint, set_up
from forerun.bench.plan import Group, Selection, Turn
from forerun.demo import material
from forerun.device import Placement
from forerun.draft.model.model import ModelDrafter
from forerun.errors import ForerunError, InvalidRequest
from forerun.llm import LLM
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.bundled import BUNDLED, BUNDLED_HEADS
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec
from forerun.sampling.params import SamplingParams
from kit.checkpoints import SMALL, TARGET

SELECTION = Selection(batches=(3,), depths=(2,), num_tokens=20)
PASSAGES = {"own": [Passage("Once upon a time", "a:1")]}


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """The stories pair, its drafter a copy that may be changed."""
    shutil.copytree(SMALL, tmp_path / "draft")
    return Models(ModelSpec(str(TARGET)), f"model:{tmp_path / 'draft'}")


def test_the_key_differs_between_drafters_and_texts(models: Models, tmp_path: Path) -> None:
    stage = set_up(models, PASSAGES, SELECTION)
    first = about(models, stage, SELECTION)
    assert json.loads(json.dumps(first)) == json.loads(json.dumps(about(models, stage, SELECTION)))
    other = set_up(models, {"own": [Passage("Once upon a day", "a:1")]}, SELECTION)
    assert about(models, other, SELECTION)["workloads"] != first["workloads"]
    (weights,) = (tmp_path / "draft").glob("*.safetensors")
    with safe_open(weights, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, weights, metadata)
    changed = about(models, stage, SELECTION)["models"]
    assert changed["draft_fingerprint"] != first["models"]["draft_fingerprint"]
    assert changed["fingerprint"] == first["models"]["fingerprint"]
    assert draft_fingerprint(Blueprint.of(models.target), "ngram") == ""


def test_models_are_loaded_on_the_requested_device(models: Models) -> None:
    """Target and drafter; the description of the run names the device."""
    fixed = Placement(torch.device("cpu"), fixed=True)  # as on a GPU, but for the device
    there = replace(models, target=replace(models.target, device=fixed))
    stage = set_up(there, PASSAGES, SELECTION)
    drafter = stage.llm.drafter
    assert isinstance(drafter, ModelDrafter)
    assert all(isinstance(runner, GraphRunner) for runner in (stage.llm.engine.runner, drafter.runner))
    described = about(there, stage, SELECTION)["models"]
    assert described["kernels"] == f"torch, {fixed.label}"
    assert (
        described["fingerprint"]
        != about(models, set_up(models, PASSAGES, SELECTION), SELECTION)["models"]["fingerprint"]
    )


def test_no_repetition_is_drafted_from_the_answers_of_another() -> None:
    """Nor from those of other groups: a drafter that keeps past answers drafts the same every time."""
    stage = set_up(Models(ModelSpec(str(TARGET)), "suffix"), PASSAGES, SELECTION)
    groups, turns = [Group("own", batch, 0.0) for batch in (1, 2)], [Turn(repetition, 2) for repetition in (0, 1)]
    stage.warm_up(groups[0], (2,))
    runs = [[stage.run(group, turn) for turn in turns] for group in groups]
    for first, second in runs:
        assert first.answers == second.answers
        assert (first.num_rounds, first.num_drafted) == (second.num_rounds, second.num_drafted)
    assert runs[0][0].num_drafted * 2 == runs[1][0].num_drafted > 0


def test_memory_is_planned_for_the_longest_text_and_the_largest_batch(models: Models) -> None:
    stage = set_up(models, PASSAGES, SELECTION)
    assert stage.llm.plan.max_model_len == stage.workloads["own"].longest(SELECTION.num_tokens)
    assert stage.llm.plan.num_sequences_speculative == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["stories260k", *BUNDLED])
def test_a_pass_reads_all_weights_but_rows_that_are_looked_up(name: str, dtype: str) -> None:
    folder = BUNDLED.get(name, TARGET)
    blueprint = Blueprint.of(str(folder), dtype=dtype)
    tensors = load_file(next(folder.glob("*.safetensors")))
    tied = "lm_head.weight" not in tensors
    sizes = [t.numel() for key, t in tensors.items() if tied or "embed_tokens" not in key]
    assert blueprint.pass_bytes == sum(sizes) * blueprint.dtype.itemsize
    assert Blueprint.of(str(folder), dtype=dtype, quantize="int8").pass_bytes == sum(sizes)
    head = tensors["model.embed_tokens.weight"].numel()
    in_4_bits = Blueprint.of(str(folder), dtype=dtype, quantize="int4")
    assert in_4_bits.pass_bytes == head + (sum(sizes) - head) * 9 // 16


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], tuple[str, str]]:
    """The bundled target at twice its parameters with a drafter to it, each as it is shown."""
    monkeypatch.setattr("forerun.models.widen.cache_folder", lambda kind: tmp_path / kind)
    for name, size in (("TARGET_PARAMETERS", 22_000_000), ("DRAFT_PARAMETERS", 2_000_000)):
        monkeypatch.setattr(material, name, size)
    return lambda draft: material.widened_pair("stdlib", draft, None)


@pytest.mark.full
def test_a_drafter_is_widened_with_the_target(wide: Callable[[str], tuple[str, str]]) -> None:
    target, draft = wide("model:stdlib-draft")
    assert Blueprint.of(target).config.widened
    assert Blueprint.of(draft.removeprefix("model:")).config.widened
    assert wide("ngram") == (target, "ngram")
    for head in ("block:stdlib-block", "early-exit:2:stdlib-early-exit"):
        drafts = [wide(head)[1], wide(head)[1], wide(f"mix[suffix,{head}]")[1]]
        assert drafts[1] == drafts[0]
        assert drafts[2] == f"mix[suffix,{drafts[0]}]"
        assert Path(drafts[0].rpartition(":")[2]).parent == Path(target)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True)
    rounds = []
    for own, drafter in (("stdlib", "block:stdlib-block"), wide("block:stdlib-block")):
        llm = LLM(own, drafter, speculation=4, max_num_seqs=1, max_model_len=256)
        assert llm.draft_name.startswith(
            "block:stdlib-block (widened from " if own != "stdlib" else "block:stdlib-block"
        )
        llm.generate(["import os\n\n\ndef main"], params)
        rounds.append(llm.stats.tokens_per_round)
        llm.close()
    assert rounds[0] == pytest.approx(rounds[1], rel=0.3)


@pytest.mark.full
def test_a_drafter_is_widened_once_however_its_folder_is_spelled(
    wide: Callable[[str], tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(BUNDLED_HEADS["stdlib-block"], tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    spelled = ["block:own", "block:./own", f"block:{tmp_path / 'own'}"]
    assert len({wide(draft) for draft in spelled}) == 1


@pytest.mark.parametrize("draft", ["block:nowhere", "early-exit:2", "mix[ngram,block:nowhere]"])
def test_a_drafter_that_cannot_be_widened_is_refused_before_anything_is_written(
    wide: Callable[[str], tuple[str, str]], draft: str, tmp_path: Path
) -> None:
    with pytest.raises(ForerunError):
        wide(draft)
    assert not any(tmp_path.rglob("*.safetensors"))


def test_a_widened_drafter_of_other_weights_is_not_reused(
    wide: Callable[[str], tuple[str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(BUNDLED_HEADS["stdlib-block"], folder)
    _, first = wide(f"block:{folder}")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    assert wide(f"block:{folder}")[1] != first


def test_widening_is_for_bundled_models() -> None:
    for target, draft in (("some/model", "ngram"), ("stdlib", "model:a/b"), ("stdlib", "mix[suffix,model:a/b]")):
        with pytest.raises(InvalidRequest, match="widen"):
            material.widened_pair(target, draft, None)
