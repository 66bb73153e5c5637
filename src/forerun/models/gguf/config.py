"""Converts the metadata of a GGUF file to config.json and generation_config.json.

The metadata keys are those of ggml-org/ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from forerun.errors import UnsupportedModel
from forerun.fields import Fields
from forerun.models.families import FAMILIES
from forerun.models.gguf.file import DOWNLOAD, GgufFile
from forerun.models.gguf.tensors import IDS, ROPE_DIVISORS, read_location

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "internlm2": "LlamaForCausalLM",  # with separate query, key and value tensors in GGUF
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
EAGLE = "eagle3"  # the architecture of a drafter
WITH_EXPERTS = {"LlamaForCausalLM": "MixtralForCausalLM"}  # GGUF calls both llama
SIZES = {  # metadata keys, without the architecture's name, mapped to those of config.json
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
GROWTH = "attention.temperature_scale"  # how queries grow with the position
LARGEST_GEMMA = (("gemma2", 46), ("gemma3", 62))  # architecture and layers of models with another query scale
UNQUANTIZED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # formats and dtypes
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # general.sampling.*
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_json(file: GgufFile) -> dict[str, Any]:
    """The contents of config.json. Raises UnsupportedModel for an unsupported architecture."""
    name = ARCHITECTURES.get(file.architecture)
    if file.architecture == EAGLE:
        return eagle_json(file)
    if name is None:
        supported = f"supported are {', '.join(ARCHITECTURES)}: choose a model of one of these"
        raise Fields(file.path, file.metadata).refuse("general.architecture", supported)
    fields, config = file.model_fields, shape_json(file)
    modules = fields.whole("nextn_predict_layers", 0, least=0, most=config["num_hidden_layers"] - 1)
    if modules:  # block_count includes the MTP modules
        config |= {"num_hidden_layers": config["num_hidden_layers"] - modules, "num_nextn_predict_layers": modules}
    experts = fields.whole("expert_count", 0, least=0)
    if experts:
        normed = fields.flag("expert_weights_norm", file.architecture != "qwen2moe")
        config |= {"num_experts": experts, "num_local_experts": experts, "norm_topk_prob": normed}
        name = WITH_EXPERTS.get(name, name)
    if file.architecture == "mistral3" and fields.optional(GROWTH) is None:
        name = "LlamaForCausalLM"  # an older Mistral model, without windows
    config["architectures"] = [name]
    config["intermediate_size"] = fields.whole("feed_forward_length", config.get("moe_intermediate_size"))
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = config["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    output = file.tensors.get("blk.0.attn_output.weight")  # if it is missing, the check of all weights says so
    config["dtype"] = UNQUANTIZED.get("" if output is None else output.format, "bfloat16")
    config["query_pre_attn_scalar"] = query_scalar(file, config)
    if FAMILIES[name].rotary_share is not None:
        # A width of 0 is refused later.
        width = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) or 1
        config["partial_rotary_factor"] = fields.whole("rope.dimension_count", width) / width
    scaling = rope_scaling(file, config)
    if scaling:
        config["rope_scaling"] = scaling
    for key, json in (("bos", "bos_token_id"), ("eos", "eos_token_id")):
        config[json] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def shape_json(file: GgufFile) -> dict[str, Any]:
    fields = file.model_fields
    config: dict[str, Any] = {json: fields.whole(key) for key, json in SIZES.items()}
    config |= {json: fields.values[key] for key, json in OPTIONAL.items() if fields.values.get(key) is not None}
    if "head_dim" in config:
        config["head_dim"] = fields.whole("attention.key_length")
    return config


def eagle_json(file: GgufFile) -> dict[str, Any]:
    """The contents of config.json for an EAGLE-3 drafter, with its authors' keys."""
    fields, config = file.model_fields, shape_json(file)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    taps = fields.values.get("target_layers", fields.values.get("extract_layers"))
    scaling = rope_scaling(file, config)
    return config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "intermediate_size": fields.whole("feed_forward_length"),
        "vocab_size": fields.whole("vocab_size", len(tokens) if isinstance(tokens, list) else 0),
        "draft_vocab_size": file.tensors[IDS].shape[0] if IDS in file.tensors else None,
        "target_hidden_size": fields.values.get("target_hidden_size"),
        "eagle_aux_hidden_state_layer_ids": taps,
        "norm_before_residual": fields.flag("norm_before_residual"),
        "rope_scaling": scaling,
    }


def query_scalar(file: GgufFile, config: Mapping[str, Any]) -> int:
    """The number by whose root queries are divided: head_dim, except in Gemma 2 and 3 with 27 B parameters."""
    width = int(config["hidden_size"] // config["num_attention_heads"])
    wide = (file.architecture, config["num_hidden_layers"]) in LARGEST_GEMMA
    return width if wide else int(config.get("head_dim", width))


def rope_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The value of rope_scaling in config.json; None without scaling."""
    fields = file.model_fields
    kind = fields.text("rope.scaling.type")
    if ROPE_DIVISORS in file.tensors:
        return llama3_scaling(file)
    growth = {"llama_4_scaling_beta": fields.number(GROWTH)} if fields.optional(GROWTH) else {}
    if kind in (None, "none"):
        return {"rope_type": "default", **growth} if growth else None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        original = fields.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
        scaling |= {"original_max_position_embeddings": original, "truncate": file.architecture != "gpt-oss"}
        scaling |= {json: fields.values[key] for key, json in YARN.items() if fields.values.get(key) is not None}
        scaling |= {"mscale": 1.0} if "mscale_all_dim" in scaling else {}
    return scaling | growth


def llama3_scaling(file: GgufFile) -> dict[str, Any]:
    """The parameters of Llama 3's scaling, from the file's divisors of frequencies. Raises UnsupportedModel if the
    divisors are those of another scaling."""
    divisors = read_location(file.tensors[ROPE_DIVISORS]).double().flatten()
    factor = float(divisors.max())
    if not 0 < factor < math.inf:
        raise UnsupportedModel(f"{file.path}: the largest divisor in rope_freqs.weight is {factor:g}: {DOWNLOAD}")
    scaling = {"rope_type": "llama3", "factor": factor, **LLAMA3}
    theta, original = file.model_fields.number("rope.freq_base", 10_000.0), LLAMA3["original_max_position_embeddings"]
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    size = 2 * len(divisors)
    for i, divisor in enumerate(divisors.tolist()):
        rotations = original / (2 * math.pi * theta ** (2 * i / size))
        smooth = min(1.0, max(0.0, (rotations - low) / (high - low)))
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not np.isclose(divisor, expected, rtol=1e-3):
            raise UnsupportedModel(
                f"{file.path}: rope_freqs.weight divides frequency {i} by {divisor:.4g}, but Llama 3's scaling with "
                f"factor {factor:g} divides by {expected:.4g}: use the model in safetensors"
            )
    return scaling


def generation_json(file: GgufFile) -> dict[str, Any]:
    """The contents of generation_config.json: the ids that end an answer, and sampling defaults."""
    ends = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = [end for i, end in enumerate(ends) if end is not None and end not in ends[:i]]
    values: dict[str, Any] = {"eos_token_id": ends}
    for key, json in SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if value is not None:
            values |= {json: value, "do_sample": True}
    return values
