"""Experts: a token's bits do not depend on other tokens' experts; routes, tensor names, damage, memory, counts."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.config import KernelChoice, Quantization
from forerun.errors import MissingWeights, UnsupportedModel, WrongShape
from forerun.models import choice as choosing
from forerun.models.backends.native_check import checked
from forerun.models.config import read_config
from forerun.models.families import STACKED_MOE
from forerun.models.loading import Blueprint
from forerun.models.projections import LayerTable, tensor_shapes
from forerun.models.runner import Read, Runner
from kit.checkpoints import TARGET
from kit.compiled import LEVELS, compiled_for, require_compiler
from kit.reading import bits_of_any_reading, logits_in_pieces
from kit.sparse import FAMILIES, write_sparse
from kit.unchecked import unchecked
from models.damage import ABSENT, VALUES, write

FORMATS: list[tuple[str, Quantization | None]] = [
    ("float32", None),
    ("bfloat16", None),
    ("float16", None),
    ("float32", "int8"),
    ("float32", "int4"),
]
LENGTH = 150


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family."""
    root = tmp_path_factory.mktemp("sparse")
    return {family: write_sparse(root / family, family) for family in FAMILIES}


def load(folder: Path, choice: KernelChoice, dtype: str = "float32", quantize: Quantization | None = None) -> Runner:
    if choice == "native":
        require_compiler()
    return Blueprint.of(str(folder), dtype=dtype, quantize=quantize, kernels=choice).load(2048)


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(length)]


