"""A damaged checkpoint loads or raises a ModelError that names the file and the key; it never hangs or raises raw."""

import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from forerun.errors import MissingWeights, WrongShape
from forerun.fields import read_fields
from forerun.models import stored
from forerun.models.config import config_of, read_special_ids
from forerun.models.generation import KEYS, GenerationDefaults
from forerun.models.loading import Blueprint
from forerun.models.rope import rope_tables
from forerun.models.weights import Checkpoint, check_weights
from kit.checkpoints import TARGET
from models.damage import TEXTS, VALUES, copied, judged, places, write

INDEX = "model.safetensors.index.json"
BLAMES_OTHERS = ("architectures", "model_type", "use_sliding_window")  # what other keys must be hangs on these
SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 1e4, "rope_type": "default"},
    "linear": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_theta": 1e4,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_theta": 1e4,
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": None,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": True,
    },
}
MORE: dict[str, dict[str, Any]] = {
    "plain": {"torch_dtype": "float32", "quantization_config": None, "partial_rotary_factor": None, "rope_theta": 1e4},
    "linear": {
        "architectures": None,
        "sliding_window": None,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "sym": True, "weight_block_size": [128, 64]},
    },
    "llama3": {"forerun_widened": {"from": "small", "parameters_before": 5, "parameters": 7, "recipe": "0"}},
    "yarn": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 2,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3,
    },
}


