"""The table of model families: all differences between the supported architectures, by their names in config.json.

A difference is a value declared here and read once by `read_config`; no other file asks for a model's family. All
families have Llama's tensor names, except those of experts, after `weights.py` has renamed tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum


class Turning(Enum):
    """Which layers apply rotary position embeddings."""

    ALL = "every layer"
    LISTED = "those that no_rope_layers lists or, without it, all but every fourth"
    WINDOWED = "those with a sliding window"
    WINDOWED_IF_ANY = "those with a sliding window, or every layer where none has one"


class Windows(Enum):
    """Which layers see only the tokens inside a sliding window."""

    NONE = "no layer"
    ALL = "every layer, where sliding_window is set"
    ASKED = "every layer, where use_sliding_window is set"
    LISTED = "those that layer_types lists or, without it, those from max_window_layers on"
    NOT_TURNED = "where use_sliding_window is set, those that layer_types lists or, without it, those that do not turn"
    EVERY_FOURTH = "those that layer_types lists or, without it, all but every fourth"
    EVERY_SIXTH = "those that layer_types lists or, without it, all but every sixth"
    EVERY_OTHER = "those that layer_types lists or, without it, every other one from the first on"
    BELOW = "the same, where use_sliding_window is set, and without layer_types below max_window_layers alone"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The tensor names of the experts of a layer.

    `{}` stands for an expert's number; without it one tensor holds all experts, gate and up fused, and its bias has the
    suffix `_bias`. `transposed`: that tensor has inputs before outputs, with rows of gate and up alternating. `stacked`
    are alternative names of the same experts.
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
class Sparse:
    """The declarations of a mixture-of-experts family.

    `intermediate` and `shared` are keys of config.json: the neurons of an expert and, in families that have one, of the
    shared expert. `normalised`: whether the routing weights of the chosen experts add up to 1, or the key that says so.
    `bias`: router and experts have biases. `clamped`: the activation is clamped by `swiglu_limit` and `swiglu_alpha`.
    """

    names: ExpertNames
    intermediate: str = "moe_intermediate_size"
    shared: str | None = None
    normalised: bool | str = "norm_topk_prob"
    bias: bool = False
    clamped: bool = False


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms: of the inputs of attention and MLP, and of their outputs. None: no such norm."""

    attention: str | None = "input_layernorm"
    mlp: str | None = "post_attention_layernorm"
    attention_out: str | None = None
    mlp_out: str | None = None


LLAMA_NORMS = LayerNorms()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """The differences of layers from Llama's, in a Family and in a ModelConfig.

    `qk_norm`: query and key heads are normed, all as one vector with `joint_norm`. `sinks`: each query head has an
    extra attention score without a value. `norms`: the layer's norms; `from_one`: gains are stored minus 1; `centred`:
    they are LayerNorms, which subtract the mean; `norm_bias`: they have biases. `gelu`: tanh-GELU instead of SiLU.
    `interleaved`: rotary pairs are neighbours, not halves of a head. `fused_qkv`, `fused_gate_up`: one tensor holds all
    parts; with `by_key_head` the queries, key and value of each key head follow one another. `parallel`: the MLP has
    the same input as attention. `plain_mlp`: names of the two linear layers of an MLP that is not gated.
    """

    qk_norm: bool = False
    joint_norm: bool = False
    sinks: bool = False
    norms: LayerNorms = LLAMA_NORMS
    from_one: bool = False
    centred: bool = False
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
    """The declarations of one family.

    A bias exists, does not exist, or is set by the keys of config.json given here; `biased` is the default of such a
    key. `head_dim`, `window`, `norm_eps`, `theta` and `rope` are the family's defaults for missing keys, and `defaults`
    those of other keys; head_dim None: hidden size over heads. `sparse` None: all MLPs are dense. `scales` are the keys
    of factors of embeddings, layer outputs (`added`), attention scores and logits (`output`), and of the divisor of
    logits (`logits`). `scaled_embedding`: embeddings are times sqrt(hidden). `capped`: keys of soft caps of scores and
    logits. `scaled_queries`: queries may grow with the position. `local`: the default rotary base of layers with a
    window; None: the same base. `rotary`: the default share of a head that is rotated; None: always the whole head.
    `stretched`: other names of LongRoPE in config.json.
    """

    name: str
    qkv_bias: bool | str | tuple[str, ...] = False
    out_bias: bool | str | tuple[str, ...] = False
    mlp_bias: bool | str | tuple[str, ...] = False
    windows: Windows = Windows.NONE
    head_dim: int | None = None
    window: int | None = None
    biased: bool = False
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    rope: Mapping[str, object] = field(default_factory=dict)
    sparse: Sparse | None = None
    with_experts: str | None = None  # the same architecture with experts
    scales: Mapping[str, str] = field(default_factory=dict)
    scaled_embedding: bool = False
    query_scalar: int | None = None  # default whose root divides queries; None: head_dim
    local: float | None = None
    rotary: float | None = None
    turning: Turning = Turning.ALL
    tied: bool = False  # default of tie_word_embeddings
    defaults: Mapping[str, object] = field(default_factory=dict)
    eps_key: str = "rms_norm_eps"
    capped: tuple[str, ...] = ()
    scaled_queries: bool = False
    stretched: tuple[str, ...] = ()


