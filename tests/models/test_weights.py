"""Checkpoints are found, checked before they are loaded, and loaded within the memory of their weights."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import MissingWeights, UnsupportedModel, WrongShape
from forerun.models import weights
from forerun.models.config import ModelConfig, read_config
from forerun.models.projections import tensor_shapes
from forerun.models.weights import Checkpoint, candidate_dtypes, check_weights
from kit.checkpoints import SMALL, TARGET
from kit.command import apart
from kit.sparse import BASE, FAMILIES

SRC = Path(weights.__file__).parents[2]


def save_shards(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    """A sharded checkpoint as Hugging Face lays it out."""
    places = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name)
        places |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@pytest.fixture
def sharded(tmp_path: Path) -> dict[str, Tensor]:
    """Two shards, written into tmp_path; the tensors they hold."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(4, 6, generator=generator) for name in ("a", "b", "c")}
    save_shards(tmp_path, [{"a": tensors["a"], "c": tensors["c"]}, {"b": tensors["b"]}])
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_and_single_files_give_the_same_tensors(
    tmp_path: Path, sharded: dict[str, Tensor], dtype: torch.dtype
) -> None:
    (tmp_path / "single").mkdir()
    save_file(sharded, tmp_path / "single" / "model.safetensors")
    for folder in (tmp_path, tmp_path / "single"):
        checkpoint = Checkpoint(folder, dtype)
        assert "d" not in checkpoint
        for name, tensor in sharded.items():
            assert name in checkpoint
            taken = checkpoint.take(name, (4, 6))
            assert torch.equal(taken, tensor.to(dtype))
            assert taken.dtype == dtype


