"""read_config agrees with transformers, in both spellings, and refuses by name what the decoder cannot compute."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, PretrainedConfig

from forerun.errors import ModelNotFound, UnsupportedModel
from forerun.models.config import read_config
from forerun.models.families import FAMILIES
from forerun.models.rope_config import RopeConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 200, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
NAMES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss", "gemma3_text": "Gemma3",
    "granite": "Granite", "smollm3": "SmolLM3", "phi3": "Phi3", "glm4": "Glm4", "olmo2": "Olmo2", "olmo3": "Olmo3",
    "exaone4": "Exaone4", "gemma2": "Gemma2", "ministral3": "Ministral3", "internlm3": "InternLM3",
    "cohere2": "Cohere2", "starcoder2": "Starcoder2",
}  # fmt: skip
GELU = ("gemma2", "gemma3_text", "starcoder2")
EPS = {"cohere2": "layer_norm_eps", "starcoder2": "norm_epsilon"}  # the others': rms_norm_eps
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
SPARSE: dict[str, dict[str, Any]] = {  # what these families cannot do without
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 56},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2},
}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def of_family(family: str) -> dict[str, Any]:
    return BASE | {"architectures": [f"{NAMES[family]}ForCausalLM"], "model_type": family} | SPARSE.get(family, {})


def expected_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """What transformers' modelling code does with these attributes."""
    if config.model_type in ("llama", "granite", "glm4", "olmo2", "internlm3"):
        return (None,) * config.num_hidden_layers
    if config.model_type in ("mistral", "mixtral", "qwen3_moe", "phi3", "ministral3", "starcoder2"):
        return (config.sliding_window,) * config.num_hidden_layers
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def is_sparse(config: PretrainedConfig, layer: int) -> bool:
    """Likewise."""
    if config.model_type not in SPARSE:
        return False
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", [])
    return (layer + 1) % step == 0 and layer not in dense


