"""The table of model families: how each supported architecture differs from Llama, keyed by its name in config.json.

To add a family, add a row to FAMILIES. `read_config` reads each declared value once, into ModelConfig; no other file
branches on the family. `weights.py` renames tensors to Llama's names first, so only the names of experts are declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum


class RotaryLayers(Enum):
    """Which layers apply rotary position embeddings."""

    ALL = "every layer"
    LISTED = "those that no_rope_layers lists or, without it, all but every fourth"
    WINDOWED = "those with a sliding window"
    WINDOWED_IF_ANY = "those with a sliding window, or every layer if none has one"


class Windows(Enum):
    """Which layers use sliding-window attention."""

    NONE = "no layer"
    ALL = "every layer, if sliding_window is set"
    IF_USED = "every layer, if use_sliding_window is set"
    LISTED = "those that layer_types lists or, without it, those from max_window_layers on"
    UNROTATED = "if use_sliding_window is set, those that layer_types lists or, without it, those without rotation"
    EVERY_FOURTH = "those that layer_types lists or, without it, all but every fourth"
    EVERY_SIXTH = "those that layer_types lists or, without it, all but every sixth"
    EVERY_OTHER = "those that layer_types lists or, without it, every other one from the first on"
    EVERY_OTHER_BELOW = "like EVERY_OTHER, if use_sliding_window is set and, by default, only below max_window_layers"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the expert tensors in a layer.

    `{}` stands for the expert's number. A name without `{}` is a stacked tensor of all experts, with gate and up fused;
    its bias has the suffix `_bias`. `transposed`: stacked tensors are stored as [experts, inputs, outputs], and outputs
    of gate and up alternate. `stacked` are the names in those checkpoints of the family that store stacked tensors.
    """

    router: str
    gate_up: tuple[str, ...]
    down: str
    transposed: bool = False
    stacked: ExpertNames | None = None

    @property
    def is_stacked(self) -> bool:
        """Whether one tensor holds all experts."""
        return "{}" not in self.down


