"""What tests of conversions to and from the package `speculators` claim, and checkpoints of it with other fields."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.heads.convert import convert
from heads.package import FOLDER

CLOSE = {"atol": 1e-4, "rtol": 0.0}
no_package = pytest.mark.skipif(
    importlib.util.find_spec("speculators") is None, reason="the package speculators is not installed"
)


def expected(name: str) -> dict[str, Tensor]:
    """States of a target, tokens, and what the package says of them."""
    return load_file(FOLDER / name / "expected.safetensors")


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weights, to the bit and under the same names."""
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def assert_comes_back(name: str, layout: str, tmp_path: Path, target: str | None = None) -> None:
    """That a checkpoint of the package is what it was once it is converted to our layout and back."""
    convert(str(FOLDER / name), layout, tmp_path / "there", target)
    convert(str(tmp_path / "there"), "speculators", tmp_path / "back", target)
    assert same_tensors(FOLDER / name, tmp_path / "back")
    saved, written = (json.loads((folder / "config.json").read_text()) for folder in (FOLDER / name, tmp_path / "back"))
    if target is not None:
        assert written["speculators_config"].pop("verifier")["name_or_path"] == target
        saved["speculators_config"].pop("verifier")
    layers = [config.pop("transformer_layer_config") for config in (saved, written)]
    if layout == "mtp":  # of whose layer only some fields are ours
        layers = [{key: layer[key] for key in layers[0].keys() & layers[1].keys()} for layer in layers]
        assert layers[0]["num_hidden_layers"] == 5
    for config in (saved, written, *layers):
        for key in ("architectures", "auto_map", "transformers_version"):
            config.pop(key, None)
    assert (written, layers[1]) == (saved, layers[0])


def changed(name: str, folder: Path, **keys: object) -> Path:
    """A copy of a checkpoint of the package with other fields, of the layer or of the whole."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(FOLDER / name / "model.safetensors")
    config = json.loads((FOLDER / name / "config.json").read_text())
    layer = config["transformer_layer_config"]
    layer |= {key: keys.pop(key) for key in list(keys) if key in layer and key not in config}
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder
