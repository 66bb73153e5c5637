"""ModelConfig: the configuration of a checkpoint, read from config.json into one form.

This file decides which checkpoints the decoder supports, and refuses others with the name of the field. It reads both
forms of Hugging Face configurations: `rope_theta`, `rope_scaling` and `torch_dtype`, or `rope_parameters` and `dtype`.
Missing keys have Hugging Face's defaults. `weights.py` checks the tensors against the configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forerun.fields import INT32, Fields, read_fields
from forerun.limits import shown
from forerun.models.experts_config import ExpertsConfig, read_experts
from forerun.models.families import FAMILIES, LLAMA_FORM, Family, LayerForm, Windows
from forerun.models.foreign import OF_OTHER_KINDS, ORIGINAL, PARTS, describe_unreadable
from forerun.models.inside import text_part
from forerun.models.quantized.scheme import read_scheme
from forerun.models.rope_config import RopeConfig, read_rope, read_rotary_dim, read_turned, turning_layers

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
UNITS = {"B": 10**9, "M": 10**6, "K": 10**3, "": 1}  # of numbers of parameters
WIDENED = "forerun_widened"  # key in config.json of a widened checkpoint
SILU = ("silu", "swish")  # two names of the same function
GELU = ("gelu_pytorch_tanh",)
MOST_LAYERS = 10_000  # a plausibility limit
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, slots=True)
class ModelConfig(LayerForm):
    """The configuration of a decoder-only transformer and of its checkpoint.

    `windows[i]` is the number of tokens that layer i attends to, the token itself included; None: all. `dtype` is the
    checkpoint's. Any of `eos_ids` ends a generation. `widened` is the label of a checkpoint made by `forerun widen`,
    shown with all measurements. `experts` is None if all layers are dense; `intermediate` is that of dense MLPs. The
    scales multiply embeddings, the outputs of attention and MLP, queries (besides 1/sqrt(head_dim)), and logits.
    Layer i has the rotary table `rope` if `turned[i]`, else `local_rope`, None: it is not rotated; with `turned` empty
    all have `rope`. `rotary_dim` elements of each head are rotated; 0: all. `score_cap` and `logits_cap` are soft caps
    of attention scores and logits. `longest_text` is the text length for length-dependent rotary scalings; 0:
    `max_positions`.
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
    added_scale: float = 1.0
    query_scale: float = 1.0
    logits_scale: float = 1.0
    local_rope: RopeConfig | None = None
    turned: tuple[bool, ...] = ()
    rotary_dim: int = 0
    score_cap: float | None = None
    logits_cap: float | None = None
    longest_text: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether layers are like Llama's except for widths, biases, windows, q/k norms, sinks and experts."""
        scales = self.embedding_scale, self.added_scale, self.query_scale, self.logits_scale
        others = self.turned, self.rotary_dim, self.score_cap, self.logits_cap, self.rope.query_beta
        form = {**LLAMA_FORM, "qk_norm": self.qk_norm, "sinks": self.sinks}
        alike = all(getattr(self, name) == usual for name, usual in form.items())
        return alike and set(scales) == {1.0} and not any(others)

    @property
    def num_turns(self) -> int:
        """Number of rotary tables that layers use."""
        return 1 if all(self.turned) else 2

    @property
    def queries_grow(self) -> bool:
        """Whether queries have their own rotary table after the others, whose values grow with the position."""
        return bool(self.rope.query_beta) and self.max_positions > self.rope.original_max_positions

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    def layer_fields(self) -> dict[str, Any]:
        """The shape of the layers as fields of config.json."""
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
    score_cap, logits_cap = (fields.optional(key) if key in family.capped else None for key in CAPS)

    def rope(of: str) -> RopeConfig:
        return read_rope(fields, family, positions, rotary_dim or head_dim, of)

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
        experts=read_experts(fields, family.sparse, layers),
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else read_scale(fields, family, "embedding"),
        added_scale=read_scale(fields, family, "added"),
        query_scale=read_query_scale(fields, family, head_dim),
        logits_scale=read_scale(fields, family, "output") / read_scale(fields, family, "logits"),
        local_rope=rope("sliding_attention") if family.local else None,
        turned=read_turned(fields, family, windows),
        rotary_dim=rotary_dim,
        score_cap=score_cap,
        logits_cap=logits_cap,
        **{name: getattr(family, name) for name in LLAMA_FORM},
    )