@pytest.mark.short("qwen3_moe-*'int8'*")
@pytest.mark.parametrize("numbers", FORMATS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_close_to_torchs_operators(
    folders: dict[str, Path], family: str, numbers: tuple[str, Quantization | None]
) -> None:
    """In float32 everywhere; in other formats where both choose the same experts, as they do for most tokens."""
    tokens = text(60)
    native, by_torch = (
        logits_in_pieces(load(folders[family], by, *numbers), tokens, [60]) for by in ("native", "torch")
    )
    if numbers == ("float32", None):
        assert (native - by_torch).abs().max() < 1e-4 * by_torch.abs().max()
    error = (native - by_torch).std(1) / by_torch.std(1)
    assert error.quantile(0.1) < 0.1


@pytest.mark.short(
    "qwen3_moe-*float32', None*-native",
    "gpt_oss-*bfloat16*-torch",
    "mixtral-*'int8'*-avx2",
    "qwen3_moe-*'int4'*-native",
)
@pytest.mark.parametrize("by", [*LEVELS, "torch"])
@pytest.mark.parametrize("numbers", FORMATS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(
    folders: dict[str, Path],
    family: str,
    numbers: tuple[str, Quantization | None],
    by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With torch's operators and with the kernels of every instruction set."""
    if by != "torch":
        kernels = checked(compiled_for(by))
        monkeypatch.setattr(choosing, "find_kernels", lambda choice, *_: kernels if choice == "native" else None)
    found = bits_of_any_reading(load(folders[family], "torch" if by == "torch" else "native", *numbers), text(LENGTH))
    assert found.std() > 1.5
    if numbers == ("float32", None):
        by_torch = logits_in_pieces(load(folders[family], "torch"), text(LENGTH), [LENGTH])
        assert (found - by_torch).abs().max() < 1e-4 * by_torch.abs().max()


@pytest.mark.short("mixtral")
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_that_grow_by_a_token_fit_into_scratch_memory(folders: dict[str, Path], family: str) -> None:
    """Scratch memory is made for more tokens than the pass at hand has, and for as many pairs as these could have."""
    runner, tokens = load(folders[family], "native"), text(LENGTH)
    whole = logits_in_pieces(load(folders[family], "native"), tokens, [LENGTH])
    with unchecked():
        for length in range(1, 70):
            assert torch.equal(logits_in_pieces(runner, tokens[:length], [length]), whole[:length]), length


def in_stacks(folder: Path, family: str) -> dict[str, Tensor]:
    """A checkpoint's tensors with each layer's experts in one tensor."""
    config = read_config(folder)
    assert config.experts is not None
    stored, names = load_file(folder / "model.safetensors"), config.experts.names
    tables = {i: LayerTable.of(config, i) for i in config.experts.layers}
    for i, table in tables.items():
        prefix = f"model.layers.{i}."

        def all_of(part: str, prefix: str = prefix, table: LayerTable = table) -> Tensor:
            each = [getattr(mlp, part).weight_shapes() for mlp in table.experts]
            return torch.stack([torch.cat([stored.pop(prefix + name) for name in weights]) for weights in each])

        gate_up, down = all_of("gate_up"), all_of("down")
        stored[prefix + STACKED_MOE.gate_up[0]], stored[prefix + STACKED_MOE.down] = gate_up, down
        stored[f"{prefix}{STACKED_MOE.router}.weight"] = stored.pop(f"{prefix}{names.router}.weight")
    return stored


@pytest.mark.short("qwen3_moe")
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_stored_in_one_tensor_compute_the_same(folders: dict[str, Path], family: str, tmp_path: Path) -> None:
    folder = write_sparse(tmp_path / family, family)
    save_file(in_stacks(folder, family), folder / "model.safetensors")
    blueprint = Blueprint.of(str(folder), kernels="torch")
    assert blueprint.config.experts is not None
    assert blueprint.config.experts.names == STACKED_MOE
    assert tensor_shapes(blueprint.config).keys() == load_file(folder / "model.safetensors").keys()
    numbered = logits_in_pieces(load(folders[family], "torch"), text(20), [20])
    assert torch.equal(logits_in_pieces(blueprint.load(64), text(20), [20]), numbered)


@pytest.mark.parametrize("choice", ["native", "torch"])
def test_equal_experts_are_chosen_by_lowest_number(tmp_path: Path, choice: KernelChoice) -> None:
    """A router of zeros chooses the first experts: the others may be anything."""
    folder = write_sparse(tmp_path / "model", "mixtral")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        tensors[name] *= not name.endswith("block_sparse_moe.gate.weight")
    save_file(tensors, folder / "model.safetensors")
    before = logits_in_pieces(load(folder, choice), text(30), [30])
    for name in tensors:
        tensors[name] *= 1.0 - (".experts.2." in name or ".experts.3." in name)
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits_in_pieces(load(folder, choice), text(30), [30]), before)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_nan_affects_its_own_row_only(folders: dict[str, Path], family: str) -> None:
    runner = load(folders[family], "native")
    clean = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    spoilt = clean.clone()
    spoilt[2] = math.nan
    reads = [Read(i, [5], judged=[0]) for i in range(6)]
    found = []
    for inputs in (clean, spoilt):
        found.append(runner.read(reads, inputs=inputs).logits)
        runner.release(range(6))
    assert found[1][2].isnan().all()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(found[1][rest], found[0][rest])


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_is_planned_for_all_experts_although_a_pass_reads_some(folders: dict[str, Path], family: str) -> None:
    blueprint = Blueprint.of(str(folders[family]), dtype="float32")
    tensors = load_file(folders[family] / "model.safetensors")
    e, tied = blueprint.config.experts, blueprint.config.tied
    assert e is not None
    embedding = tensors["model.embed_tokens.weight"].numel()
    held = sum(tensor.numel() for tensor in tensors.values()) + embedding * tied
    assert blueprint.memory.weights_bytes == 4 * held
    experts = sum(t.numel() for name, t in tensors.items() if ".experts." in name)
    idle = experts * (e.count - e.active) // e.count
    assert blueprint.pass_bytes == 4 * (held - embedding - idle)
    eighth = Blueprint.of(str(folders[family]), quantize="int8")
    assert held - embedding <= eighth.weights_bytes - 4 * embedding <= held


def distinct(runner: Runner, num_tokens: int, seed: int) -> int:
    """Experts that a pass over so many random tokens reads, all layers together."""
    before = runner.decoder.num_experts_read
    runner.read([Read(i, [token]) for i, token in enumerate(text(num_tokens, seed))])
    runner.release(range(num_tokens))
    return runner.decoder.num_experts_read - before


@pytest.mark.full
@pytest.mark.parametrize("choice", ["native", "torch"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 16])
def test_experts_that_are_read_are_counted(folders: dict[str, Path], choice: KernelChoice, num_tokens: int) -> None:
    """Of N experts, t tokens that choose K at random read N (1 - (1 - K/N)^t)."""
    runner = load(folders["qwen3_moe"], choice)
    c = runner.decoder.config
    assert c.experts is not None
    n, k = c.experts.count, c.experts.active
    with unchecked():
        counts = [distinct(runner, num_tokens, seed) / c.layers for seed in range(40)]
    expected = n * (1 - (1 - k / n) ** num_tokens)
    assert abs(sum(counts) / len(counts) - expected) < 0.12 * expected
    assert num_tokens > 1 or set(counts) == {k}


def test_dense_layers_read_no_experts(folders: dict[str, Path]) -> None:
    dense, mixed = load(TARGET, "torch"), load(folders["qwen2_moe"], "torch")
    assert distinct(dense, 4, 0) == 0
    assert distinct(mixed, 1, 0) == 3 * 3  # three of four layers, three experts each


@pytest.mark.short("mixtral", "gpt_oss")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_in_config_json_raises_raw(tmp_path: Path, family: str) -> None:
    """Any value under a key that says something of experts: it loads, or an error names the file."""
    folder = write_sparse(tmp_path / "model", family)
    path, keys = folder / "config.json", FAMILIES[family].keys() - {"architectures"}
    whole, messages = json.loads(path.read_text(encoding="utf-8")), []
    for key in keys | {"decoder_sparse_step", "mlp_only_layers", "swiglu_alpha", "norm_topk_prob", "rope_scaling"}:
        for value in VALUES.values():
            write(path, {k: v for k, v in (whole | {key: value}).items() if v is not ABSENT})
            try:
                Blueprint.of(str(folder), kernels="torch")
            except (MissingWeights, WrongShape, UnsupportedModel) as error:
                messages.append(str(error))
    assert len(messages) > 50
    assert all("config.json" in message and len(message) < 1500 for message in messages)