STACKED = ExpertNames("mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj")
BY_NUMBER = ExpertNames(
    "mlp.gate", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj", stacked=STACKED
)
SANDWICHED = LayerNorms(  # Gemma's
    "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
)
BEHIND = LayerNorms(None, None, "post_attention_layernorm", "post_feedforward_layernorm")  # OLMo 2's
BESIDE = LayerNorms("input_layernorm", None)  # Cohere's
GRANITE = {  # scales and their keys in config.json
    "embedding": "embedding_multiplier",
    "added": "residual_multiplier",
    "scores": "attention_multiplier",
    "logits": "logits_scaling",
}

# Bases of other families. In ASKED config.json sets the biases of attention; in LLAMA those of the MLP too.
ASKED = Family("", qkv_bias="attention_bias", out_bias="attention_bias")
LLAMA = replace(ASKED, name="llama", mlp_bias="mlp_bias")
QWEN2 = Family("qwen2", qkv_bias=True, windows=Windows.LISTED, window=4096)
QWEN3 = replace(ASKED, name="qwen3", qk_norm=True, windows=Windows.LISTED, window=4096, head_dim=128)
OLMO2 = replace(ASKED, name="olmo2", qk_norm=True, joint_norm=True, norm_eps=1e-5, norms=BEHIND)
GEMMA2 = replace(
    ASKED,
    name="gemma2",
    windows=Windows.EVERY_OTHER,
    head_dim=256,
    window=4096,
    norms=SANDWICHED,
    from_one=True,
    gelu=True,
    scaled_embedding=True,
    query_scalar=256,
    tied=True,
    capped=("attn_logit_softcapping", "final_logit_softcapping"),
    defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": replace(LLAMA, with_experts="MixtralForCausalLM"),
    "MistralForCausalLM": Family("mistral", windows=Windows.ALL, window=4096, with_experts="MixtralForCausalLM"),
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
        scaled_queries=True,
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
    "Qwen3ForCausalLM": replace(QWEN3, with_experts="Qwen3MoeForCausalLM"),
    "MiMoForCausalLM": replace(QWEN2, name="mimo"),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": replace(
        GEMMA2,
        name="gemma3_text",
        qk_norm=True,
        windows=Windows.EVERY_SIXTH,
        theta=1e6,
        local=10_000.0,
        capped=("final_logit_softcapping",),
        defaults={},
    ),
    "GraniteForCausalLM": replace(LLAMA, name="granite", scales=GRANITE),
    "Phi3ForCausalLM": Family(
        "phi3",
        windows=Windows.ALL,
        norm_eps=1e-5,
        rotary=1.0,
        fused_qkv=True,
        fused_gate_up=True,
        stretched=("su", "yarn"),
        defaults={"original_max_position_embeddings": 4096},
    ),
    "Cohere2ForCausalLM": replace(
        ASKED,
        name="cohere2",
        windows=Windows.EVERY_FOURTH,
        window=4096,
        norm_eps=1e-5,
        norms=BESIDE,
        scales={"output": "logit_scale"},
        interleaved=True,
        turning=Turning.WINDOWED,
        tied=True,
        defaults={"logit_scale": 0.0625},
        eps_key="layer_norm_eps",
        centred=True,
        parallel=True,
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        biased=True,
        windows=Windows.ALL,
        norm_eps=1e-5,
        gelu=True,
        tied=True,
        eps_key="norm_epsilon",
        centred=True,
        norm_bias=True,
        plain_mlp=("c_fc", "c_proj"),
    ),
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": replace(
        OLMO2, name="olmo3", windows=Windows.EVERY_FOURTH, window=4096, theta=500_000.0, local=500_000.0
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        qk_norm=True,
        windows=Windows.EVERY_FOURTH,
        window=4096,
        norm_eps=1e-5,
        norms=BEHIND,
        turning=Turning.WINDOWED_IF_ANY,
    ),
    "SmolLM3ForCausalLM": replace(
        LLAMA, name="smollm3", windows=Windows.NOT_TURNED, theta=2e6, turning=Turning.LISTED, tied=True
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        qkv_bias="attention_bias",
        head_dim=128,
        norm_eps=1.5625e-7,
        norms=LayerNorms(
            "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"
        ),
        biased=True,
        interleaved=True,
        rotary=0.5,
        fused_gate_up=True,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        windows=Windows.ALL,
        norm_eps=1e-5,
        theta=1e6,
        sparse=Sparse(
            ExpertNames(
                "block_sparse_moe.gate",
                ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
                "block_sparse_moe.experts.{}.w2",
                stacked=STACKED,
            ),
            intermediate="intermediate_size",
            normalised=True,
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        qkv_bias="qkv_bias",
        windows=Windows.BELOW,
        window=4096,
        biased=True,
        sparse=Sparse(BY_NUMBER, shared="shared_expert_intermediate_size"),
    ),
    "Qwen3MoeForCausalLM": replace(
        QWEN3, name="qwen3_moe", windows=Windows.ASKED, head_dim=None, sparse=Sparse(BY_NUMBER)
    ),
    "GptOssForCausalLM": replace(
        ASKED,
        name="gpt_oss",
        windows=Windows.EVERY_OTHER,
        head_dim=64,
        window=128,
        biased=True,
        norm_eps=1e-5,
        theta=150_000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        sinks=True,
        sparse=Sparse(
            ExpertNames("mlp.router", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj", transposed=True),
            intermediate="intermediate_size",
            normalised=True,
            bias=True,
            clamped=True,
        ),
    ),
}
