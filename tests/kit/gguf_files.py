"""GGUF files made from Hugging Face folders as llama.cpp's converter makes them, with the names that `gguf` knows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from kit.checkpoints import TARGET, read_json, written

EXPERT = re.compile(r"experts\.\d+\.")
DRAWN = {  # formats that `gguf` only unpacks: where their factors are, and these for weights that vary by 1
    "Q4_K": ((0, 2), (1 / 180, 7.5 / 180)),
    "Q5_K": ((0, 2), (1 / 360, 15.5 / 360)),
    "Q6_K": ((208,), (1 / 1400,)),
}
ADD = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, in float32."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


def write_gguf(
    folder: Path, path: Path, architecture: str, metadata: Mapping[str, Any], number_format: str = "F32"
) -> Path:
    """Write the model of a folder to `path`: matrices in this format where blocks fit their rows, all else in F32.

    In the formats of DRAWN they are others, drawn at random, which vary as much.
    """
    config: dict[str, Any] = read_json(folder / "config.json")
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        getattr(writer, ADD[type(value)])(key.format(architecture), value)
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    num_blocks = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    names, modules = (get_tensor_name_map(each, num_blocks) for each in (arch, MODEL_ARCH.GLM4))
    stacks: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors_of(folder).items():
        for part, numbers in file_parts(name, tensor):
            tried = (each.get_name(EXPERT.sub("experts.", part), (".weight", ".bias")) for each in (names, modules))
            own = next((name for name in tried if name is not None), None)  # GLM-4 has names for modules, too
            assert own is not None, f"{architecture} has no name for {part}"
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            turned = architecture in ("llama", "mistral3", "internlm2") and ("q_proj" in name or "k_proj" in name)
            numbers = numbers + 1 if architecture.startswith("gemma") and "norm" in name else numbers
            stacks[own].append(by_turns(numbers, heads) if turned else numbers)
    for name, parts in stacks.items():
        numbers = (torch.stack(parts) if "_exps" in name and len(parts) > 1 else parts[0]).contiguous()
        kind = GGMLQuantizationType[number_format if fits(name, numbers, number_format) else "F32"]
        drawn = kind.name in DRAWN
        writer.add_tensor(name, draw(numbers, kind) if drawn else quantize(numbers.numpy(), kind), raw_dtype=kind)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    """Write all that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor as files have it: gates and ups of gpt-oss apart, all its experts with outputs before inputs."""
    if "experts.gate_up_proj" in name:
        turned = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        end = ".bias" if name.endswith("_bias") else ".weight"
        prefix = name.partition("gate_up_proj")[0]
        yield f"{prefix}gate_proj{end}", turned[:, ::2]
        yield f"{prefix}up_proj{end}", turned[:, 1::2]
    elif "experts.down_proj" in name and not name.endswith(".weight"):
        bias = name.endswith("_bias")
        yield (
            f"{name.removesuffix('_bias')}{'.bias' if bias else '.weight'}",
            tensor if bias else tensor.transpose(1, 2),
        )
    else:
        yield (f"{name}.weight" if name.endswith("sinks") else name), tensor


def by_turns(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order in which neighbours are rotated together."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def draw(numbers: Tensor, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Random blocks of a format of DRAWN, whose weights vary as these numbers do."""
    (block, size), (places, factors) = GGML_QUANT_SIZES[kind], DRAWN[kind.name]
    bytes_ = np.random.default_rng(numbers.numel()).integers(0, 256, (numbers.numel() // block, size), dtype=np.uint8)
    for at, factor in zip(places, factors, strict=True):
        bytes_[:, at : at + 2] = np.array([float(numbers.std()) * factor], np.float16).view(np.uint8)
    return bytes_.reshape(*numbers.shape[:-1], -1)


def fits(name: str, tensor: Tensor, number_format: str) -> bool:
    """Whether a tensor is stored in blocks: a matrix whose rows they fill."""
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[number_format]]
    return not name.endswith("bias") and tensor.dim() > 1 and tensor.shape[-1] % block == 0


def write_rounded(folder: Path, into: Path, number_format: str) -> Path:
    """The folder with its matrices rounded to a format of GGUF and back, as `write_gguf` stores them."""
    kind = GGMLQuantizationType[number_format]

    def rounded(name: str, tensor: Tensor) -> Tensor:
        turned = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        if not fits(name, turned, number_format):
            return tensor
        back = torch.from_numpy(dequantize(quantize(turned.contiguous().numpy(), kind), kind)).reshape(turned.shape)
        return back.transpose(1, 2) if tensor.dim() == 3 else back

    return written(
        into, read_json(folder / "config.json"), {name: rounded(name, t) for name, t in tensors_of(folder).items()}
    )


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """What a file says of a model with this config.json; `{}` stands for the architecture."""
    values = {f"{{}}.{key}": config[json] for key, json in KEYS.items() if config.get(json) is not None}
    if modules := config.get("num_nextn_predict_layers"):
        values |= {"{}.nextn_predict_layers": modules, "{}.block_count": config["num_hidden_layers"] + modules}
    if config.get("num_experts"):
        values["{}.expert_count"] = config["num_experts"]
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    if "partial_rotary_factor" in rope:
        values["{}.rope.dimension_count"] = int(rope["partial_rotary_factor"] * config["head_dim"])
    values["{}.rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"{}.rope.scaling.type": rope["rope_type"], "{}.rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values["{}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if "llama_4_scaling_beta" in rope:
        values["{}.rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        values["{}.attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if config["model_type"] in ("gpt_oss", "gemma2", "gemma3_text"):
        values["{}.attention.sliding_window"] = config["sliding_window"]
    return values


def vocabulary(folder: Path) -> dict[str, Any]:
    """A file's metadata for the tokenizer of a folder whose model is BPE with byte fallback."""
    described: Any = read_json(folder / "tokenizer.json")
    model = described["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    ranks = {left + right: -i for i, (left, right) in reversed([*enumerate(model["merges"])])}
    special: Any = {each["content"] for each in described["added_tokens"]}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(ranks.get(token, -1e6)) for token in tokens],
        "tokenizer.ggml.token_type": [
            3 if token in special else 6 if token.startswith("<0x") else 1 for token in tokens
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    }


def stories(path: Path, number_format: str = "Q8_0", **more: Any) -> Path:
    """The target of most tests in GGUF, with its tokenizer."""
    config: dict[str, Any] = read_json(TARGET / "config.json")
    config.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0})
    metadata = {
        key: value for key, value in (metadata_of(config) | vocabulary(TARGET) | more).items() if value is not None
    }
    return write_gguf(TARGET, path, "llama", metadata, number_format)
