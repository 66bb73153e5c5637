"""Every family and every scaling of positions computes transformers' logits, from a saved checkpoint.

Weights are random but scaled so that logits vary by 3 and more, biases are not 0 and norms not 1: nothing can be
left out unseen. Texts are longer than twice the sliding window and twice the context before scaling.
"""

import json
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from forerun.config import KernelChoice
from forerun.models.config import ModelConfig, read_config
from forerun.models.experts_config import Clamp
from forerun.models.loading import Blueprint
from forerun.models.rope_config import RopeConfig
from kit.checkpoints import read_json, written
from kit.compiled import require_compiler
from kit.reading import logits_in_pieces

VOCAB, LENGTH, WINDOW, ORIGINAL = 199, 80, 11, 32
TOKENS = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(7))
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN_ROPE = RopeConfig(1e4)
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
SHARED = {"shared_expert_intermediate_size": 72}
NO_WINDOWS: dict[str, Any] = {"windows": (None,) * 3}
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}
MIXTRAL = {"num_local_experts": 4, "sliding_window": WINDOW}
MOSTLY = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
FULL = {"layer_types": ["full_attention"] * 3}
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": WINDOW} | {
    "rope_parameters": YARN | {"rope_theta": 15e4, "truncate": False}
}
GEMMA2 = {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 20, "tie_word_embeddings": True} | {
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 20.0,
}
MINISTRAL = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.7}
COHERE = {"sliding_window": WINDOW, "logit_scale": 1.2} | FULL
BIASED = {"head_dim": 32, "attention_bias": True}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {"original_max_position_embeddings": ORIGINAL, "sliding_window": None} | {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [1.0, 1.5, 3.0, 4.0],
    }
}


