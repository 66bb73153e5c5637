"""ModelConfig: the configuration of a checkpoint, read from config.json into one form.

This file decides which checkpoints the decoder supports; the error for any other names the field. It reads both forms
of Hugging Face configurations: `rope_theta`, `rope_scaling` and `torch_dtype`, or `rope_parameters` and `dtype`.
Missing keys have Hugging Face's defaults. `weights.py` checks the tensors against the configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from forerun.fields import Fields, is_list_of_whole, read_fields
from forerun.limits import shown
from forerun.models.experts_config import ExpertsConfig, read_experts
from forerun.models.families import FAMILIES, LLAMA_FORM, Family, LayerForm, Windows
from forerun.models.foreign import OF_OTHER_KINDS, ORIGINAL, PARTS, describe_unreadable
from forerun.models.inside import text_part
from forerun.models.quantized.scheme import read_scheme
from forerun.models.rope_config import RopeConfig, listed_rotary_layers, read_rope, read_rotary_dim, read_rotated

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
UNITS = {"B": 10**9, "M": 10**6, "K": 10**3, "": 1}  # of numbers of parameters
WIDENED = "forerun_widened"  # key in config.json of a widened checkpoint
SILU = ("silu", "swish")  # two names of the same function
GELU = ("gelu_pytorch_tanh",)
MOST_COMPARED = 64  # characters of a name; comparing longer ones takes time
MOST_LAYERS = 10_000  # more are taken for a damaged config.json
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, slots=True)
class ModelConfig(LayerForm):
    """The configuration of a decoder-only transformer and of its checkpoint.

    `windows[i]` is the sliding window of layer i in tokens, the token itself included; None: full attention. `dtype` is
    the checkpoint's. Any of `eos_ids` ends a generation. `widened` is the label of a checkpoint that `forerun widen`
    made, shown with all measurements. `experts` is None if all MLPs are dense, whose width is `intermediate`.
    The scales multiply embeddings, the outputs of attention and MLP (`residual_scale`), queries (in addition to
    1/sqrt(head_dim)), and logits. Layer i uses the rotary parameters `rope` if `rotated[i]`, else `local_rope`, or no
    rotation if that is None; with `rotated` empty all layers use `rope`. `rotary_dim` elements of each head are
    rotated; 0: all. `score_cap` and `logits_cap` are soft caps of attention scores and logits. `longest_text` is the
    text length that length-dependent rotary scalings assume; 0: `max_positions`.
    """

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    max_positions: int
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    bos_id: int | None
    eos_ids: tuple[int, ...]
    widened: str | None = None
    experts: ExpertsConfig | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    query_scale: float = 1.0
    logits_scale: float = 1.0
    local_rope: RopeConfig | None = None
    rotated: tuple[bool, ...] = ()
    rotary_dim: int = 0
    score_cap: float | None = None
    logits_cap: float | None = None
    longest_text: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether layers differ from Llama's only in widths, biases, windows, q/k norms, sinks and experts."""
        scales = self.embedding_scale, self.residual_scale, self.query_scale, self.logits_scale
        others = self.rotated, self.rotary_dim, self.score_cap, self.logits_cap, self.rope.query_beta
        form = {**LLAMA_FORM, "qk_norm": self.qk_norm, "sinks": self.sinks}
        has_form = all(getattr(self, name) == usual for name, usual in form.items())
        return has_form and set(scales) == {1.0} and not any(others)

    @property
    def num_rope_tables(self) -> int:
        """The number of rotary tables: 2 if some layers use `local_rope`."""
        return 1 if all(self.rotated) else 2

    @property
    def grows_queries(self) -> bool:
        """Whether queries have their own rotary table, times a factor that grows with the position (`query_growth`)."""
        return bool(self.rope.query_beta) and self.max_positions > self.rope.original_max_positions

    @property
    def group(self) -> int:
        """The number of query heads that share one key head."""
        return self.heads // self.kv_heads

    def within(self, max_positions: int | None) -> ModelConfig:
        """This configuration for texts of at most `max_positions` tokens; None: any."""
        return replace(self, max_positions=min(max_positions or self.max_positions, self.max_positions))

    def layer_fields(self) -> dict[str, Any]:
        """The shape of the layers, as keys and values of config.json."""
        return {
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "rms_norm_eps": self.norm_eps,
        }


def read_config(folder: Path) -> ModelConfig:
    """The configuration of the checkpoint in `folder`.

    Raises ModelNotFound without config.json, UnsupportedModel for an unsupported model, ModelError for damaged JSON.
    """
    fields = read_fields(folder / "config.json")
    return config_of(fields, *read_special_ids(folder))


