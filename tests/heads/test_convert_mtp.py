"""MTP modules of `speculators` compute here what the package computes, and ours are read by it: equal logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import ModelError
from forerun.heads.convert import convert
from forerun.heads.folder import HeadFolder
from forerun.heads.mtp.drafter import MtpBlueprint
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from heads.conversions import CLOSE, assert_comes_back, expected, no_package, same_tensors
from heads.modules import apart
from heads.package_mtp import FOLDER, NAME, PLACES, TARGET, load, logits_of
from kit.checkpoints import read_json
from kit.unchecked import unchecked

THEIRS = FOLDER / NAME


@pytest.fixture(scope="module")
def known() -> dict[str, Tensor]:
    return expected(NAME)


def own_logits(folder: Path, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a module says here beside these states, and then beside its own outputs."""
    target = Blueprint.of(str(TARGET), dtype="float32")
    modules = MtpBlueprint.of(HeadFolder.of(str(folder), target)).load(512, target.load(64).decoder)
    runner = Runner.of(modules, 2048)
    found, inputs, text = [], states[:PLACES], tokens.tolist()
    for step in range(2):
        inputs = runner.read([Read(step, text[1 + step : 1 + step + PLACES])], inputs=inputs).hidden
        found.append(modules.logits(inputs))
    return found[0], found[1]


def test_a_module_of_the_package_gives_its_logits_once_converted(known: dict[str, Tensor], tmp_path: Path) -> None:
    new = convert(str(THEIRS), "mtp", tmp_path / "ours", str(TARGET))
    assert new.draft == f"mtp:{tmp_path / 'ours'}"
    found = own_logits(tmp_path / "ours", known["states"], known["tokens"])
    for own, wanted in zip(found, (known["first"], known["second"]), strict=True):
        torch.testing.assert_close(own, wanted, **CLOSE)
        assert own.std() > 0.1, "the logits say nothing"


def test_there_and_back_it_is_what_the_package_saved(tmp_path: Path) -> None:
    assert_comes_back(NAME, "mtp", tmp_path, str(TARGET))


def ours(folder: Path, **keys: object) -> Path:
    """A module of ours whose layer is qwen3's."""
    values = (
        read_json(TARGET / "config.json") | {"model_type": "qwen3", "num_hidden_layers": 1, "rms_norm_eps": 1e-5} | keys
    )
    made = apart(TARGET, folder, 1, "qwen", **{key: value for key, value in values.items() if key != "architectures"})
    tensors = load_file(made / "model.safetensors")
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    dice = torch.Generator().manual_seed(3)
    for name in ("q_norm", "k_norm"):
        tensors[f"mtp.layers.0.self_attn.{name}.weight"] = 1 + 0.2 * torch.randn(head_dim, generator=dice)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


@no_package
def test_the_package_computes_what_we_compute_with_a_module_of_ours(known: dict[str, Tensor], tmp_path: Path) -> None:
    made = ours(tmp_path / "ours")
    convert(str(made), "speculators", tmp_path / "theirs", str(TARGET))
    found = own_logits(made, known["states"], known["tokens"])
    with unchecked():
        theirs = logits_of(load(tmp_path / "theirs"), known["states"], known["tokens"])
    for own, wanted in zip(found, theirs, strict=True):
        torch.testing.assert_close(own, wanted, **CLOSE)


@no_package
def test_the_recorded_logits_are_the_packages(known: dict[str, Tensor]) -> None:
    with unchecked():
        theirs = logits_of(load(THEIRS), known["states"], known["tokens"])
    for own, wanted in zip(theirs, (known["first"], known["second"]), strict=True):
        torch.testing.assert_close(own, wanted, **CLOSE)


def test_a_module_of_ours_comes_back_from_speculators_as_it_was(tmp_path: Path) -> None:
    made = ours(tmp_path / "ours")
    convert(str(made), "speculators", tmp_path / "theirs", str(TARGET))
    convert(str(tmp_path / "theirs"), "mtp", tmp_path / "back", str(TARGET))
    assert same_tensors(made, tmp_path / "back")


@pytest.mark.parametrize(
    ("count", "keys", "told"),
    [
        (1, {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}, "has no window"),
        (2, {}, "mtp.layers.1.* is none of 1 MTP modules"),
        (1, {"hidden_size": 128}, "hidden_size is 128; .* has 64"),
    ],
    ids=str,
)
def test_what_speculators_cannot_say_is_refused_and_nothing_is_written(
    count: int, keys: dict[str, object], told: str, tmp_path: Path
) -> None:
    made = ours(tmp_path / "ours")
    (made / "config.json").write_text(json.dumps(read_json(made / "config.json") | keys))
    if count == 2:
        tensors = load_file(made / "model.safetensors")
        first = {name: tensor for name, tensor in tensors.items() if ".0." in name}
        more = {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in first.items()}
        save_file(tensors | more, made / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=told):
        convert(str(made), "speculators", tmp_path / "out", str(TARGET))
    assert not (tmp_path / "out").exists()


def test_a_module_without_norms_of_heads_is_refused(tmp_path: Path) -> None:
    made = apart(TARGET, tmp_path / "ours", 1, "qwen")
    with pytest.raises(ModelError, match="the layers of speculators are qwen3's"):
        convert(str(made), "speculators", tmp_path / "out", str(TARGET))
    assert not (tmp_path / "out").exists()