@dataclass(frozen=True)
class Case:
    """A family with options; `ablated` turns what the case is about off, which must be seen in the logits."""

    name: str
    family: str
    options: dict[str, Any]
    ablated: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("tied, grouped", "llama", {"tie_word_embeddings": True}),
    Case("untied, one key head", "llama", {"num_key_value_heads": 1}),
    Case("ungrouped, wide heads", "llama", {"num_key_value_heads": 4, "head_dim": 24}),
    Case("all biases", "llama", {"attention_bias": True, "mlp_bias": True}, {"mlp_bias": False}),
    Case("attention biases", "llama", {"attention_bias": True}, {"out_bias": False}),
    Case("theta", "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope": PLAIN_ROPE}),
    Case("linear", "llama", {"rope_parameters": LINEAR}, {"rope": PLAIN_ROPE}),
    Case("llama3", "llama", {"rope_parameters": LLAMA3}, {"rope": PLAIN_ROPE}),
    Case("yarn", "llama", {"rope_parameters": YARN}, {"rope": PLAIN_ROPE}),
    Case(
        "yarn, mscale",
        "llama",
        {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}},
        {"rope": RopeConfig(1e4, "yarn", 4.0, ORIGINAL)},
    ),
    Case("window", "mistral", {"sliding_window": WINDOW}, NO_WINDOWS),
    Case("no window, wide heads", "mistral", {"sliding_window": None, "head_dim": 32}),
    Case("biases", "qwen2", {}, {"qkv_bias": False}),
    Case("upper windows", "qwen2", SOME_WINDOWS | {"max_window_layers": 1}, {"windows": (WINDOW,) * 3}),
    Case("yarn, tied", "qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}, {"rope": PLAIN_ROPE}),
    Case(
        "two bases, norms behind blocks",
        "gemma3_text",
        {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 20, "tie_word_embeddings": True} | MOSTLY,
        {"local_rope": RopeConfig(1e6)},
    ),
    Case(
        "scales",
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 0.5},
        {"query_scale": 1.0},
    ),
    Case("layers that do not turn", "smollm3", {"no_rope_layers": [1, 0, 1]}, {"rotated": ()}),
    Case("fused tensors, a window", "phi3", {"sliding_window": WINDOW}, NO_WINDOWS),
    Case(
        "three quarters of a head",
        "phi3",
        {"head_dim": 32, "partial_rotary_factor": 0.75, "sliding_window": None},
        {"rotary_dim": 0},
    ),
    Case("norms behind blocks alone, over all heads", "olmo2", {}, {"joint_norm": False, "qk_norm": False}),
    Case("windows in most layers", "olmo3", {"sliding_window": WINDOW, **MOSTLY}, NO_WINDOWS),
    Case("only layers with windows turn", "exaone4", {"sliding_window": WINDOW, **MOSTLY}, {"rotated": ()}),
    Case("all layers turn", "exaone4", {"sliding_window": None, **FULL}, {"rope": RopeConfig(5e5)}),
    Case("half of a head, neighbours", "glm4", BIASED, {"interleaved": False}),
    Case("soft caps", "gemma2", GEMMA2, {"score_cap": None}),
    Case(
        "logits alone are capped",
        "gemma2",
        GEMMA2 | {"attn_logit_softcapping": None, "query_pre_attn_scalar": 300},
        {"logits_cap": None},
    ),
    Case("a cap on logits", "gemma3_text", GEMMA2 | {"attn_logit_softcapping": None}, {"logits_cap": None}),
    Case(
        "queries that grow",
        "ministral3",
        {"head_dim": 24, "rope_parameters": MINISTRAL},
        {"rope": RopeConfig(1e4, "yarn", 4.0, ORIGINAL, mscale=1.0, mscale_all_dim=0.5)},
    ),
    Case(
        "queries that grow, a window",
        "ministral3",
        {"head_dim": 16, "sliding_window": WINDOW, "rope_parameters": MINISTRAL | {"rope_type": "default"}},
        NO_WINDOWS,
    ),
    Case(
        "a parallel block, layers that do not turn",
        "cohere2",
        {"sliding_window": WINDOW, "logit_scale": 0.8, **MOSTLY},
        {"rotated": ()},
    ),
    Case("biases, nothing turns", "cohere2", COHERE | {"attention_bias": True}, {"layer_norm": False}),
    Case("a plain MLP, biases, a window", "starcoder2", {"sliding_window": WINDOW}, NO_WINDOWS),
    Case("no biases but of norms", "starcoder2", {"use_bias": False}, {"layer_norm": False}),
    Case("rows by key heads, biases", "internlm2", {"attention_bias": True}, {"by_key_head": False}),
    Case("rows by key heads, dynamic", "internlm2", {"num_key_value_heads": 1, "rope_parameters": DYNAMIC}),
    Case("all biases, dynamic", "internlm3", {"attention_bias": True, "mlp_bias": True, "rope_parameters": DYNAMIC}),
    Case("LongRoPE of half heads", "phi3", LONGROPE, {"rope": PLAIN_ROPE}),
    Case("head norms", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}, {"qk_norm": False}),
    Case(
        "listed windows, biases",
        "qwen3",
        SOME_WINDOWS | BIASED | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"windows": (None, None, WINDOW)},
    ),
    Case("two of eight experts", "mixtral", {"num_local_experts": 8}, {"experts": {"active": 1}}),
    Case("window, one of four experts", "mixtral", MIXTRAL | {"num_experts_per_tok": 1}, NO_WINDOWS),
    Case("a shared expert, its gate", "qwen2_moe", EXPERTS | SHARED, {"experts": {"normalised": True}}),
    Case(
        "dense layers, weights that add up to 1",
        "qwen2_moe",
        EXPERTS | SHARED | {"norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False},
        {"experts": {"normalised": False}},
    ),
    Case(
        "upper windows",
        "qwen2_moe",
        EXPERTS | SHARED | SOME_WINDOWS | {"max_window_layers": 2, "tie_word_embeddings": True},
        NO_WINDOWS,
    ),
    Case("head norms", "qwen3_moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}, {"qk_norm": False}),
    Case(
        "windows, biases, every other layer dense",
        "qwen3_moe",
        EXPERTS | SOME_WINDOWS | BIASED | {"decoder_sparse_step": 2},
        NO_WINDOWS,
    ),
    Case("sinks", "gpt_oss", GPT_OSS, {"sinks": False}),
    Case(
        "bounded activation, one key head",
        "gpt_oss",
        GPT_OSS | {"num_key_value_heads": 1, "swiglu_limit": 0.5, "swiglu_alpha": 1.2},
        {"experts": {"clamp": Clamp(1.2, 7.0)}},
    ),
    Case("yarn of its own, no biases", "gpt_oss", GPT_OSS | {"attention_bias": False}, {"rope": PLAIN_ROPE}),
]


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Weights that keep the residual stream alive, norms around 1, biases around 0, logits far apart."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.5)
        elif name.endswith("sinks"):
            parameter.normal_(1, 1)
        elif name.endswith(("lm_head.weight", "embed_tokens.weight")):
            parameter.normal_(0, 4 / parameter.shape[1] ** 0.5)
        elif parameter.dim() > 1:
            parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)