@st.composite
def raw_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json of a random family with random options, any of which may be absent or null."""
    raw = of_family(draw(st.sampled_from(sorted(NAMES))))
    absent = object()
    choices: dict[str, list[Any]] = {
        "head_dim": [absent, 4, 16, 128],
        EPS.get(raw["model_type"], "rms_norm_eps"): [absent, 1e-6, 1e-5],
        "rope_theta": [absent, 500.0, 1e6],
        "tie_word_embeddings": [absent, True, False],
        "attention_bias": [absent, True, False],
        "mlp_bias": [absent, True, False],
        "sliding_window": [absent, None, 7],
        "use_sliding_window": [absent, True, False],
        "max_window_layers": [absent, 0, 1, 2, 5],
        "torch_dtype": [absent, "float32", "float16", "bfloat16"],
        "hidden_act": [absent, "gelu_pytorch_tanh" if raw["model_type"] in GELU else "silu"],
        "num_key_value_heads": [None, 1, 2, 4, 8],
    }
    if raw["model_type"] in ("qwen2_moe", "qwen3_moe"):
        choices |= {
            "qkv_bias": [absent, True, False],
            "norm_topk_prob": [absent, True, False],
            "decoder_sparse_step": [absent, 1, 2, 4],
            "mlp_only_layers": [absent, None, [], [0, 2]],
        }
    for key, values in choices.items():
        value = draw(st.sampled_from(values))
        raw.pop(key, None)
        if value is not absent:
            raw[key] = value
    if raw["model_type"] not in ("llama", "qwen2", "qwen3") and raw["num_key_value_heads"] is None:
        raw["num_key_value_heads"] = 8
    if raw["model_type"] == "internlm3":  # transformers computes it as a Llama, whose two biases are one choice
        raw = {key: value for key, value in raw.items() if key not in ("attention_bias", "mlp_bias")}
        raw["qkv_bias"] = raw["bias"] = draw(st.booleans())
    windowed = ("gpt_oss", "qwen2_moe", "exaone4", "gemma2", "gemma3_text", "olmo3", "smollm3", "cohere2")
    if raw["model_type"] in windowed and raw.get("sliding_window", 0) is None:
        del raw["sliding_window"]
    return raw


@pytest.mark.parametrize("family", NAMES)
def test_missing_keys_have_the_defaults_of_the_family(family: str) -> None:
    optional = {EPS.get(family, "rms_norm_eps"), "rope_theta", "hidden_act", "torch_dtype"}
    assert_read_alike({key: value for key, value in of_family(family).items() if key not in optional})


@given(raw=raw_configs())
@settings(max_examples=120, deadline=None)
def test_every_field_is_what_transformers_reads(raw: dict[str, Any]) -> None:
    assert_read_alike(raw)


def assert_read_alike(raw: dict[str, Any]) -> None:
    """Assert that the configuration has the values that transformers reads."""
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), raw)
        ours, theirs = read_config(folder), AutoConfig.from_pretrained(folder)
        resaved = Path(name) / "resaved"
        theirs.save_pretrained(resaved)
        again = read_config(resaved)
    assert ours.family == theirs.model_type
    for field, attribute in {
        "vocab_size": "vocab_size",
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "intermediate": "intermediate_size",
        "norm_eps": EPS.get(theirs.model_type, "rms_norm_eps"),
        "tied": "tie_word_embeddings",
        "max_positions": "max_position_embeddings",
        "bos_id": "bos_token_id",
    }.items():
        assert getattr(ours, field) == getattr(theirs, attribute), field
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    theta = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)["rope_theta"]
    scaled = {
        "gpt_oss": RopeConfig(theta, "yarn", 32.0, 4096, truncate=False),
        "ministral3": RopeConfig(theta, "yarn", 16.0, 16_384, mscale=1.0, mscale_all_dim=1.0, query_beta=0.1),
    }
    assert ours.rope == scaled.get(theirs.model_type, RopeConfig(theta))
    caps = [getattr(theirs, key, None) for key in ("attn_logit_softcapping", "final_logit_softcapping")]
    assert [ours.score_cap, ours.logits_cap] == caps
    local = theirs.rope_parameters.get("sliding_attention")
    assert ours.local_rope == (None if local is None else RopeConfig(local["rope_theta"]))
    assert (ours.experts is not None) == any(is_sparse(theirs, layer) for layer in range(ours.layers))
    if ours.experts is not None:
        assert ours.experts.layers == tuple(i for i in range(ours.layers) if is_sparse(theirs, i))
        assert (ours.experts.count, ours.experts.active) == (6, theirs.num_experts_per_tok)
        assert ours.experts.intermediate == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.experts.shared == getattr(theirs, "shared_expert_intermediate_size", 0)
        assert ours.experts.normalised == getattr(theirs, "norm_topk_prob", True)
    assert ours.windows == expected_windows(theirs)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.dtype == (theirs.dtype or torch.float32)
    assert again == ours, "transformers writes the same model in another spelling"


GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "attention_multiplier": 0.5, "logits_scaling": 8}


@pytest.mark.parametrize(
    ("family", "options", "scales"),
    [  # of embeddings, of outputs of attention and MLP, of queries beside 1/sqrt(head_dim), and of logits
        ("llama", {}, (1, 1, 1, 1)),
        ("granite", GRANITE | {"head_dim": 16}, (12, 0.25, 0.5 * 4, 1 / 8)),
        ("gemma2", {"head_dim": 12, "query_pre_attn_scalar": 300}, (8, 1, 0.2, 1)),
        ("cohere2", {"logit_scale": 0.5}, (1, 1, 1, 0.5)),
    ],
)
def test_scales_are_those_of_the_family(
    family: str, options: dict[str, Any], scales: tuple[float, ...], tmp_path: Path
) -> None:
    raw = {key: value for key, value in of_family(family).items() if key != "hidden_act"}
    read = read_config(write(tmp_path, raw | options))
    assert (read.embedding_scale, read.residual_scale, read.query_scale, read.logits_scale) == pytest.approx(scales)


@pytest.mark.parametrize(
    ("family", "options", "biases"),
    [  # biases of q, k, v; of o; of the MLP: as transformers' modules are built
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
        ("qwen2", {"attention_bias": False}, (True, False, False)),
        ("qwen3", {}, (False, False, False)),
        ("qwen3", {"attention_bias": True, "mlp_bias": True}, (True, True, False)),
        ("mixtral", {"attention_bias": True}, (False, False, False)),
        ("glm4", {}, (True, False, False)),
        ("cohere2", {"attention_bias": True}, (True, True, False)),
        ("internlm3", {"qkv_bias": True}, (True, False, False)),
        ("internlm3", {"bias": True}, (False, True, True)),
        ("starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, (True, True, True)),
        ("starcoder2", {"hidden_act": "gelu_pytorch_tanh", "use_bias": False}, (False, False, False)),
        ("qwen2_moe", {}, (True, False, False)),
        ("qwen2_moe", {"qkv_bias": False}, (False, False, False)),
        ("qwen3_moe", {"attention_bias": True}, (True, True, False)),
        ("gpt_oss", {}, (True, True, False)),
        ("gpt_oss", {"attention_bias": False}, (False, False, False)),
    ],
)
def test_biases_are_the_familys_or_the_configurations(
    tmp_path: Path, family: str, options: dict[str, Any], biases: tuple[bool, bool, bool]
) -> None:
    config = read_config(write(tmp_path, of_family(family) | options))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == biases
    assert config.qk_norm == family.startswith("qwen3")


def test_an_original_context_next_to_the_scaling_counts_first(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    raw = BASE | {"rope_scaling": scaling, "original_max_position_embeddings": 64}
    assert read_config(write(tmp_path, raw)).rope.original_max_positions == 64


@pytest.mark.parametrize("made", [1, {}, {"from": "x"}, {"from": "x", "parameters_before": 0, "parameters": 5}])
def test_a_damaged_label_is_refused(made: object, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="forerun_widened"):
        read_config(write(tmp_path, BASE | {"forerun_widened": made}))


@pytest.mark.parametrize(
    ("generation", "eos"),
    [
        (None, (2,)),
        ({}, (2,)),
        ({"eos_token_id": None}, (2,)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [7, 5, 9]}, (7, 5, 9)),
    ],
)
def test_generation_config_names_the_eos_tokens_first(
    tmp_path: Path, generation: dict[str, Any] | None, eos: tuple[int, ...]
) -> None:
    assert read_config(write(tmp_path, BASE, generation)).eos_ids == eos


def test_an_eos_id_beyond_the_vocabulary_is_ignored(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, BASE | {"eos_token_id": [199, 200, 2**31 - 1]})).eos_ids == (199,)
    assert read_config(write(tmp_path, BASE | {"eos_token_id": 200})).eos_ids == ()


def test_a_model_without_an_architecture_is_recognised_by_its_type(tmp_path: Path) -> None:
    raw = of_family("qwen3") | {"architectures": None}
    assert read_config(write(tmp_path, raw)).family == "qwen3"


@pytest.mark.parametrize(
    "field",
    [
        {"query_pre_attn_scalar": 256},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 0},
        {"use_bidirectional_attention": True},
    ],
    ids=str,
)
def test_a_field_that_a_family_does_not_read_changes_nothing(field: dict[str, Any], tmp_path: Path) -> None:
    assert read_config(write(tmp_path, of_family("qwen3") | field)) == read_config(write(tmp_path, of_family("qwen3")))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["OlmoeForCausalLM"]}, r"architectures is \['OlmoeForCausalLM'\]; supported are Olmo3"),
    ({"architectures": None, "model_type": "gpt2"}, "model_type is 'gpt2'; supported are GptOss"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is silu"),
    (of_family("mixtral") | {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; it must be at most .*, 6"),
    (of_family("mixtral") | {"num_local_experts": None}, "num_experts is None; it must be a whole number"),
    (of_family("qwen3_moe") | {"num_experts": 10**6}, "num_experts is 1000000; it must be .* at most 10000"),
    (of_family("qwen3_moe") | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    (of_family("qwen3_moe") | {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'; it must be a list of layers"),
    (of_family("qwen3_moe") | {"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]; it must be a list of layers"),
    ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_scaling: type is 'mrope'; supported are default"),
    ({"rope_parameters": {"rope_type": "axial"}}, "rope_parameters: rope_type is 'axial'; supported are"),
    ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling: factor is None; it must be a number above 0"),
    ({"rope_scaling": {"type": "longrope"}}, "short_factor is None; it must be 4 numbers above 0, one for each"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [1, 0, 1, 1]}}, "long_factor"),
    (
        of_family("gemma3_text") | {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping is 50.0; the decoder computes gemma3_text without",
    ),
    (
        of_family("gemma2") | {"hidden_activation": "gelu"},
        "hidden_activation is 'gelu'; supported is gelu_pytorch_tanh",
    ),
    (of_family("starcoder2") | {"hidden_act": "relu"}, "hidden_act is 'relu'; supported is gelu_pytorch_tanh"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is None; it must be a number above 0"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of parameters for all layers"),
    (
        {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor is 4; it must exceed low_freq_factor, 4",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0 is supported"),
    *(
        ({key: {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}}, f"{key}: partial_rotary_factor is 0.5")
        for key in ("rope_scaling", "rope_parameters")
    ),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads, 8"),
    ({"num_attention_heads": 12}, "num_attention_heads is 12; it must divide hidden_size, 64, or head_dim be given"),
    ({"head_dim": 7}, "head_dim is 7; rotary embeddings need an even width"),
    ({"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number, at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number, at least 1"),
    ({"vocab_size": None}, "vocab_size is None; it must be a whole number"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number above 0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'; supported are float32"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id or a list"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types is .*; in llama with sliding_window None"),
    (of_family("qwen2") | {"layer_types": ["sliding_attention"] * 3}, "layer_types is .*; in qwen2 with"),
    (
        of_family("mistral") | {"sliding_window": 4, "layer_types": ["full_attention"] * 3},
        "in mistral with sliding_window 4 all layers must be sliding_attention",
    ),
    (of_family("mistral") | {"sliding_window": 0}, "sliding_window is 0; it must be a whole number, at least 1"),
    (of_family("qwen2") | {"layer_types": ["full_attention"]}, "layer_types is .*; it must give .* for 3 layers"),
    (of_family("qwen2") | {"layer_types": ["linear_attention"] * 3}, "layer_types is .*linear_attention.*"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_values_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as caught:
        read_config(write(tmp_path, BASE | change))
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("name", [*FAMILIES, "x" * 100_000])
def test_an_unknown_architecture_is_answered_with_the_most_similar_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_config(write(tmp_path, BASE | {"architectures": [f"{name}2"]}))
    message = str(caught.value).removeprefix(str(tmp_path))
    assert name in message or name not in FAMILIES
    assert len(message) < 400


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json is not there: name the folder"):
        read_config(tmp_path)


def test_the_table_names_each_family_once() -> None:
    names = [family.name for family in FAMILIES.values()]
    assert sorted(names) == sorted([*NAMES, "mimo", "internlm2"])  # whose code transformers lacks
    known = {name.removesuffix("_text").replace("_", "") for name in names}
    assert {a.removesuffix("ForCausalLM").lower() for a in FAMILIES} == known


def test_mimo_whose_code_is_no_part_of_transformers_is_qwen2_by_another_name(tmp_path: Path) -> None:
    own = {"num_nextn_predict_layers": 1, "attention_bias": True, "rope_theta": 640000}
    qwen = of_family("qwen2") | own
    mimo = qwen | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    found = [read_config(write(tmp_path, raw)) for raw in (qwen, mimo)]
    assert replace(found[1], family="qwen2") == found[0]
    assert found[1].qkv_bias