def config_of(fields: Fields, bos: int | None = None, eos: tuple[int, ...] = ()) -> ModelConfig:
    """The configuration in these fields of config.json, with these special ids."""
    fields = text_part(fields)
    family = find_family(fields)
    fields = replace(fields, values={**family.defaults, **fields.values})
    refuse_options(fields, family)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    layers, vocab_size = fields.whole("num_hidden_layers", most=MOST_LAYERS), fields.whole("vocab_size")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"it must divide num_attention_heads, {heads}: correct it")
    positions = fields.whole("max_position_embeddings")
    head_dim, windows = read_head_dim(fields, family, hidden, heads), read_windows(fields, family, layers)
    rotary_dim = read_rotary_dim(fields, family, head_dim)
    score_cap, logits_cap = (fields.optional(key) if key in family.soft_caps else None for key in CAPS)

    def rope(layer_type: str) -> RopeConfig:
        return read_rope(fields, family, positions, rotary_dim or head_dim, layer_type)

    return ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.whole("intermediate_size"),
        norm_eps=fields.number(family.eps_key, family.norm_eps),
        rope=rope("full_attention"),
        tied=fields.flag("tie_word_embeddings", family.tied),
        max_positions=positions,
        longest_text=positions,
        qkv_bias=has_bias(fields, family, family.qkv_bias),
        out_bias=has_bias(fields, family, family.out_bias),
        mlp_bias=has_bias(fields, family, family.mlp_bias),
        windows=windows,
        dtype=read_dtype(fields),
        bos_id=bos,
        eos_ids=tuple(i for i in eos if i < vocab_size),
        widened=read_widened(fields),
        experts=read_experts(fields, family.moe, layers),
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else read_scale(fields, family, "embedding"),
        residual_scale=read_scale(fields, family, "residual"),
        query_scale=read_query_scale(fields, family, head_dim),
        logits_scale=read_scale(fields, family, "logits") / read_scale(fields, family, "logits_divisor"),
        local_rope=rope("sliding_attention") if family.local_theta else None,
        rotated=read_rotated(fields, family, windows),
        rotary_dim=rotary_dim,
        score_cap=score_cap,
        logits_cap=logits_cap,
        **{name: getattr(family, name) for name in LLAMA_FORM},
    )


def find_family(fields: Fields) -> Family:
    """The family of the first supported architecture; without any, by model_type. `XModel` means `XForCausalLM`."""
    names = fields.names("architectures")
    with_heads = [name.replace("Model", "ForCausalLM") for name in names]
    rows = [FAMILIES[name] for name in with_heads if name in FAMILIES]
    if not names:
        rows = [family for family in FAMILIES.values() if family.name == fields.values.get("model_type")]
    if rows:
        return rows[0]
    key = "architectures" if names else "model_type"
    asked = str(names[0] if names else fields.values.get(key))
    near = get_close_matches(asked[:MOST_COMPARED], FAMILIES, 3, cutoff=0.0)
    supported = f"supported are {', '.join(near)} and {len(FAMILIES) - len(near)} others in docs/real-models.md"
    for part in PARTS:
        if isinstance(fields.values.get(part), dict):
            kind = shown(fields.values[part].get("model_type"))
            supported = f"this is a multimodal model, whose {part} is of type {kind}; {supported}, by themselves"
    other = describe_unreadable(fields.path.parent, OF_OTHER_KINDS)
    raise fields.refuse(key, f"the folder {other}" if other else f"{supported}: choose a checkpoint of one of these")


def refuse_options(fields: Fields, family: Family) -> None:
    """Raise UnsupportedModel for options that would change results and that the decoder does not support."""
    read_scheme(fields)
    if fields.values.get("quantization") is not None:
        raise fields.refuse("quantization", f"weights quantised by MLX are not read: {ORIGINAL}")
    key, known = "hidden_activation" if family.soft_caps else "hidden_act", GELU if family.gelu else SILU
    if fields.values.get(key, known[0]) not in known:
        raise fields.refuse(key, f"supported is {known[0]}: choose a checkpoint with it")
    if not family.soft_caps:  # only Gemma's families have the options below
        return
    for key in CAPS:
        if key not in family.soft_caps and fields.values.get(key) is not None:
            raise fields.refuse(key, f"the decoder computes {family.name} without it: choose another checkpoint")
    if fields.values.get("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention", "it must be false: choose a model that writes text")


def read_scale(fields: Fields, family: Family, name: str) -> float:
    """The factor `name` in Family.scales; 1 if the family has no key for it."""
    return fields.number(family.scales[name], 1.0) if name in family.scales else 1.0


def read_query_scale(fields: Fields, family: Family, head_dim: int) -> float:
    """The factor of queries in addition to 1/sqrt(head_dim)."""
    if "scores" in family.scales:
        return read_scale(fields, family, "scores") * math.sqrt(head_dim)
    if family.query_scalar is None:
        return 1.0
    return math.sqrt(head_dim / fields.number("query_pre_attn_scalar", float(family.query_scalar)))