INTERNLM2 = {  # what its publisher calls the parts of Llama's
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_internlm2(model: PreTrainedModel, folder: Path) -> None:
    """A Llama rearranged as InternLM 2 is published, whose own class is code that comes with it: each key head's
    queries, key and value lie one after the other."""
    stored, heads = dict(model.state_dict()), model.config.num_key_value_heads
    for name in [name for name in stored if "q_proj" in name]:
        parts = [stored.pop(name.replace("q_proj", f"{x}_proj")).unflatten(0, (heads, -1)) for x in "qkv"]
        stored[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(parts, 1).flatten(0, 1)
    for ours, theirs in INTERNLM2.items():
        stored = {name.replace(ours, theirs): tensor for name, tensor in stored.items()}
    raw = read_json(folder / "config.json")
    raw |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": raw["attention_bias"]}
    (folder / "model.safetensors.index.json").unlink()
    written(folder, raw, stored)


def build(case: Case, folder: Path) -> PreTrainedModel:
    """A random model of transformers, and its checkpoint in `folder`, in shards."""
    torch.manual_seed(zlib.crc32(case.name.encode()))
    config = AutoConfig.for_model(case.family.replace("internlm2", "llama"), **SIZES | case.options)
    config._experts_implementation = "eager"  # the others want widths of their own
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    if case.family == "internlm2":
        write_internlm2(model, folder)
    if case.family == "internlm3":  # whose class is Llama's, by another name in its publisher's files
        raw = read_json(folder / "config.json") | {"architectures": ["InternLM3ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return model


def ablated(config: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    """The configuration with these changes; those under `experts` change the configuration of experts."""
    if "experts" in changes:
        assert config.experts is not None
        return replace(config, experts=replace(config.experts, **changes["experts"]))
    return replace(config, **changes)


def our_logits(blueprint: Blueprint, tokens: list[int], chunks: list[int]) -> Tensor:
    """The logits of a text read in pieces, by a fresh runner."""
    return logits_in_pieces(blueprint.load(num_tokens=2 * LENGTH), tokens, chunks)


def old_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    """The same config.json as transformers 4 wrote it."""
    old = {k: v for k, v in raw.items() if k not in ("rope_parameters", "dtype")}
    rope = dict(raw["rope_parameters"])
    if "full_attention" in rope:
        old["rope_local_base_freq"], rope = rope["sliding_attention"]["rope_theta"], dict(rope["full_attention"])
        if raw["model_type"] == "olmo3":
            del old["rope_local_base_freq"]
    old["torch_dtype"], old["rope_theta"] = raw["dtype"], rope.pop("rope_theta")
    if share := rope.pop("partial_rotary_factor", None):
        old["partial_rotary_factor"] = share
    kind = rope.pop("rope_type")
    kind = "su" if (raw["model_type"], kind) == ("phi3", "longrope") else kind
    old["rope_scaling"] = None if kind == "default" and not rope else {"type": kind} | rope
    if raw["model_type"] == "internlm3":
        old["qkv_bias"], old["bias"] = old.pop("attention_bias"), old.pop("mlp_bias")
    if raw.get("max_window_layers") == 1:
        old.pop("layer_types")
    return old


def configs(folder: Path) -> tuple[ModelConfig, ModelConfig]:
    """The configuration as saved, and as it is read after config.json was rewritten in the old spelling."""
    path = folder / "config.json"
    new = read_config(folder)
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert "rope_parameters" in raw
    assert "dtype" in raw
    path.write_text(json.dumps(old_spelling(raw)), encoding="utf-8")
    return new, read_config(folder)


@pytest.mark.short(
    "llama: tied, grouped-native",
    "llama: llama3-torch",
    "qwen2: yarn, tied-native",
    "qwen3: head norms-torch",
    "mixtral: window, one of four experts-native",
    "gpt_oss: sinks-native",
)
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.name}")
def test_logits_are_those_of_transformers(case: Case, kernels: KernelChoice, tmp_path: Path) -> None:
    if kernels == "native":
        require_compiler()
    model = build(case, tmp_path)
    with torch.inference_mode():
        expected = model(TOKENS[None]).logits[0]
    assert expected.std() >= 3, "flat logits would hide what is left out"
    assert 2 * max(WINDOW, ORIGINAL) <= LENGTH

    blueprint = Blueprint.of(str(tmp_path), dtype="float32", kernels=kernels)
    for chunks in ([LENGTH], [1, 2, 40, 1, LENGTH - 44]):
        found = our_logits(blueprint, TOKENS.tolist(), chunks)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    if case.ablated:
        wrong = replace(blueprint, config=ablated(blueprint.config, case.ablated))
        assert wrong.config != blueprint.config
        assert (our_logits(wrong, TOKENS.tolist(), [LENGTH]) - expected).abs().max() > 0.05
    new, old = configs(tmp_path)
    assert new == old == blueprint.config


@pytest.mark.short(
    "llama: untied, one key head-native",
    "llama: theta-native",
    "llama: llama3-torch",
    "llama: yarn, mscale-native",
    "mistral: no window, wide heads-native",
    "qwen3: head norms-torch",
    "qwen2_moe: upper windows-native",
    "qwen3_moe: head norms-native",
    "gpt_oss: yarn of its own, no biases-torch",
)
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.name}")
def test_bfloat16_logits_stay_near_those_of_transformers(case: Case, kernels: KernelChoice, tmp_path: Path) -> None:
    """The law of large errors: 16 bits move logits by a few percent of their spread, not by more.

    But 16 bits may choose another expert where two are nearly equal to a router, and all later tokens read what came
    of it. So with experts a tenth of the tokens is asked for as much.
    """
    if kernels == "native":
        require_compiler()
    model = build(case, tmp_path)
    with torch.inference_mode():
        exact = model(TOKENS[None]).logits[0]
        rounded = model.bfloat16()(TOKENS[None]).logits[0].float()
    blueprint = Blueprint.of(str(tmp_path), dtype="bfloat16", kernels=kernels)
    found = our_logits(blueprint, TOKENS.tolist(), [LENGTH])

    def error(logits: Tensor) -> Tensor:
        return (logits - exact).std(1).quantile(0.1) if blueprint.config.experts else (logits - exact).std()

    assert error(found) < 1.5 * error(rounded)