def test_numbers_that_float16_does_not_have_are_refused(tmp_path: Path) -> None:
    """Instead of becoming infinities. Those that a checkpoint has itself are its own."""
    near, beyond, infinite = (torch.tensor(x) for x in ([1.0, 65519.0, 1e-9], [7e4], [math.inf, 1.0]))
    save_file({"a": near, "b": beyond, "c": infinite.half()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float16)
    assert checkpoint.take("a", (3,)).tolist() == [1.0, 65504.0, 0.0]
    assert torch.equal(checkpoint.take("c", (2,)), infinite.half())
    with pytest.raises(UnsupportedModel, match=r"b has numbers above 65504, .* use dtype bfloat16 or float32"):
        checkpoint.take("b", (1,))
    assert Checkpoint(tmp_path, torch.float32).take("b", (1,)) == 7e4


def test_a_tensor_owns_its_memory(tmp_path: Path, sharded: dict[str, Tensor]) -> None:
    """Not a view of the file: it can be written to, and outlives the file."""
    taken = Checkpoint(tmp_path, torch.float32).take("a", (4, 6))
    assert taken.is_contiguous()
    assert taken.untyped_storage().nbytes() == taken.numel() * 4
    taken += 1
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(taken, sharded["a"] + 1)


def test_a_tensor_missing_from_its_shard_is_named(tmp_path: Path, sharded: dict[str, Tensor]) -> None:
    save_file({"other": sharded["b"]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(MissingWeights, match=r"00002\.safetensors has no tensor b, which model\.safetensors\.index"):
        Checkpoint(tmp_path, torch.float32)


def test_a_folder_without_safetensors_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingWeights, match=r"has no model\.safetensors and no .*: download the weights"):
        Checkpoint(tmp_path, torch.float32)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(MissingWeights, match=r"has pytorch_model\.bin but no safetensors.*save_pretrained"):
        Checkpoint(tmp_path, torch.float32)


MEASURE = """
import sys, torch
from pathlib import Path
from forerun.models.weights import Checkpoint

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

Checkpoint(Path(sys.argv[2]), torch.float32).take("warm", (256, 256))  # libraries that load at first use
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = status("VmRSS")
checkpoint = Checkpoint(Path(sys.argv[1]), torch.bfloat16)
names = sorted(checkpoint.stored, key=lambda name: name.split(".")[::-1])  # hops from shard to shard
weights = [checkpoint.take(name, checkpoint.stored[name].shape) for name in names]
print(status("VmHWM") - before, sum(w.nbytes for w in weights))
"""


@pytest.mark.full
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak memory counter")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_loading_holds_the_weights_and_never_a_second_copy(tmp_path: Path, stored: torch.dtype) -> None:
    """Peak memory of a process that loads 4 shards of 30 MB in an order that hops between them."""
    tensors = 5
    width = 30_000_000 // (tensors * stored.itemsize * 1000)
    generator = torch.Generator().manual_seed(2)
    save_shards(
        tmp_path,
        [
            {f"{s}.{t}": torch.randn(width, 1000, generator=generator).to(stored) for t in range(tensors)}
            for s in range(4)
        ],
    )
    (tmp_path / "warm").mkdir()
    save_file({"warm": torch.ones(256, 256)}, tmp_path / "warm" / "model.safetensors")
    shard = (tmp_path / "model-00001-of-00004.safetensors").stat().st_size
    run = apart("-c", MEASURE, str(tmp_path), str(tmp_path / "warm"))
    assert run.returncode == 0, run.stderr
    growth, loaded = map(int, run.stdout.split())
    assert loaded == 4 * tensors * width * 1000 * 2
    assert loaded * 0.95 < growth, "the weights were not resident: the measurement is void"
    assert growth < loaded + shard / tensors + 12e6, "more than the weights and one tensor"


def save_model(folder: Path, config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(config).items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_the_models_in_the_repository_have_exactly_the_expected_tensors(caplog: pytest.LogCaptureFixture) -> None:
    for folder in (TARGET, SMALL):
        config = read_config(folder)
        stored = load_file(folder / "model.safetensors")
        assert tensor_shapes(config) == {name: tuple(tensor.shape) for name, tensor in stored.items()}
        assert check_weights(config, Checkpoint(folder, torch.float32)) == config
    assert not caplog.records


@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_every_expected_tensor_is_checked(tmp_path: Path, family: str) -> None:
    config = replace(read_config(TARGET), tied=False, qkv_bias=True, layers=2)
    if family in FAMILIES:
        (tmp_path / "config.json").write_text(json.dumps(BASE | FAMILIES[family] | {"num_hidden_layers": 2}))
        config = read_config(tmp_path)
    save_model(tmp_path, config)
    checkpoint = Checkpoint(tmp_path, torch.float32)
    assert check_weights(config, checkpoint) == config
    whole = dict(checkpoint.stored)
    assert ("lm_head.weight" in whole) != config.tied
    for name, entry in whole.items():
        checkpoint.stored = {other: stored for other, stored in whole.items() if other != name}
        with pytest.raises(MissingWeights, match=f"{tmp_path} has no tensor {name}[:,] .*download it again"):
            check_weights(config, checkpoint)
        checkpoint.stored = whole | {name: replace(entry, shape=entry.shape[:-1])}
        with pytest.raises(WrongShape, match=rf"model\.safetensors: {name} has shape .*, but config.json needs "):
            check_weights(config, checkpoint)


def test_unused_tensors_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = read_config(TARGET)
    tensors = save_model(tmp_path, config)
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | tables, tmp_path / "model.safetensors")
    check_weights(config, Checkpoint(tmp_path, torch.float32))
    assert not caplog.records
    others = {"score.weight": torch.ones(2, 64), "model.layers.5.mlp.up_proj.weight": torch.ones(3)}
    save_file(tensors | others, tmp_path / "model.safetensors")
    check_weights(config, Checkpoint(tmp_path, torch.float32))
    assert re.search(r"2 tensors are not used, such as (score|model\.layers\.5)", caplog.text)


STRANGE = [
    "lm_head.bias",
    "model.norm.bias",
    "model.embed_norm.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.4.mlp.down_proj.factor",
    "model.layers.4.self_attn.q_norm.weight",
]


@pytest.mark.parametrize("name", STRANGE)
def test_a_tensor_that_would_change_the_logits_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config = read_config(TARGET)
    tensors = save_model(tmp_path, config)
    save_file(tensors | {name: torch.full((8,), 1e-30)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"model.safetensors: the tensor {re.escape(name)} would change"):
        check_weights(config, Checkpoint(tmp_path, torch.float32))


@pytest.mark.parametrize("name", [name for name in STRANGE if name.endswith(".bias")])
def test_a_bias_of_zeros_changes_nothing(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = read_config(TARGET)
    save_file(save_model(tmp_path, config) | {name: torch.zeros(8)}, tmp_path / "model.safetensors")
    check_weights(config, Checkpoint(tmp_path, torch.float32))
    assert not caplog.records


def test_a_stored_head_counts_where_it_differs_from_the_embedding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_config(TARGET)
    assert config.tied
    tensors = save_model(tmp_path, config)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    assert check_weights(config, Checkpoint(tmp_path, torch.float32)).tied
    assert not caplog.records
    save_file(tensors | {"lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    judged = check_weights(config, Checkpoint(tmp_path, torch.float32))
    assert "lm_head.weight differs from the embedding" in caplog.text
    assert judged == replace(config, tied=False)


def test_explicit_formats_are_used_unchanged() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert candidate_dtypes(str(dtype).removeprefix("torch."), read_config(TARGET)) == (dtype,)


def test_auto_prefers_the_checkpoints_own_format() -> None:
    """Except where activations would be of float16 too, whose range they might leave."""
    narrow, wide = (torch.bfloat16, torch.float32), (torch.float32,)
    wanted = {torch.float32: wide, torch.float64: wide, torch.bfloat16: narrow}
    for stored, held in (wanted | {torch.float16: (torch.float16, torch.float32)}).items():
        assert candidate_dtypes("auto", replace(read_config(TARGET), dtype=stored)) == held
    for stored, held in (wanted | {torch.float16: narrow}).items():
        assert candidate_dtypes("auto", replace(read_config(TARGET), dtype=stored), activations_too=True) == held