def changes(document: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Every key of a document replaced by every value: the key's name, and the document."""
    for place in places(document, depth):
        for value in VALUES.values():
            yield (
                next(str(key) for key in reversed(place.path) if isinstance(key, str)),
                place.replaced(document, value),
            )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return copied(TARGET, tmp_path / "model")


@pytest.mark.short("plain", "yarn")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_value_in_config_json_raises_raw(folder: Path, scaling: str) -> None:
    path = folder / "config.json"
    whole = json.loads(path.read_text()) | {"rope_parameters": SCALINGS[scaling]} | MORE[scaling]
    checkpoint, num_loaded = Checkpoint(folder, Blueprint.of(str(folder)).dtype), 0
    if scaling == "yarn":  # the family has biases, and the tensors have none
        checkpoint.stored |= {
            f"model.layers.{i}.self_attn.{x}_proj.bias": replace(entry, shape=entry.shape[:1])
            for i in range(5)
            for x in "qkv"
            for entry in [checkpoint.stored[f"model.layers.{i}.self_attn.{x}_proj.weight"]]
        }
    only = None if scaling == "plain" else {"rope_parameters", *MORE[scaling]}

    def load() -> None:
        fields = read_fields(path)
        config = check_weights(config_of(fields, *read_special_ids(folder)), checkpoint)
        rope_tables(replace(config, max_positions=8))

    write(path, whole)
    load()
    for key, changed in changes(whole, 3):
        if only and not any(changed.get(name) != whole.get(name) for name in only):
            continue
        write(path, changed)
        error = judged(load)
        num_loaded += error is None
        if error is not None:
            assert "config.json" in str(error), f"{key}: {error}"
            by_tensors = isinstance(error, WrongShape | MissingWeights)
            assert by_tensors or key in str(error) or key in BLAMES_OTHERS, f"{key}: {error}"
    assert num_loaded > 10, "nothing is left of the checkpoint: the test shows nothing"


def open_all(folder: Path) -> None:
    """All that is read of a checkpoint before its weights, and what is read of them for the fingerprint."""
    blueprint = Blueprint.of(str(folder))
    GenerationDefaults.read(blueprint.folder)
    blueprint.fingerprint()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_file_with_other_content_is_named_in_the_error(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(TEXTS[text])
    error = judged(lambda: open_all(folder))
    if text == "deep and whole" and name == "generation_config.json":
        assert error is None
    elif text != "deep and whole":
        assert re.search(f"{name} (is damaged .*: download it again|cannot be read)", str(error))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_byte_order_mark_is_ignored(folder: Path, name: str) -> None:
    (folder / name).write_text((folder / name).read_text("utf-8"), "utf-8-sig")
    assert judged(lambda: open_all(folder)) is None


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", INDEX])
def test_a_folder_in_place_of_a_file_is_named_in_the_error(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if name == INDEX:
        (folder / "model.safetensors").unlink()
    (folder / name).mkdir()
    assert name in str(judged(lambda: open_all(folder)))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", INDEX])
def test_an_unreadable_file_is_named_in_the_error(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For root every file is readable: the system's answer is put in its place."""
    if name == INDEX:
        (folder / "model.safetensors").rename(folder / "1.safetensors")
        write(folder / INDEX, {"weight_map": {"model.norm.weight": "1.safetensors"}})
    read, opened = Path.read_text, safetensors.safe_open

    def read_text(path: Path, *args: Any, **options: Any) -> str:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **options)

    def safe_open(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(stored, "safe_open", safe_open)
    error = judged(lambda: open_all(folder))
    assert name in str(error)
    assert "Permission denied" in str(error)


def test_files_that_are_not_loaded_do_not_matter(folder: Path) -> None:
    fingerprint = Blueprint.of(str(folder)).fingerprint()
    (folder / "0.safetensors").mkdir()
    (folder / "1.safetensors").write_bytes(b"not a tensor")
    assert Blueprint.of(str(folder)).fingerprint() == fingerprint


def test_no_value_in_generation_config_json_raises_raw(folder: Path) -> None:
    path = folder / "generation_config.json"
    whole = dict.fromkeys(KEYS, 1) | {"do_sample": True, "bos_token_id": 1, "eos_token_id": [1, 2], "num_beams": 1}
    fields = read_fields(folder / "config.json")

    def load() -> None:
        assert all(i < 512 for i in config_of(fields, *read_special_ids(folder)).eos_ids)
        GenerationDefaults.read(folder).params()

    for key, changed in changes(whole, 2):
        write(path, changed)
        error = judged(load)
        assert error is None or f"generation_config.json: {key}" in str(error)


@pytest.fixture
def sharded(folder: Path) -> dict[str, Any]:
    """The same checkpoint in two shards; its index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in part}, folder / f"{i}.safetensors")
    return {
        "metadata": {"total_size": 5},
        "weight_map": {name: f"{i // 9 > 0:d}.safetensors" for i, name in enumerate(names)},
    }


def test_no_value_in_the_index_raises_raw(folder: Path, sharded: dict[str, Any]) -> None:
    path = folder / INDEX
    write(path, sharded)
    open_all(folder)
    for shard in ("../model/0.safetensors", "/etc/passwd", ".", "..", "0.safetensors/", "a\0", " ", 5, None, [], {}):
        write(path, sharded | {"weight_map": sharded["weight_map"] | {"model.norm.weight": shard}})
        assert f"{INDEX}: weight_map is" in str(judged(lambda: Checkpoint(folder, torch.float32)))
    for key, changed in changes(sharded, 2):
        write(path, changed)
        error = judged(lambda: open_all(folder))
        assert error is None or (INDEX in str(error) and "weight_map" in str(error)) or key in str(error), error
    for text in TEXTS.values():
        path.write_bytes(text)
        assert re.search(rf"{INDEX}(:| is damaged| cannot be read).*again", str(judged(lambda: open_all(folder))))


def test_no_header_of_safetensors_raises_raw(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]
    some = {name: header[name] for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")}
    headers = [header | changed for _, changed in changes(some, 3)]
    assert len(headers) > 200
    for changed in headers:
        text = json.dumps(changed).encode(errors="surrogatepass")
        path.write_bytes(struct.pack("<Q", len(text)) + text + values)
        error = judged(lambda: open_all(folder))
        assert error is None or "model.safetensors" in str(error) or "config.json" in str(error)
    for length in (0, 1, 2**31, 2**63 - 1, 2**64 - 1, len(data)):
        path.write_bytes(struct.pack("<Q", length) + data[8:])
        assert "model.safetensors is damaged" in str(judged(lambda: open_all(folder)))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_file_that_is_cut_short_anywhere_is_named(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    for length in {*range(min(len(data) - 1, 60)), len(data) // 2, len(data) - 2}:
        (folder / name).write_bytes(data[:length])
        error = str(judged(lambda: open_all(folder)))
        assert f"{name} is damaged" in error
        if name == "model.safetensors":
            assert re.search(rf"damaged or incomplete \({length} bytes.*download it again", error)


@given(position=st.integers(0, 2500), byte=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_byte_that_flipped_in_a_header_does_not_raise_raw(position: int, byte: int) -> None:
    source = TARGET
    with tempfile.TemporaryDirectory() as name:
        folder = copied(source, Path(name) / "model")
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[position] = byte
        (folder / "model.safetensors").write_bytes(data)
        judged(lambda: open_all(folder))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have names in Unicode only")
def test_a_folder_whose_name_is_not_unicode_is_named_with_the_fix(tmp_path: Path) -> None:
    folder = copied(TARGET, tmp_path / os.fsdecode(b"\xff\xfe"))
    with pytest.raises(MissingWeights, match=r"has a name that is not UTF-8, .*: rename it, or its folder"):
        open_all(folder)