def find_family(fields: Fields) -> Family:
    """The family of this architecture, or of its base model; by model_type if no architecture is given."""
    names = fields.names("architectures")
    rows = [FAMILIES[name] for name in (each.replace("Model", "ForCausalLM") for each in names) if name in FAMILIES]
    if not names:
        rows = [family for family in FAMILIES.values() if family.name == fields.values.get("model_type")]
    if rows:
        return rows[0]
    key, supported = "architectures" if names else "model_type", f"supported are {', '.join(FAMILIES)}"
    for part in PARTS:
        if isinstance(fields.values.get(part), dict):
            kind = shown(fields.values[part].get("model_type"))
            supported = f"this is a model of several parts, whose {part} is of type {kind}; {supported}, by themselves"
    other = describe_unreadable(fields.path.parent, OF_OTHER_KINDS)
    raise fields.refuse(key, f"the folder {other}" if other else f"{supported}: choose a checkpoint of one of these")


def refuse_options(fields: Fields, family: Family) -> None:
    """Raise UnsupportedModel for options that change results and that the decoder does not support."""
    read_scheme(fields)
    if fields.values.get("quantization") is not None:
        raise fields.refuse("quantization", f"weights quantised by MLX are not read: {ORIGINAL}")
    key, known = "hidden_activation" if family.capped else "hidden_act", GELU if family.gelu else SILU
    if fields.values.get(key, known[0]) not in known:
        raise fields.refuse(key, f"supported is {known[0]}: choose a checkpoint with it")
    if not family.capped:  # other families do not read what follows
        return
    for key in CAPS:
        if key not in family.capped and fields.values.get(key) is not None:
            raise fields.refuse(key, f"{family.name} is computed without it: choose another checkpoint")
    if fields.values.get("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention", "it must be false: choose a model that writes text")


def read_scale(fields: Fields, family: Family, of: str) -> float:
    """The scale of `of`, if the family has a key for it; else 1."""
    return fields.number(family.scales[of], 1.0) if of in family.scales else 1.0


def read_query_scale(fields: Fields, family: Family, head_dim: int) -> float:
    """The scale of queries, besides 1/sqrt(head_dim)."""
    if "scores" in family.scales:
        return read_scale(fields, family, "scores") * math.sqrt(head_dim)
    if family.query_scalar is None:
        return 1.0
    return math.sqrt(head_dim / fields.number("query_pre_attn_scalar", float(family.query_scalar)))


def has_bias(fields: Fields, family: Family, declared: bool | str | tuple[str, ...]) -> bool:
    """Whether the family has this bias; `declared` is the answer, or the key (or keys) of config.json that hold it."""
    keys = (declared,) if isinstance(declared, str) else declared
    return keys if isinstance(keys, bool) else any(fields.flag(key, family.biased) for key in keys)


def read_head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    """The width of a head: from config.json, the family's default, or the hidden size over the heads."""
    if fields.values.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise fields.refuse("num_attention_heads", f"it must divide hidden_size, {hidden}, or head_dim be given")
    head_dim = fields.whole("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", f"rotary embeddings need an even width, not {head_dim}: correct it")
    return head_dim


