"""How the config.json of an EAGLE layer is understood: in the authors' spelling, or in that of `speculators`.

The file decides which layer a folder describes, and refuses those that are not computed, by name. The generation is
told by the tensors that are there. `speculators` puts the layer's own fields under `transformer_layer_config`; its
options, beside that, have the same names and meanings in both spellings, and so have the ids of the target's layers,
which name a layer by its input.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from forerun.fields import Fields
from forerun.heads.eagle.format import (
    EMBEDDING,
    FEATURE,
    HEAD,
    NORM,
    PLACES,
    STATE_NORM,
    EagleForm,
    EagleTensors,
)
from forerun.models.config import ModelConfig, config_of

TAP_IDS = "eagle_aux_hidden_state_layer_ids"
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SPECULATORS, LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"
MASK_TOKEN = "mask_token_id"
KINDS = ("eagle3", "peagle")  # of speculators
# What speculators puts beside the layer's own.
OUTSIDE = ("draft_vocab_size", "target_hidden_size", TAP_IDS, MASK_TOKEN, *OPTIONS)
MOST_TAPS = 16


def author_fields(fields: Fields) -> Fields:
    """The same in the authors' spelling. Raises UnsupportedModel for what `speculators` does not call EAGLE."""
    kind = fields.values.get(SPECULATORS)
    if kind is None:
        return fields
    if kind not in KINDS:
        raise fields.refuse(SPECULATORS, "an EAGLE layer is eagle3 or peagle: name the folder of one")
    if (kind == "peagle") != (fields.values.get(MASK_TOKEN) is not None):
        raise fields.refuse(MASK_TOKEN, "peagle has one, and eagle3 has none: correct it")
    layer = dict(fields.inside(LAYER_CONFIG).values)
    layer.setdefault("model_type", "qwen3")  # as speculators takes it
    own = {name: fields.values[name] for name in (*OUTSIDE, "dtype") if fields.values.get(name) is not None}
    return replace(fields, values=layer | own)


def fitted_tensors(read: Fields, stored: Container[str], of: ModelConfig, target: str) -> EagleTensors:
    """What a folder with this config.json must hold, for the target of this name; `stored` are the tensors it has.

    Raises UnsupportedModel for a layer that is not computed, or that is another target's.
    """
    fields = of_layers(author_fields(read), of)
    if fields.values.get("vocab_size") != of.vocab_size:
        raise fields.refuse("vocab_size", f"{target} has {of.vocab_size}: name a drafter that was trained for it")
    if fields.whole("target_hidden_size", of.hidden) != of.hidden:
        raise fields.refuse("target_hidden_size", f"{target} has {of.hidden}: name a drafter that was trained for it")
    tensors = read_tensors(fields, stored, of)
    for name, is_own in ((EMBEDDING, tensors.own_embedding), (HEAD, tensors.own_head)):
        if not is_own and tensors.config.hidden != of.hidden:
            fix = "name a drafter that was trained for it, or add that tensor"
            raise fields.refuse("hidden_size", f"{target} has {of.hidden}, and the folder has no {name}: {fix}")
    if not tensors.own_head and tensors.draft_vocab != of.vocab_size:
        raise fields.refuse("draft_vocab_size", f"the folder has no {HEAD} for so many tokens: add it")
    return tensors


def of_layers(read: Fields, of: ModelConfig) -> Fields:
    """The fields as those of a model of these layers; what they leave out is the target's or the family's."""
    kept = {key: value for key, value in read.values.items() if key != "architectures"}
    defaults = {"max_position_embeddings": of.max_positions, "model_type": "llama", "num_hidden_layers": 1}
    return replace(read, values=defaults | kept)


def read_tensors(fields: Fields, stored: Container[str], of: ModelConfig) -> EagleTensors:
    """What the folder must hold, by its fields and by the tensors that tell the generations apart."""
    config = replace(config_of(fields), tied=False)
    config = replace(config, qkv_bias=fields.flag("qkv_bias", config.qkv_bias))
    place = next((name for name in PLACES if f"{name}.post_attention_layernorm.weight" in stored), PLACES[0])
    joined = NORM not in stored and f"{place}.{STATE_NORM}" not in stored
    form = EagleForm(FEATURE, True, fields.flag("bias", True)) if joined else read_form(fields, of.layers)
    if joined and config.layers != 1:
        raise fields.refuse("num_hidden_layers", "EAGLE-1 and EAGLE-2 have one layer: use its own config.json")
    draft_vocab = of.vocab_size if joined else fields.whole("draft_vocab_size", of.vocab_size, most=of.vocab_size)
    own_head = HEAD in stored and not joined
    return EagleTensors(config, form, place, of.hidden, draft_vocab, EMBEDDING in stored, own_head)


def read_form(fields: Fields, num_layers: int) -> EagleForm:
    """The options of an EAGLE-3 layer."""
    masked = fields.values.get(MASK_TOKEN) is not None
    mask_token = fields.whole(MASK_TOKEN, least=0, most=fields.whole("vocab_size") - 1) if masked else None
    options = {name: fields.flag(name) for name in OPTIONS}
    form = EagleForm(read_taps(fields, num_layers), **options, mask_token=mask_token)
    if form.norm_before_fc and form.fc_norm:
        raise fields.refuse("fc_norm", "norm_before_fc is too, and only one of them can be: correct either")
    return form


def read_taps(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The states that it reads, each named by the layer that it enters; as the authors choose them, unless said."""
    inside = fields.values.get("eagle_config")
    found = fields.values.get(TAP_IDS, inside.get(TAP_IDS) if isinstance(inside, dict) else None)
    if found is None:
        return usual_taps(num_layers)
    if not isinstance(found, list):
        found = [None]
    is_layer = [isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= num_layers for each in found]
    if not 1 <= len(found) <= MOST_TAPS or not all(is_layer):
        wanted = f"it must name layers of the target, from 0 to {num_layers}, {MOST_TAPS} at most"
        raise fields.refuse(TAP_IDS, f"{wanted}: name a drafter that was trained for this target")
    return tuple(found)


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """The states that the authors choose."""
    return (min(2, num_layers), num_layers // 2, max(0, num_layers - 3))