@dataclass(frozen=True, slots=True)
class MoeForm:
    """The mixture-of-experts layers of a family.

    `intermediate` and `shared` are the keys in config.json for the widths of an expert and of the shared expert (None:
    there is none). `normalised`: whether the routing weights of the chosen experts sum to 1, or the key for this.
    `bias`: router and experts have biases. `clamped`: the activation is clamped (`swiglu_limit`, `swiglu_alpha`).
    """

    names: ExpertNames
    intermediate: str = "moe_intermediate_size"
    shared: str | None = None
    normalised: bool | str = "norm_topk_prob"
    bias: bool = False
    clamped: bool = False


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms, before and after attention and MLP; None: the family has no such norm."""

    attention: str | None = "input_layernorm"
    mlp: str | None = "post_attention_layernorm"
    attention_out: str | None = None
    mlp_out: str | None = None


LLAMA_NORMS = LayerNorms()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """How the layers differ from Llama's; a base of Family and of ModelConfig.

    `qk_norm`: query heads and key heads have an RMS norm, each head by itself or, with `joint_norm`, all as one vector.
    `sinks`: each query head has an attention sink, an extra score without a value. `norms`: names of the layer's norms;
    `gains_minus_one`: their gains are stored minus 1; `layer_norm`: they are LayerNorms, which subtract the mean;
    `norm_bias`: they have biases. `gelu`: the activation is tanh-GELU instead of SiLU. `interleaved`: a rotary pair is
    two adjacent elements, instead of elements i and i + head_dim/2. `fused_qkv`, `fused_gate_up`: one tensor holds all
    projections; with `by_key_head` its rows are grouped by key head (queries, key, value). `parallel`: the MLP reads
    the same normed input as attention. `plain_mlp`: the names of the two linear layers of an MLP that is not gated.
    """

    qk_norm: bool = False
    joint_norm: bool = False
    sinks: bool = False
    norms: LayerNorms = LLAMA_NORMS
    gains_minus_one: bool = False
    layer_norm: bool = False
    norm_bias: bool = False
    gelu: bool = False
    interleaved: bool = False
    fused_qkv: bool = False
    by_key_head: bool = False
    fused_gate_up: bool = False
    parallel: bool = False
    plain_mlp: tuple[str, str] | None = None


LLAMA_FORM = {part.name: part.default for part in fields(LayerForm)}


@dataclass(frozen=True, slots=True)
class Family(LayerForm):
    """One row of the table: `name` is the family's model_type.

    Biases are True, False, or the keys in config.json that set them, whose default is `bias_default`. The values of
    `head_dim`, `window`, `norm_eps`, `theta` and `rope` replace missing keys, and `defaults` other keys; head_dim None:
    hidden_size / num_attention_heads. `moe` None: all MLPs are dense; `moe_architecture` has the same layers with
    experts. `scales` are the keys of factors of "embedding", "residual" (the outputs of attention and MLP), "scores"
    (attention) and "logits", and of "logits_divisor". `scaled_embedding`: embeddings are multiplied by sqrt(hidden).
    `query_scalar`: the default of query_pre_attn_scalar, by whose root scores are divided; None: head_dim. `soft_caps`:
    the keys of soft caps of scores and logits. `growing_queries`: queries may have a factor that grows with the
    position. `local_theta`: the default rotary base of sliding-window layers; None: that of all layers. `rotary_share`:
    the default fraction of a head that is rotated; None: always 1. `longrope_names`: other names of LongRoPE.
    """

    name: str
    qkv_bias: bool | str | tuple[str, ...] = False
    out_bias: bool | str | tuple[str, ...] = False
    mlp_bias: bool | str | tuple[str, ...] = False
    windows: Windows = Windows.NONE
    head_dim: int | None = None
    window: int | None = None
    bias_default: bool = False
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    rope: Mapping[str, object] = field(default_factory=dict)
    moe: MoeForm | None = None
    moe_architecture: str | None = None
    scales: Mapping[str, str] = field(default_factory=dict)
    scaled_embedding: bool = False
    query_scalar: int | None = None
    local_theta: float | None = None
    rotary_share: float | None = None
    rotary_layers: RotaryLayers = RotaryLayers.ALL
    tied: bool = False  # default of tie_word_embeddings
    defaults: Mapping[str, object] = field(default_factory=dict)
    eps_key: str = "rms_norm_eps"
    soft_caps: tuple[str, ...] = ()
    growing_queries: bool = False
    longrope_names: tuple[str, ...] = ()


STACKED_MOE = ExpertNames("mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj")
NUMBERED_MOE = ExpertNames(
    "mlp.gate", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj", stacked=STACKED_MOE
)
GEMMA_NORMS = LayerNorms(
    "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
)
OLMO2_NORMS = LayerNorms(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
COHERE_NORMS = LayerNorms("input_layernorm", None)
GRANITE = {  # scales and their keys in config.json
    "embedding": "embedding_multiplier",
    "residual": "residual_multiplier",
    "scores": "attention_multiplier",
    "logits_divisor": "logits_scaling",
}

# Bases of other rows. In OPTIONAL_BIAS, config.json sets the biases of attention; in LLAMA, those of the MLP too.
OPTIONAL_BIAS = Family("", qkv_bias="attention_bias", out_bias="attention_bias")
LLAMA = replace(OPTIONAL_BIAS, name="llama", mlp_bias="mlp_bias")
QWEN2 = Family("qwen2", qkv_bias=True, windows=Windows.LISTED, window=4096)
QWEN3 = replace(OPTIONAL_BIAS, name="qwen3", qk_norm=True, windows=Windows.LISTED, window=4096, head_dim=128)
OLMO2 = replace(OPTIONAL_BIAS, name="olmo2", qk_norm=True, joint_norm=True, norm_eps=1e-5, norms=OLMO2_NORMS)
GEMMA2 = replace(
    OPTIONAL_BIAS,
    name="gemma2",
    windows=Windows.EVERY_OTHER,
    head_dim=256,
    window=4096,
    norms=GEMMA_NORMS,
    gains_minus_one=True,
    gelu=True,
    scaled_embedding=True,
    query_scalar=256,
    tied=True,
    soft_caps=("attn_logit_softcapping", "final_logit_softcapping"),
    defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": replace(LLAMA, moe_architecture="MixtralForCausalLM"),
    "MistralForCausalLM": Family("mistral", windows=Windows.ALL, window=4096, moe_architecture="MixtralForCausalLM"),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        windows=Windows.ALL,
        head_dim=128,
        norm_eps=1e-5,
        rope={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        growing_queries=True,
    ),
    "InternLM3ForCausalLM": Family(
        "internlm3",
        qkv_bias=("qkv_bias", "attention_bias"),
        out_bias=("bias", "mlp_bias"),
        mlp_bias=("bias", "mlp_bias"),
        head_dim=128,
        norm_eps=1e-5,
    ),
    "InternLM2ForCausalLM": Family("internlm2", qkv_bias="bias", out_bias="bias", fused_qkv=True, by_key_head=True),
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": replace(QWEN3, moe_architecture="Qwen3MoeForCausalLM"),
    "MiMoForCausalLM": replace(QWEN2, name="mimo"),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": replace(
        GEMMA2,
        name="gemma3_text",
        qk_norm=True,
        windows=Windows.EVERY_SIXTH,
        theta=1e6,
        local_theta=10_000.0,
        soft_caps=("final_logit_softcapping",),
        defaults={},
    ),
    "GraniteForCausalLM": replace(LLAMA, name="granite", scales=GRANITE),
    "Phi3ForCausalLM": Family(
        "phi3",
        windows=Windows.ALL,
        norm_eps=1e-5,
        rotary_share=1.0,
        fused_qkv=True,
        fused_gate_up=True,
        longrope_names=("su", "yarn"),
        defaults={"original_max_position_embeddings": 4096},
    ),
    "Cohere2ForCausalLM": replace(
        OPTIONAL_BIAS,
        name="cohere2",
        windows=Windows.EVERY_FOURTH,
        window=4096,
        norm_eps=1e-5,
        norms=COHERE_NORMS,
        scales={"logits": "logit_scale"},
        interleaved=True,
        rotary_layers=RotaryLayers.WINDOWED,
        tied=True,
        defaults={"logit_scale": 0.0625},
        eps_key="layer_norm_eps",
        layer_norm=True,
        parallel=True,
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        bias_default=True,
        windows=Windows.ALL,
        norm_eps=1e-5,
        gelu=True,
        tied=True,
        eps_key="norm_epsilon",
        layer_norm=True,
        norm_bias=True,
        plain_mlp=("c_fc", "c_proj"),
    ),
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": replace(
        OLMO2, name="olmo3", windows=Windows.EVERY_FOURTH, window=4096, theta=500_000.0, local_theta=500_000.0
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        qk_norm=True,
        windows=Windows.EVERY_FOURTH,
        window=4096,
        norm_eps=1e-5,
        norms=OLMO2_NORMS,
        rotary_layers=RotaryLayers.WINDOWED_IF_ANY,
    ),
    "SmolLM3ForCausalLM": replace(
        LLAMA, name="smollm3", windows=Windows.UNROTATED, theta=2e6, rotary_layers=RotaryLayers.LISTED, tied=True
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        qkv_bias="attention_bias",
        head_dim=128,
        norm_eps=1.5625e-7,
        norms=LayerNorms(
            "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"
        ),
        bias_default=True,
        interleaved=True,
        rotary_share=0.5,
        fused_gate_up=True,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        windows=Windows.ALL,
        norm_eps=1e-5,
        theta=1e6,
        moe=MoeForm(
            ExpertNames(
                "block_sparse_moe.gate",
                ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
                "block_sparse_moe.experts.{}.w2",
                stacked=STACKED_MOE,
            ),
            intermediate="intermediate_size",
            normalised=True,
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        qkv_bias="qkv_bias",
        windows=Windows.EVERY_OTHER_BELOW,
        window=4096,
        bias_default=True,
        moe=MoeForm(NUMBERED_MOE, shared="shared_expert_intermediate_size"),
    ),
    "Qwen3MoeForCausalLM": replace(
        QWEN3, name="qwen3_moe", windows=Windows.IF_USED, head_dim=None, moe=MoeForm(NUMBERED_MOE)
    ),
    "GptOssForCausalLM": replace(
        OPTIONAL_BIAS,
        name="gpt_oss",
        windows=Windows.EVERY_OTHER,
        head_dim=64,
        window=128,
        bias_default=True,
        norm_eps=1e-5,
        theta=150_000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        sinks=True,
        moe=MoeForm(
            ExpertNames("mlp.router", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj", transposed=True),
            intermediate="intermediate_size",
            normalised=True,
            bias=True,
            clamped=True,
        ),
    ),
}
