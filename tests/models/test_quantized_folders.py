"""Quantised folders load like other models: weights are those that the formats define, kept quantised if possible."""

import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.device import Placement
from forerun.errors import MissingWeights, ModelError, UnsupportedModel, WrongShape
from forerun.models.backends.gpu.backend import GpuBackend
from forerun.models.backends.gpu.groups import PackedGroups
from forerun.models.backends.torch_cpu.backend import TorchBackend
from forerun.models.backends.torch_cpu.grouped import GroupedLinear, GroupedWeight
from forerun.models.decoder import Decoder
from forerun.models.layer import Linear
from forerun.models.loading import Blueprint
from forerun.models.packing import WeightLoader
from forerun.models.quantized.tensors import QuantizedTensor
from forerun.models.weights import Checkpoint
from kit.checkpoints import read_json, rewritten, written
from kit.compiled import require_compiler
from kit.quantized_folders import KEPT, KINDS, write_mxfp4, write_quantized
from kit.reading import logits_in_pieces
from kit.sparse import write_sparse

SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256} | {
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
FIXED = Placement(torch.device("cpu"), fixed=True)
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
    "qwen3_moe": EXPERTS,
}
TOKENS = torch.randint(3, 500, (60,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each family, not quantised."""
    folder = tmp_path_factory.mktemp("sources")
    return {name: write_sparse(folder / name, "qwen3_moe", **SIZES, **options) for name, options in FAMILIES.items()}


def logits(folder: Path, **options: Any) -> Tensor:
    return logits_in_pieces(Blueprint.of(str(folder), **options).load(128), TOKENS, [len(TOKENS)])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_the_format_defines(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    meant = write_quantized(sources["qwen3_moe"], tmp_path, kind)
    checkpoint = Checkpoint.of_model(tmp_path, torch.float32)
    assert checkpoint.stored.keys() == meant.keys()
    for name, weight in meant.items():
        shape = tuple(weight.shape)
        assert torch.equal(checkpoint.take(name, shape), weight)
        groups = checkpoint.groups(name, shape)
        assert (groups is not None) == (KINDS[kind].stays and not any(part in name for part in KEPT)), name
        assert groups is None or torch.equal(groups.dense(), weight)
    stays = "weights" if KINDS[kind].stays else "weights unpacked"
    require_compiler()
    assert Blueprint.of(str(tmp_path)).format == f"bfloat16, {KINDS[kind].label} {stays}"
    assert Blueprint.of(str(tmp_path), kernels="torch").format == f"bfloat16, {KINDS[kind].label} weights unpacked"


@pytest.mark.parametrize(
    "kind", ["awq, 64", "gptq, 8 bits, zeros", "compressed, 64", "fp8", "fp8, 48 x 192", "compressed, fp8"]
)
def test_the_memory_plan_has_the_size_of_weights_on_a_gpu(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    meant = write_quantized(sources["llama"], tmp_path, kind)
    checkpoint = Checkpoint.of_model(tmp_path, torch.bfloat16, on_gpu=True)
    for name, entry in checkpoint.stored.items():
        if isinstance(entry, QuantizedTensor) and checkpoint.group_bytes(entry):
            groups = checkpoint.groups(name, entry.shape)
            assert groups is not None
            assert torch.equal(groups.dense(), meant[name])
            packed = PackedGroups.of(groups, torch.device("cpu"))
            held = sum(t.nbytes for t in (packed.numbers, packed.scales, packed.least) if t is not None)
            outputs = entry.shape[0] if packed.scales.shape[0] == 1 else 0
            assert held - 4 * outputs <= checkpoint.group_bytes(entry) * math.prod(entry.shape) < 1.1 * held, name


def test_parts_of_a_layer_in_whole_and_in_floating_numbers_are_unpacked(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """As one layer they would have no numbers that hold both."""
    of_both = [write_quantized(sources["llama"], tmp_path / kind, kind) for kind in ("compressed, bytes", "fp8")]
    whole, floats = (
        Checkpoint.of_model(tmp_path / kind, torch.bfloat16, on_gpu=True) for kind in ("compressed, bytes", "fp8")
    )
    config = Blueprint.of(str(tmp_path / "fp8"), device=FIXED).config
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]

    def take_groups(name: str, shape: tuple[int, ...], part: int | None = None) -> GroupedWeight | None:
        return (floats if name == names[0] else whole).groups(name, shape, part)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        return (floats if name == names[0] else whole).take(name, shape)

    decoder = Decoder(config, WeightLoader(take, torch.bfloat16, GpuBackend(FIXED), None, take_groups))
    got = decoder.layers[0].attention.qkv(torch.eye(config.hidden, dtype=torch.bfloat16))
    wanted = torch.cat([of_both[name == names[0]][name] for name in names])
    assert torch.equal(got, wanted.T.bfloat16())


@pytest.mark.short("llama-*", "phi3-awq*", "phi3-gptq*", "qwen3_moe-awq*", "qwen3_moe-fp8")
@pytest.mark.parametrize("kind", ["awq, 64", "gptq, by activations", "compressed, bytes", "fp8", "nf4, nested"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unpacked_weights_give_the_bits_of_a_plain_folder(
    family: str, kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    meant = write_quantized(sources[family], tmp_path / "quantised", kind)
    plain = written(tmp_path / "plain", read_json(sources[family] / "config.json"), meant)
    quantised, expected = (logits(f, dtype="float32", kernels="torch") for f in (tmp_path / "quantised", plain))
    assert torch.equal(quantised, expected)


def pairs(one: Decoder, other: Decoder) -> list[tuple[Linear, Linear]]:
    """The linear layers of two decoders of one model."""
    layers = [
        [
            (layer.attention.qkv, layer.attention.out),
            *((m.gate_up, m.down) for m in (layer.mlp.dense, *layer.mlp.experts) if m),
        ]
        for decoder in (one, other)
        for layer in decoder.layers
    ]
    flat = [linear for parts in layers for part in parts for linear in part]
    half = len(flat) // 2
    return [*zip([*flat[:half], one.head], [*flat[half:], other.head], strict=True)]


@pytest.mark.short("llama-*", "phi3-awq*", "qwen3_moe-gptq*")
@pytest.mark.parametrize("kind", ["awq, 128", "gptq, 8 bits, zeros", "compressed, 64", "bitsandbytes, bytes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_kept_quantised_have_the_bits_of_the_definition(
    family: str, kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    require_compiler()
    meant = write_quantized(sources[family], tmp_path / "quantised", kind, ("embed_tokens", "norm", "mlp.gate."))
    blueprint = Blueprint.of(str(tmp_path / "quantised"), kernels="native")
    assert blueprint.keeps_groups
    checkpoint = blueprint.checkpoint(blueprint.dtype)
    weights = WeightLoader(checkpoint.take, blueprint.dtype, TorchBackend(), None, checkpoint.groups)
    by_torch = Decoder(blueprint.config, weights)
    compared = pairs(blueprint.load(128).decoder, by_torch)
    assert all(isinstance(definition, GroupedLinear) for _, definition in compared)
    for layer, definition in compared:
        assert isinstance(definition, GroupedLinear)
        x = torch.randn(5, definition.weight.numbers.shape[1], generator=torch.Generator().manual_seed(1))
        assert torch.equal(layer(x), definition(x))
    plain = logits(written(tmp_path / "plain", read_json(sources[family] / "config.json"), meant), dtype="float32")
    kept = logits(tmp_path / "quantised", kernels="native")
    assert (kept - plain).abs().median() < 0.04 * plain.std()  # some tokens take other experts


@pytest.mark.parametrize(
    "kind",
    [
        "awq, 64",
        "gptq, by activations",
        "compressed, bytes",
        "fp8",
        "compressed, fp8",
        "compressed, fp8, all",
        "fp8, 48 x 80",
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_passes_of_fixed_shape_keep_weights_quantised(
    family: str, kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """As on a GPU, where FP8 stays too, and inputs are not rounded."""
    meant = write_quantized(sources[family], tmp_path / "quantised", kind)
    held, plain = (Blueprint.of(str(f), device=FIXED) for f in (tmp_path / "quantised", sources[family]))
    stays = KINDS[kind].stays or (KINDS[kind].label == "FP8" and kind != "fp8, 48 x 80")
    assert held.keeps_groups == stays
    assert held.format == f"bfloat16, {KINDS[kind].label} weights{'' if stays else ' unpacked'}"
    assert not stays or held.weights_bytes < 0.75 * plain.weights_bytes
    layer = held.load(128).decoder.layers[0].attention
    for linear, parts in ((layer.qkv, "qkv"), (layer.out, "o")):
        wanted = torch.cat([meant[f"model.layers.0.self_attn.{part}_proj.weight"] for part in parts])
        x = torch.eye(wanted.shape[1])
        assert torch.equal(
            linear(x if stays else x.bfloat16()).float(), wanted.T if stays else wanted.T.bfloat16().float()
        )


def test_unquantised_layers_stay_plain_and_mixed_ones_are_unpacked(sources: dict[str, Path], tmp_path: Path) -> None:
    """Queries, keys and values are one layer here: with one of them plain, all are."""
    meant = write_quantized(sources["llama"], tmp_path / "quantised", "awq, 64", (*KEPT, "layers.0.self_attn.v_proj"))
    assert len(load_file(tmp_path / "quantised" / "model.safetensors")) > len(meant)
    kept = logits(tmp_path / "quantised", kernels="native")
    plain = logits(written(tmp_path / "plain", read_json(sources["llama"] / "config.json"), meant), dtype="float32")
    assert (kept - plain).abs().median() < 0.04 * plain.std()


def test_experts_in_mxfp4_are_those_that_transformers_unpacks(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = write_sparse(tmp_path / "source", "gpt_oss", intermediate_size=96, torch_dtype="bfloat16")
    meant = write_mxfp4(source, tmp_path / "quantised")
    checkpoint = Checkpoint(tmp_path / "quantised", torch.bfloat16)
    stored = load_file(tmp_path / "quantised" / "model.safetensors")
    for name in [n.removesuffix("_blocks") for n in stored if n.endswith("_blocks")]:
        taken = checkpoint.take(name, tuple(meant[name].shape))
        assert torch.equal(taken, meant[name].bfloat16())
        assert torch.equal(taken, convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"]))
        for expert in range(len(taken)):
            groups = checkpoint.groups(name, tuple(meant[name].shape), expert)
            assert groups is not None
            assert torch.equal(groups.dense(), meant[name][expert].T)
    plain = written(tmp_path / "plain", read_json(source / "config.json"), meant)
    assert torch.equal(logits(tmp_path / "quantised", kernels="torch"), logits(plain, kernels="torch"))


@pytest.mark.full
def test_experts_in_mxfp4_take_a_byte_and_their_scales(tmp_path: Path) -> None:
    """What is planned is what the process grows by, to the rest of the model."""
    require_compiler()
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 16, "torch_dtype": "bfloat16"}
    write_mxfp4(write_sparse(tmp_path / "source", "gpt_oss", **sizes), tmp_path / "quantised")
    blueprint = Blueprint.of(str(tmp_path / "quantised"))
    assert blueprint.format == "bfloat16, MXFP4 weights"
    experts = 4 * 16 * 3 * 512 * 1024  # of all layers
    layers = blueprint.weights_bytes - 2 * 2 * 512 * 512  # without the table and the head
    assert 1.0625 * experts < layers < 1.0625 * experts + 2 * 4 * 4 * 512 * 512
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    runner = blueprint.load(64)
    grown = process.memory_info().rss - before
    assert runner is not None
    assert grown < 1.25 * blueprint.weights_bytes, (grown, blueprint.weights_bytes)


UP = "model.layers.0.mlp.up_proj"
CHANGES: list[Callable[[Tensor], Tensor | None]] = [
    lambda _: None,
    lambda t: t.flatten()[:-1],
    lambda t: t[..., :-1] if t.dim() else t[None],
    lambda t: t.flatten()[:1],
    lambda t: t[None],
    lambda t: t.float(),
    lambda t: torch.cat([t, t]) if t.dim() else t + 1,
    lambda t: torch.zeros_like(t) - 1 if t.dtype in (torch.int32, torch.int64) else t.flatten()[:0],
]
Cut = Callable[[Tensor], Tensor | None]
FAULTS: list[tuple[str, str, Cut, type[ModelError], str]] = [
    ("awq, 64", ".scales", lambda _: None, MissingWeights, r"up_proj\.qweight, but not .*up_proj\.scales"),
    ("awq, 64", ".qweight", lambda _: None, MissingWeights, "up_proj.* exists, but not the weight"),
    ("awq, 64", ".qzeros", lambda t: t[:, 1:], WrongShape, r"\.qzeros has shape \[2, 31\]; .* must be \[2, 32\]"),
    ("awq, 64", ".qweight", lambda t: t[0], WrongShape, r"up_proj\.qweight has shape .*; it must be a matrix"),
    ("awq, 64", ".scales", lambda t: t.double(), UnsupportedModel, r"scales is stored as F64; supported: F16, BF16"),
    (
        "awq, 64",
        ".qweight",
        lambda t: t[:96],
        WrongShape,
        r"up_proj\.weight has shape \[256, 96\], but config.json needs",
    ),
    ("awq, 64", ".qweight", lambda t: t[:97], WrongShape, "scales has .*97 inputs cannot be divided into 2"),
    ("gptq, 128", ".qzeros", lambda t: t[:, 1:], WrongShape, r"qzeros .*for 256 outputs it is neither 4 nor 8"),
    ("gptq, 128", ".g_idx", lambda t: t + 1, WrongShape, r"up_proj\.g_idx has group 1, but only 1 exist"),
    ("compressed, 64", ".weight_shape", lambda t: t + 1, WrongShape, r"weight_packed .*, \[257, 129\], it is neither"),
    ("compressed, 64", ".weight_scale", lambda t: t[1:], WrongShape, r"weight_scale has shape .*has 256 outputs"),
    ("compressed, bytes", ".weight_scale", lambda _: None, UnsupportedModel, "weight is stored as I8, without scales"),
    ("compressed, bytes", ".weight", lambda t: t.float(), UnsupportedModel, "weight is stored as F32; supported: I8"),
    ("fp8", ".weight_scale_inv", lambda _: None, UnsupportedModel, "weight is stored as F8_E4M3, without scales"),
    ("fp8", ".weight_scale_inv", lambda t: t[1:], WrongShape, r"scale_inv has shape .*\[2, 1\] blocks of 128 x 128"),
    ("nf4", ".weight.absmax", lambda t: t[1:], WrongShape, r"up_proj\.weight\.absmax has shape"),
    ("nf4", ".weight.quant_state.bitsandbytes__nf4", lambda t: t[1:], MissingWeights, "nf4 is damaged"),
    ("nf4, nested", ".weight.nested_absmax", lambda _: None, MissingWeights, r"but not .*nested_absmax"),
    ("bitsandbytes, bytes", ".weight_format", lambda t: t + 2, UnsupportedModel, "numbers are not stored row by row"),
]


@pytest.mark.parametrize(("kind", "end", "cut", "error", "message"), FAULTS, ids=[f"{k}{e}" for k, e, *_ in FAULTS])
def test_a_fault_names_the_tensor(
    kind: str, end: str, cut: Cut, error: type[ModelError], message: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    write_quantized(sources["llama"], tmp_path, kind)
    stored = load_file(tmp_path / "model.safetensors")
    rewritten(tmp_path, {UP + end: cut(stored[UP + end])}, {})
    with pytest.raises(error, match=message):
        Blueprint.of(str(tmp_path)).load(128)


@pytest.mark.parametrize("kind", ["fp8", "nf4", "nf4, nested"])
def test_blocks_larger_than_a_weight_take_no_memory(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """However large a file says that they are: a block of 2^31 numbers would not fit."""
    write_quantized(sources["llama"], tmp_path, kind)
    stored, most, cuts = load_file(tmp_path / "model.safetensors"), 2**31 - 1, {}
    if kind == "fp8":
        cuts, changes = {f"{UP}.weight_scale_inv": torch.ones(1, 1)}, {"quantization_config": dict(KINDS[kind].config)}
        changes["quantization_config"]["weight_block_size"] = [2**62, 2**62]
    else:
        name, changes = f"{UP}.weight.quant_state.bitsandbytes__nf4", {}
        state = json.loads(bytes(stored[name].tolist())) | {"blocksize": most, "nested_blocksize": None}
        cuts = {f"{UP}.weight.absmax": torch.ones(1)}
        if "nested" in kind:
            state["nested_blocksize"], cuts = most, {f"{UP}.weight.absmax": torch.zeros(1, dtype=torch.uint8)}
            cuts[f"{UP}.weight.nested_absmax"] = torch.ones(1)
        cuts[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    kept = {each: None for each in stored if not each.startswith(UP)} if kind == "fp8" else {}
    rewritten(tmp_path, kept | cuts, changes)
    weight = Checkpoint.of_model(tmp_path, torch.float32).take(f"{UP}.weight", (256, 128))
    assert weight.isfinite().all()


@pytest.mark.parametrize(
    "kind", ["awq, 64", "gptq, 32, zeros", "compressed, mixed", "compressed, bytes", "fp8", "nf4, nested"]
)
def test_no_damage_raises_raw(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    write_quantized(sources["llama"], tmp_path / "whole", kind)
    stored, errors = load_file(tmp_path / "whole" / "model.safetensors"), list[str]()
    stored = {name: tensor for name, tensor in stored.items() if name.startswith(UP)}
    for name, change in ((name, change) for name in stored for change in CHANGES):
        damaged = {n: t for n, t in (stored | {name: change(stored[name])}).items() if t is not None}
        folder = written(tmp_path / "damaged", read_json(tmp_path / "whole" / "config.json"), damaged)
        try:
            Checkpoint.of_model(folder, torch.float32).take(f"{UP}.weight", (256, 128))
        except ModelError as error:
            errors.append(str(error))
    assert all(UP in error for error in errors)
    assert len(errors) > 4 * len(stored)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "hqq"},
            r"quant_method is 'hqq'; supported are awq, gptq, .*: use the float16 or bfloat16 original",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; supported: gemm"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "is 'marlin'; supported: gptq, gptq_v2"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; supported: 4, 8"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "marlin-24"}}},
            "config_groups, a: format is 'marlin-24'",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"a": {}}}},
            "transform_config is",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128; it must be two whole numbers"),
        ({"quant_method": "gptq", "sym": 3}, "sym is 3; it must be true or false"),
    ],
)
def test_unsupported_quantisation_is_refused_by_name(
    config: dict[str, Any], message: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = rewritten(sources["llama"], {}, {"quantization_config": config}, tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"quantization_config.*{message}"):
        Blueprint.of(str(folder))


def test_a_configuration_without_quantised_weights_changes_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": None, "kv_cache_scheme": None}
    folder = rewritten(
        sources["llama"], {f"{UP}.input_scale": torch.ones(1)}, {"quantization_config": config}, tmp_path
    )
    assert Blueprint.of(str(folder)).format == "bfloat16"
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == config