def has_bias(fields: Fields, family: Family, declared: bool | str | tuple[str, ...]) -> bool:
    """Whether layers have a bias; `declared` is the answer, or the keys of config.json of which one must be true."""
    keys = (declared,) if isinstance(declared, str) else declared
    return keys if isinstance(keys, bool) else any(fields.flag(key, family.bias_default) for key in keys)


def read_head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    """The width of a head: head_dim in config.json, else the family's default, else hidden size / number of heads."""
    if fields.values.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise fields.refuse("num_attention_heads", f"it must divide hidden_size, {hidden}, or head_dim be given")
    head_dim = fields.whole("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", f"rotary embeddings need an even width, not {head_dim}: correct it")
    return head_dim


def read_windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window, by the family's rule; layer_types that contradict the rule are refused."""
    rule = family.windows
    reads_flag = rule in (Windows.IF_USED, Windows.LISTED, Windows.EVERY_OTHER_BELOW, Windows.UNROTATED)
    enabled = rule is not Windows.NONE and (not reads_flag or fields.flag("use_sliding_window"))
    enabled = enabled and fields.values.get("sliding_window", family.window) is not None
    window = fields.whole("sliding_window", family.window) if enabled else None
    slides = sliding_by_default(fields, rule, layers) if enabled else [False] * layers
    usual_types = ["sliding_attention" if each else "full_attention" for each in slides]
    types = fields.names("layer_types") or usual_types
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise fields.refuse("layer_types", f"it must give full_attention or sliding_attention for {layers} layers")
    if types != usual_types and (rule in (Windows.NONE, Windows.ALL, Windows.IF_USED) or window is None):
        problem = f"in {family.name} with sliding_window {window} all layers must be {usual_types[0]}: correct either"
        raise fields.refuse("layer_types", problem)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def sliding_by_default(fields: Fields, rule: Windows, layers: int) -> list[bool]:
    """Which layers have a window by the family's rule, in a model that has windows but no layer_types."""
    if rule is Windows.LISTED:
        return [i >= fields.whole("max_window_layers", 28, least=0) for i in range(layers)]
    if rule in (Windows.EVERY_FOURTH, Windows.EVERY_SIXTH):
        usual = 6 if rule is Windows.EVERY_SIXTH else 4
        period = fields.whole("sliding_window_pattern", fields.whole("_sliding_window_pattern", usual))
        return [(i + 1) % period != 0 for i in range(layers)]
    if rule is Windows.UNROTATED:
        return [not rotates for rotates in listed_rotary_layers(fields, layers)]
    if rule is Windows.EVERY_OTHER:
        return [i % 2 == 0 for i in range(layers)]
    if rule is Windows.EVERY_OTHER_BELOW:
        return [i % 2 == 0 and i < fields.whole("max_window_layers", 28, least=0) for i in range(layers)]
    return [True] * layers


def read_widened(fields: Fields) -> str | None:
    """The label of a widened checkpoint; None for all others."""
    made = fields.values.get(WIDENED)
    if made is None:
        return None
    if not isinstance(made, dict) or not isinstance(made.get("from"), str):
        raise fields.refuse(WIDENED, 'it must be an object with the name of its source under "from": widen again')
    numbers = fields.inside(WIDENED)
    before, after = (amount(numbers.whole(key, most=2**63)) for key in ("parameters_before", "parameters"))
    return f"{made['from']} (widened from {before} to {after} parameters)"


def amount(count: int) -> str:
    """A number of parameters, rounded to two digits, such as 11 M or 0.51 B."""
    unit, size = next((u, n) for u, n in UNITS.items() if count >= n / 10 or n == 1)
    value = count / size
    return f"{value:.2g} {unit}".rstrip() if value < 99.5 else f"{value:.0f} {unit}".rstrip()


def read_dtype(fields: Fields) -> torch.dtype:
    """The dtype in config.json; float32 if there is none."""
    key = "dtype" if fields.values.get("dtype") else "torch_dtype"
    name = (fields.text(key) or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise fields.refuse(key, f"supported are {', '.join(DTYPES)}: choose a checkpoint stored in one of these")
    return DTYPES[name]


def special_sources(folder: Path) -> list[Fields]:
    """The files with special ids, the most authoritative first: generation_config.json may list several end ids."""
    paths = [folder / name for name in ("generation_config.json", "config.json")]
    sources = [read_fields(path) for path in paths if path.exists()]
    return [*sources, *map(text_part, sources)]


def read_special_ids(folder: Path) -> tuple[int | None, tuple[int, ...]]:
    """The bos id (None: there is none) and all eos ids."""
    sources = special_sources(folder)
    bos = next((ids[0] for ids in (token_ids(s, "bos_token_id") for s in sources) if ids), None)
    return bos, next((ids for ids in (token_ids(s, "eos_token_id") for s in sources) if ids), ())


def token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """The ids under `key`, one or several; () if it is missing."""
    value = fields.values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not is_list_of_whole(ids):
        raise fields.refuse(key, "it must be a token id or a list of them: correct it")
    return tuple(ids)
