"""Random models of families, as checkpoints with the tokenizer of the stories models: with experts, and dense ones.

Each has something that the others do not have: Mixtral windows in all layers, Qwen2-MoE an expert that all tokens share
and a dense layer, Qwen3-MoE head norms and many experts, gpt-oss sinks, biases and a bounded activation. Of the dense
ones Gemma 2 bounds scores and logits, Ministral 3 has queries that grow, Cohere 2 parallel blocks and layers that do
not turn, StarCoder 2 norms with biases and plain MLPs, and Phi-3 LongRoPE.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.models.config import ModelConfig, read_config
from forerun.models.projections import tensor_shapes
from kit.checkpoints import TARGET

BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 83, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32",
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 90,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 72,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 50,
        "swiglu_limit": 2.0,
    },
}

DENSE: dict[str, dict[str, Any]] = {
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 50,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 15.0,
    },
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "cohere2": {"architectures": ["Cohere2ForCausalLM"], "sliding_window": 50, "logit_scale": 1.0},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"},
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
        },
    },
}


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights that keep the residual stream alive and spread logits as a trained model's are."""
    dice = torch.Generator().manual_seed(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        numbers = torch.randn(shape, generator=dice)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * numbers
        if name.endswith(("bias", "sinks")):
            return 0.3 * numbers
        scale = 4.0 if name.startswith(("lm_head", "model.embed")) else 1.5
        return scale * numbers * (config.hidden if len(shape) == 3 else shape[-1]) ** -0.5

    return {name: tensor(name, shape) for name, shape in tensor_shapes(config).items()}


def write_sparse(folder: Path, family: str, **changes: Any) -> Path:
    """A random checkpoint of this family in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE | (FAMILIES | DENSE)[family] | changes), encoding="utf-8")
    for path in TARGET.glob("tokenizer*"):
        shutil.copyfile(path, folder / path.name)
    save_file(random_tensors(read_config(folder)), folder / "model.safetensors")
    return folder


def write_architecture(folder: Path, architecture: str, **changes: Any) -> Path:
    """A random checkpoint of this architecture, as the tables above have it or else with sizes of no family's own."""
    family = next((name for name, each in (FAMILIES | DENSE).items() if architecture in each["architectures"]), None)
    if family is not None:
        return write_sparse(folder, family, **changes)
    act = "gelu_pytorch_tanh" if architecture.startswith("Gemma") else "silu"
    form = {"architectures": [architecture], "hidden_act": act, "head_dim": 16, "pad_token_id": 0, "sliding_window": 50}
    return write_sparse(folder, "qwen3_moe", **form | changes)
