"""RopeConfig: the parameters of rotary position embeddings (RoPE), read from config.json, and which layers use them.

Both forms of Hugging Face configurations are read, `rope_theta` and `rope_scaling` or `rope_parameters`. `rope.py`
computes the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from forerun.fields import FIX, Fields
from forerun.limits import shown
from forerun.models.families import Family, RotaryLayers

ROPE_KEYS: dict[str, tuple[str, ...]] = {  # required keys of each kind of scaling
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "dynamic": ("factor",),
    "longrope": (),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The parameters of one rotary table; fields that a kind of scaling does not use keep their defaults.

    `original_max_positions` is the context length before scaling. `attention_factor` None: `attention_factor` in
    rope.py derives it from the other fields. longrope divides each frequency by its short factor or, if texts may
    exceed the original context, by its long factor. `query_beta`: see `query_growth`; 0: queries do not grow.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    query_beta: float = 0.0


def key_of_rope(fields: Fields) -> str:
    """The key in config.json of the object with the rotary parameters."""
    return "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"


def read_rope(fields: Fields, family: Family, positions: int, width: int, layer_type: str) -> RopeConfig:
    """The rotary parameters of layers of this type in layer_types; `width` elements of each head are rotated.

    Families with two sets of parameters store them under the layer types, or a separate base for windowed layers.
    """
    key = key_of_rope(fields)
    rope = fields.inside(key) if fields.values.get(key) else replace(fields, values=family.rope)
    if family.local_theta and isinstance(rope.values.get(layer_type), dict):
        rope = rope.inside(layer_type)
    elif family.local_theta and layer_type == "sliding_attention":
        return RopeConfig(fields.number("rope_local_base_freq", family.local_theta))
    values = rope.values
    objects = [name for name, value in values.items() if isinstance(value, dict)]
    if objects:
        problem = "one set of parameters for all layers is supported: choose another checkpoint"
        raise fields.refuse(key, f"it has objects under {shown(objects)}, and {problem}")
    kind_key = "rope_type" if "rope_type" in values else "type"
    kind = rope.text(kind_key) or "default"
    kind = "longrope" if kind in family.longrope_names else kind
    if kind not in ROPE_KEYS:
        supported = ", ".join(ROPE_KEYS)
        raise rope.refuse(kind_key, f"supported are {supported}: choose another checkpoint or remove the scaling")
    theta = rope.number("rope_theta", fields.number("rope_theta", family.theta))
    beta = rope.optional("llama_4_scaling_beta") if family.growing_queries else None
    original = rope.whole("original_max_position_embeddings", positions) if beta else 0
    if kind == "default":
        return RopeConfig(theta, original_max_positions=original, query_beta=beta or 0.0)
    if theta <= 1:  # scalings divide by its logarithm
        raise (rope if "rope_theta" in values else fields).refuse("rope_theta", f"it must exceed 1: {FIX}")
    scaling = read_scaling(kind, theta, rope, fields, positions, width)
    original = scaling.original_max_positions or original
    return replace(scaling, original_max_positions=original, query_beta=beta or 0.0)


def read_scaling(kind: str, theta: float, rope: Fields, fields: Fields, positions: int, width: int) -> RopeConfig:
    """The parameters of a scaling; original_max_position_embeddings of the model overrides that of the scaling."""
    for key in ROPE_KEYS[kind]:
        rope.number(key)
    if kind == "linear":
        return RopeConfig(theta, kind, rope.number("factor"))
    if kind == "dynamic":  # the base grows only beyond max_position_embeddings, which no text exceeds
        return RopeConfig(theta)
    original = rope.whole("original_max_position_embeddings", positions)
    original = fields.whole("original_max_position_embeddings", original)
    scaling = RopeConfig(
        theta,
        kind,
        factor=rope.number("factor", positions / original),
        original_max_positions=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.optional("beta_fast") or 32.0,
        beta_slow=rope.optional("beta_slow") or 1.0,
        attention_factor=rope.optional("attention_factor"),
        mscale=rope.optional("mscale"),
        mscale_all_dim=rope.optional("mscale_all_dim"),
        truncate=rope.values.get("truncate") is None or rope.flag("truncate"),
        short_factors=read_factors(rope, "short_factor", width) if kind == "longrope" else (),
        long_factors=read_factors(rope, "long_factor", width) if kind == "longrope" else (),
    )
    if kind == "longrope" and original == 1 and scaling.factor > 1 and scaling.attention_factor is None:
        raise rope.refuse("original_max_position_embeddings", f"longrope divides by its logarithm: {FIX}")
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise rope.refuse("high_freq_factor", f"it must exceed low_freq_factor, {scaling.low_freq_factor}")
    return scaling


def read_factors(rope: Fields, key: str, width: int) -> tuple[float, ...]:
    """The divisors of longrope under `key`, one for each frequency."""
    factors: Any = rope.values.get(key)
    usable = isinstance(factors, list) and len(factors) == width // 2
    if not usable or not all(isinstance(f, int | float) and not isinstance(f, bool) and f > 0 for f in factors):
        raise rope.refuse(key, f"it must be {width // 2} numbers above 0, one for each frequency: {FIX}")
    return tuple(map(float, factors))


def read_rotated(fields: Fields, family: Family, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Whether each layer uses the rotary table `rope`; empty if all do."""
    windowed = [window is not None for window in windows]
    if family.local_theta:
        return tuple(not each for each in windowed)
    rule = family.rotary_layers
    if rule is RotaryLayers.ALL or (rule is RotaryLayers.WINDOWED_IF_ANY and not any(windowed)):
        return ()
    return tuple(listed_rotary_layers(fields, len(windows)) if rule is RotaryLayers.LISTED else windowed)


def listed_rotary_layers(fields: Fields, layers: int) -> list[bool]:
    """Whether each layer applies rotary embeddings, as listed under no_rope_layers; default: all but every fourth."""
    interval = fields.whole("no_rope_layer_interval", 4)
    listed = fields.values.get("no_rope_layers")
    listed = [(i + 1) % interval != 0 for i in range(layers)] if listed is None else listed
    if not isinstance(listed, list) or len(listed) != layers or not all(each in (0, 1) for each in listed):
        raise fields.refuse("no_rope_layers", f"it must give 0 or 1 for {layers} layers: {FIX}")
    return [bool(each) for each in listed]


def read_rotary_dim(fields: Fields, family: Family, head_dim: int) -> int:
    """The number of rotated elements of each head, which is even; 0: all."""
    key, rope = "partial_rotary_factor", fields
    if fields.values.get(key_of_rope(fields)) and fields.inside(key_of_rope(fields)).values.get(key) is not None:
        rope = fields.inside(key_of_rope(fields))
    share = rope.values.get(key, family.rotary_share)
    if family.rotary_share is None and share not in (None, 1):
        raise rope.refuse(key, "only 1.0 is supported for this family: choose another checkpoint")
    share = family.rotary_share or 1.0 if share is None else share
    width = int(head_dim * share) if isinstance(share, int | float) and not isinstance(share, bool) else 0
    if not 2 <= width <= head_dim or width % 2:
        raise rope.refuse(key, f"times head_dim, {head_dim}, it must give an even width: {FIX}")
    return 0 if width == head_dim else width
