"""The paths of the models and data in the repository; and functions that write checkpoints for tests."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
SRC, DATA = ROOT / "src", ROOT / "tests" / "data"
TARGET = DATA / "stories260k"  # a Llama of 260 k parameters, 64 wide, 5 layers, 512 positions: most tests' target
SMALL = DATA / "stories280k"  # trained apart from the target on the same tokenizer; 256 positions
EMBEDDING = "model.embed_tokens.weight"  # tied: the target's output head too


def read_json(path: Path) -> dict[str, object]:
    """The object in a file of JSON."""
    fields: dict[str, object] = json.loads(path.read_text())
    return fields


def written(folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint with this configuration and these weights; its folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def rewritten(
    folder: Path, tensors: Mapping[str, Tensor | None], keys: Mapping[str, object], into: Path | None = None
) -> Path:
    """Change tensors and config keys of a checkpoint, in place or `into` another folder; None removes a tensor."""
    path = folder / "model.safetensors"
    stored = (load_file(path) if path.exists() else {}) | dict(tensors)
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    return written(into or folder, read_json(folder / "config.json") | dict(keys), kept)


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weights, to the bit and under the same names."""
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)
