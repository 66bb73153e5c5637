"""The folder of an EAGLE drafter: which tensors it must hold, and how its config.json is understood.

EAGLE-1 and EAGLE-2 share a layout, EAGLE-3 (2503.01840) has another one with options of its own, and P-EAGLE
(2602.01469) one more. The authors' layouts have tensors under `midlayer.` or `layers.0.`, and `fc.weight`; a folder
without the norms of EAGLE-3 is EAGLE-1 or EAGLE-2. What differs is declared in `EagleForm`. Embeddings or a head that a
folder has no tensor for are the target's own. config.json is read in the authors' spelling, or in that of
`speculators`, which puts the layer's own fields under `transformer_layer_config`; its options, beside that, have the
same names and meanings in both, and so have the ids of the target's layers, which name a layer by its input. Layers
that are not computed are refused by name.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from forerun.fields import Fields
from forerun.heads.folder import HeadSigns
from forerun.heads.speculators import LAYER_CONFIG, SPECULATORS
from forerun.models.config import ModelConfig, config_of
from forerun.models.projections import LayerTable

PLACES = ("midlayer", "layers.0")  # what the layer's tensors are called
FEATURE = (-1,)  # the state that EAGLE-1 reads: the one behind the target's final norm
EMBEDDING, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
MASK_STATE = "mask_hidden"  # what stands for the target's states in masked places
INPUT_NORM, STATE_NORM = "input_layernorm.weight", "hidden_norm.weight"
MAP, MAP_BIAS = "fc.weight", "fc.bias"
ALL_NORM, TAP_NORM = "input_norm.weight", "fc_norm.{}.weight"  # of the states before they are mapped
ARCHITECTURE = "LlamaForCausalLMEagle3"
TAP_IDS = "eagle_aux_hidden_state_layer_ids"
NORMED_RESIDUAL = "norm_before_residual"
OPTIONS = (NORMED_RESIDUAL, "norm_before_fc", "fc_norm", "norm_output")
MASK_TOKEN = "mask_token_id"
KINDS = ("eagle3", "peagle")  # of speculators
# What speculators puts beside the layer's own.
OUTSIDE = ("draft_vocab_size", "target_hidden_size", TAP_IDS, MASK_TOKEN, *OPTIONS)
MOST_TAPS = 16
SIGNS = HeadSigns((("architectures", "Eagle"), (SPECULATORS, "eagle")), layout="eagle")


@dataclass(frozen=True, slots=True)
class EagleForm:
    """What differs between EAGLE layers, as the folder says. `taps` are the target's states that it reads.

    `joined` is EAGLE-1: embedding and state are mapped to the layer's input together, there is neither a norm before
    attention nor one behind the layer, and the head is the target's. The other fields are options of EAGLE-3.
    `norm_before_residual`: the residual stream is the normed state. `norm_before_fc` and `fc_norm`: the states are
    normed before they are mapped, all of them together or each by itself. `norm_output`: guesses read the layer's
    output behind the last norm (EAGLE 3.1). `fc_bias` is of the map. `mask_token` is P-EAGLE, which guesses in masked
    places, all in one pass: their embedding.
    """

    taps: tuple[int, ...]
    joined: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token: int | None = None


@dataclass(frozen=True, slots=True)
class EagleTensors:
    """Names and shapes of all tensors of a folder."""

    config: ModelConfig
    form: EagleForm
    place: str
    target_hidden: int
    draft_vocab: int
    own_embedding: bool
    own_head: bool = True

    @property
    def table(self) -> LayerTable:
        """The first layer's. In EAGLE-3 the projections of queries, keys and values read twice the width."""
        table = LayerTable.of(self.config, 0)
        if self.form.joined:
            return replace(table, vectors={name: size for name, size in table.vectors.items() if name != INPUT_NORM})
        vectors = {**table.vectors, STATE_NORM: self.config.hidden}
        return replace(table, vectors=vectors, qkv=replace(table.qkv, inputs=2 * self.config.hidden))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All of them but the table of ids."""
        outside = self.of_joined() if self.form.joined else self.of_fused()
        if self.form.fc_bias:
            outside[MAP_BIAS] = (self.config.hidden,)
        if self.own_embedding:
            outside[EMBEDDING] = (self.config.vocab_size, self.config.hidden)
        for index in range(1, self.config.layers):
            table = LayerTable.of(self.config, index)
            outside |= {f"layers.{index}.{name}": shape for name, shape in table.tensors().items()}
        return outside | {f"{self.place}.{name}": shape for name, shape in self.table.tensors().items()}

    def of_joined(self) -> dict[str, tuple[int, ...]]:
        """Those outside of EAGLE-1's layer."""
        return {MAP: (self.config.hidden, self.config.hidden + self.target_hidden)}

    def of_fused(self) -> dict[str, tuple[int, ...]]:
        """Those outside of EAGLE-3's layer."""
        hidden, num_taps = self.config.hidden, len(self.form.taps)
        found: dict[str, tuple[int, ...]] = {
            MAP: (hidden, num_taps * self.target_hidden),
            NORM: (hidden,),
        }
        if self.own_head:
            found[HEAD] = (self.draft_vocab, hidden)
        if self.form.norm_before_fc:
            found[ALL_NORM] = (num_taps * self.target_hidden,)
        if self.form.mask_token is not None:
            found[MASK_STATE] = (1, 1, num_taps * self.target_hidden)
        if self.form.fc_norm:
            found |= {TAP_NORM.format(tap): (self.target_hidden,) for tap in range(num_taps)}
        return found


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