def read_windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window, by the family's rule. Contradicting layer_types are refused, not ignored."""
    rule = family.windows
    asks = rule in (Windows.ASKED, Windows.LISTED, Windows.BELOW, Windows.NOT_TURNED)
    on = rule is not Windows.NONE and (not asks or fields.flag("use_sliding_window"))
    on = on and fields.values.get("sliding_window", family.window) is not None
    window = fields.whole("sliding_window", family.window) if on else None
    slides = sliding_by_default(fields, rule, layers) if on else [False] * layers
    full = ["sliding_attention" if each else "full_attention" for each in slides]
    types = fields.names("layer_types") or full
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise fields.refuse("layer_types", f"it must give full_attention or sliding_attention for {layers} layers")
    if types != full and (rule in (Windows.NONE, Windows.ALL, Windows.ASKED) or window is None):
        problem = f"in {family.name} with sliding_window {window} all layers must be {full[0]}: correct either"
        raise fields.refuse("layer_types", problem)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def sliding_by_default(fields: Fields, rule: Windows, layers: int) -> list[bool]:
    """Which layers have a window by the family's rule, for a model with windows but without layer_types."""
    if rule is Windows.LISTED:
        return [i >= fields.whole("max_window_layers", 28, least=0) for i in range(layers)]
    if rule in (Windows.EVERY_FOURTH, Windows.EVERY_SIXTH):
        usual = 6 if rule is Windows.EVERY_SIXTH else 4
        period = fields.whole("sliding_window_pattern", fields.whole("_sliding_window_pattern", usual))
        return [(i + 1) % period != 0 for i in range(layers)]
    if rule is Windows.NOT_TURNED:
        return [not turns for turns in turning_layers(fields, layers)]
    if rule is Windows.EVERY_OTHER:
        return [i % 2 == 0 for i in range(layers)]
    if rule is Windows.BELOW:
        return [i % 2 == 0 and i < fields.whole("max_window_layers", 28, least=0) for i in range(layers)]
    return [True] * layers


def read_widened(fields: Fields) -> str | None:
    """The label of a widened checkpoint; None for all others."""
    made = fields.values.get(WIDENED)
    if made is None:
        return None
    if not isinstance(made, dict) or not isinstance(made.get("from"), str):
        raise fields.refuse(WIDENED, 'it must be an object that says what it was made "from": widen again')
    numbers = fields.inside(WIDENED)
    before, after = (amount(numbers.whole(key, most=2**63)) for key in ("parameters_before", "parameters"))
    return f"{made['from']} (widened from {before} to {after} parameters)"


def amount(count: int) -> str:
    """A number of parameters with two digits: 11 M, 0.51 B."""
    unit, size = next((u, n) for u, n in UNITS.items() if count >= n / 10 or n == 1)
    value = count / size
    return f"{value:.2g} {unit}".rstrip() if value < 99.5 else f"{value:.0f} {unit}".rstrip()


def read_dtype(fields: Fields) -> torch.dtype:
    """The checkpoint's dtype; float32 if config.json has none."""
    key = "dtype" if fields.values.get("dtype") else "torch_dtype"
    name = (fields.text(key) or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise fields.refuse(key, f"supported are {', '.join(DTYPES)}: choose a checkpoint stored in one of these")
    return DTYPES[name]


def special_sources(folder: Path) -> list[Fields]:
    """The files with special ids, by precedence: generation_config.json first, which may list several end ids."""
    paths = [folder / name for name in ("generation_config.json", "config.json")]
    sources = [read_fields(path) for path in paths if path.exists()]
    return [*sources, *map(text_part, sources)]


def read_special_ids(folder: Path) -> tuple[int | None, tuple[int, ...]]:
    """The bos id and all eos ids."""
    sources = special_sources(folder)
    bos = next((ids[0] for ids in (token_ids(s, "bos_token_id") for s in sources) if ids), None)
    return bos, next((ids for ids in (token_ids(s, "eos_token_id") for s in sources) if ids), ())


def token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """The ids under `key`, one or several; () if it is missing."""
    value = fields.values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= INT32 for i in ids):
        raise fields.refuse(key, "it must be a token id or a list of them: correct it")
    return tuple(ids)
