"""The folder of an EAGLE drafter: its tensors, the fields of its config.json, and conversions.

EAGLE-1 and EAGLE-2 share a layout; EAGLE-3 (2503.01840) has its own, with options, and P-EAGLE (2602.01469) extends it.
The authors' layouts have `fc.weight` and tensors under `midlayer.` or `layers.0.`; a folder without the norms of
EAGLE-3 is EAGLE-1 or EAGLE-2. `EagleForm` describes the differences. If embedding or head are missing, the target's are
used. config.json is read in the authors' form, or in that of `speculators`, which puts the layer's fields under
`transformer_layer_config`. In both, the options have the same names, and so have the indices of the target's layers,
which identify a state by the layer whose input it is. Unsupported layers are refused by name.

The intermediate form of conversions is the authors': EAGLE-3 under `midlayer.`, EAGLE-1 under `layers.0.`, and the
head's tokens sorted by id. `t2d`, which is redundant with `d2t`, is omitted there and written again.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from forerun.errors import UnsupportedModel
from forerun.fields import Fields, is_list_of_whole
from forerun.heads.folder import OWN_EMBEDDING, model_fields, refuse_missing_tables, refuse_sizes
from forerun.heads.kinds import SPECULATORS
from forerun.heads.layouts import (
    LAYER_CONFIG,
    DraftFiles,
    DraftLayout,
    DraftMethod,
    TargetFacts,
    infer_target,
    of_speculators,
    package_config,
    package_layer,
)
from forerun.heads.vocabulary import MASK, OFFSETS
from forerun.models.config import ModelConfig, config_of
from forerun.models.projections import HEAD, LayerTable, Shapes

PLACES = MIDLAYER, FIRST_LAYER = "midlayer", "layers.0"  # prefixes of the layer's tensor names
FEATURE = (-1,)  # the tap of EAGLE-1: the state after the target's final norm
EMBEDDING, NORM = OWN_EMBEDDING, "norm.weight"
MASK_STATE = "mask_hidden"  # replaces the target's states at mask tokens
INPUT_NORM, STATE_NORM = "input_layernorm.weight", "hidden_norm.weight"
MAP, MAP_BIAS = "fc.weight", "fc.bias"
ALL_NORM, TAP_NORM = "input_norm.weight", "fc_norm.{}.weight"  # of the states before they are mapped
ARCHITECTURE = "LlamaForCausalLMEagle3"
TAP_IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
NORMED_RESIDUAL = "norm_before_residual"
OPTIONS = (NORMED_RESIDUAL, "norm_before_fc", "fc_norm", "norm_output")
MASK_TOKEN = "mask_token_id"
USUAL_TAPS = 3  # vLLM's default
KINDS = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}  # types of speculators and their architectures
# Fields that speculators stores outside of those of the layer.
PACKAGE_KEYS = ("draft_vocab_size", "target_hidden_size", TAP_IDS, MASK_TOKEN, *OPTIONS)
MOST_TAPS = 16


@dataclass(frozen=True, slots=True)
class EagleForm:
    """The variant of an EAGLE layer. `taps` are the target's states that it reads.

    `joined` is EAGLE-1: embedding and state are mapped together to the layer's input, there is no norm before attention
    or after the layer, and the head is the target's. The other fields are options of EAGLE-3. `norm_before_residual`:
    the residual stream is the normed state. `norm_before_fc`, `fc_norm`: the states are normed before they are mapped,
    concatenated or separately. `norm_output`: draft tokens read the output after the last norm (EAGLE 3.1). `fc_bias`:
    the map has a bias. `mask_token`: the id of P-EAGLE's mask token, None for others.
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

    layers: ModelConfig
    form: EagleForm
    place: str
    target_hidden: int
    draft_vocab: int
    own_embedding: bool
    own_head: bool = True
    title: ClassVar[str] = "the EAGLE drafter of its config.json"
    tables: ClassVar[Collection[str]] = (EMBEDDING,)

    @classmethod
    def of(cls, read: Fields, stored: Container[str], target: ModelConfig, target_name: str) -> EagleTensors:
        """The tensors that a folder with these fields must have, for a target of this configuration and name.

        `stored` are the names of those that it has. Raises UnsupportedModel for an unsupported layer or another target.
        """
        usual = {"max_position_embeddings": target.max_positions, "model_type": "llama", "num_hidden_layers": 1}
        fields = model_fields(author_fields(read), usual)
        refuse_sizes(fields, target_name, vocab_size=target.vocab_size, target_hidden_size=target.hidden)
        tensors = read_tensors(fields, stored, target)
        refuse_missing_tables(fields, target, target_name, tensors.layers.hidden, tensors.shapes())
        return tensors

    @property
    def idle(self) -> Collection[str]:
        return () if self.form.joined else (OFFSETS, MASK)

    def for_length(self, max_model_len: int) -> EagleTensors:
        return replace(self, layers=self.layers.within(max_model_len))

    @property
    def table(self) -> LayerTable:
        """The table of the first layer. In EAGLE-3 its q, k and v projections read twice the width."""
        table = LayerTable.of(self.layers, 0)
        if self.form.joined:
            return replace(table, vectors={name: size for name, size in table.vectors.items() if name != INPUT_NORM})
        vectors = {**table.vectors, STATE_NORM: self.layers.hidden}
        return replace(table, vectors=vectors, qkv=replace(table.qkv, inputs=2 * self.layers.hidden))

    def shapes(self) -> Shapes:
        """Names and shapes of all tensors except the table of ids."""
        c, form, hidden, inputs = self.layers, self.form, self.layers.hidden, len(self.form.taps) * self.target_hidden
        shapes: Shapes = {MAP: (hidden, inputs + (hidden if form.joined else 0))}
        if not form.joined:
            shapes[NORM] = (hidden,)
        if self.own_head:
            shapes[HEAD] = (self.draft_vocab, hidden)
        if form.norm_before_fc:
            shapes[ALL_NORM] = (inputs,)
        if form.mask_token is not None:
            shapes[MASK_STATE] = (1, 1, inputs)
        if form.fc_norm:
            shapes |= {TAP_NORM.format(tap): (self.target_hidden,) for tap in range(len(form.taps))}
        if form.fc_bias:
            shapes[MAP_BIAS] = (hidden,)
        if self.own_embedding:
            shapes[EMBEDDING] = (c.vocab_size, hidden)
        tables = {f"layers.{index}": LayerTable.of(c, index) for index in range(1, c.layers)} | {self.place: self.table}
        return shapes | {
            f"{place}.{name}": shape for place, table in tables.items() for name, shape in table.tensors().items()
        }


def author_fields(fields: Fields) -> Fields:
    """The fields of a drafter in the form of EAGLE's authors. Raises UnsupportedModel for other kinds of drafters."""
    kind = fields.values.get(SPECULATORS)
    if kind is None:
        return fields
    if kind not in KINDS:
        raise fields.refuse(SPECULATORS, "for EAGLE it is eagle3 or peagle: name the folder of such a drafter")
    if (kind == "peagle") != (fields.values.get(MASK_TOKEN) is not None):
        raise fields.refuse(MASK_TOKEN, "peagle needs it, and eagle3 must not have it: correct it")
    layer = dict(fields.inside(LAYER_CONFIG).values)
    layer.setdefault("model_type", "qwen3")  # the default of speculators
    outside = {name: fields.values[name] for name in (*PACKAGE_KEYS, "dtype") if fields.values.get(name) is not None}
    return replace(fields, values=layer | outside)


def read_tensors(fields: Fields, stored: Container[str], target: ModelConfig) -> EagleTensors:
    """The tensors that a folder must have, from its fields and from the tensors that distinguish the generations."""
    config = replace(config_of(fields), tied=False)
    config = replace(config, qkv_bias=fields.flag("qkv_bias", config.qkv_bias))
    place = next((name for name in PLACES if f"{name}.post_attention_layernorm.weight" in stored), PLACES[0])
    joined = NORM not in stored and f"{place}.{STATE_NORM}" not in stored
    form = EagleForm(FEATURE, True, fields.flag("bias", True)) if joined else read_form(fields, target.layers)
    if joined and config.layers != 1:
        raise fields.refuse("num_hidden_layers", "EAGLE-1 and EAGLE-2 have one layer: use its own config.json")
    vocab_size = target.vocab_size
    draft_vocab = vocab_size if joined else fields.whole("draft_vocab_size", vocab_size, most=vocab_size)
    own_head = HEAD in stored and not joined
    return EagleTensors(config, form, place, target.hidden, draft_vocab, EMBEDDING in stored, own_head)


def read_form(fields: Fields, num_layers: int) -> EagleForm:
    """The options of an EAGLE-3 layer."""
    masked = fields.values.get(MASK_TOKEN) is not None
    mask_token = fields.whole(MASK_TOKEN, least=0, most=fields.whole("vocab_size") - 1) if masked else None
    options = {name: fields.flag(name) for name in OPTIONS}
    form = EagleForm(read_taps(fields, num_layers), **options, mask_token=mask_token)
    if form.norm_before_fc and form.fc_norm:
        raise fields.refuse("fc_norm", "it excludes norm_before_fc, which is set too: correct one of them")
    return form


def read_taps(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The taps, each the index of the layer whose input it is; by default those that the authors choose."""
    inside = fields.values.get(NESTED)
    ids = fields.values.get(TAP_IDS, inside.get(TAP_IDS) if isinstance(inside, dict) else None)
    if ids is None:
        return usual_taps(num_layers)
    if not is_list_of_whole(ids, 0, num_layers) or not 1 <= len(ids) <= MOST_TAPS:
        rule = f"it must list at most {MOST_TAPS} layers of the target, from 0 to {num_layers}"
        raise fields.refuse(TAP_IDS, f"{rule}: name a drafter that was trained for this target")
    return tuple(ids)


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """The taps that the authors choose."""
    return (min(2, num_layers), num_layers // 2, max(0, num_layers - 3))


def is_authors(files: DraftFiles, joined: bool) -> bool:
    """Whether a folder is in the authors' layout of EAGLE-3 or, `joined`, of EAGLE-1 and EAGLE-2."""
    names = files.tensors
    is_layer = MAP in names and any(f"{place}.mlp.down_proj.weight" in names for place in PLACES)
    fused = any(name in names for name in (NORM, *(f"{place}.{STATE_NORM}" for place in PLACES)))
    is_block = STATE_NORM in names  # block drafters have the other names too
    return is_layer and fused != joined and not is_block and SPECULATORS not in files.config


def read_fused(files: DraftFiles, _target: TargetFacts | None) -> DraftFiles:
    """Convert an EAGLE-3 drafter of either form to the authors' form."""
    config = dict(author_fields(files.fields).values)
    inside = config.pop(NESTED, None)
    if isinstance(inside, dict) and inside.get(TAP_IDS) is not None:
        config.setdefault(TAP_IDS, inside[TAP_IDS])
    config["architectures"] = [ARCHITECTURE]
    return in_order(replace(files.renamed({f"{FIRST_LAYER}.": f"{MIDLAYER}."}), config=config))


def read_joined(files: DraftFiles, _target: TargetFacts | None) -> DraftFiles:
    """Convert an EAGLE-1 or EAGLE-2 drafter to the authors' form."""
    return files.renamed({f"{MIDLAYER}.": f"{FIRST_LAYER}."})


def in_order(files: DraftFiles) -> DraftFiles:
    """The drafter with its head's rows sorted by token id, and without a table of ids if the head has all tokens."""
    if OFFSETS not in files.tensors or HEAD not in files.tensors:
        return files
    vocab_size = files.fields.whole("vocab_size")
    ids, order = files.head_ids(vocab_size).sort()
    offsets = {OFFSETS: ids - torch.arange(len(ids))} if len(ids) < vocab_size else {}
    head = {HEAD: files.tensors[HEAD][order]}
    return replace(files, tensors={**files.without(OFFSETS).tensors, **head, **offsets})


def self_contained(files: DraftFiles, target: TargetFacts | None) -> DraftFiles:
    """The drafter with an embedding and a head of its own, as `speculators` needs; missing ones are the target's."""
    missing = [name for name in (EMBEDDING, HEAD) if name not in files.tensors]
    if missing and target is None:
        raise UnsupportedModel(f"{files.folder} uses its target's {', '.join(missing)}: name the target with --model")
    tables = {} if target is None else {EMBEDDING: target.embedding, HEAD: target.head}
    added = {name: tables[name]().to(files.tensors[MAP].dtype) for name in missing}
    if HEAD in added:
        added[HEAD] = added[HEAD][files.head_ids(len(added[HEAD]))]
    return in_order(replace(files, tensors={**files.tensors, **added}))


def write_speculators(files: DraftFiles, target: TargetFacts | None) -> DraftFiles:
    """Convert EAGLE-3 to the layout of `speculators`. Raises UnsupportedModel for one that it cannot store."""
    fields = files.fields
    if fields.flag("qkv_bias"):
        raise fields.refuse("qkv_bias", "speculators cannot store it: convert the drafter to another format")
    mask_token, meaning = fields.values.get(MASK_TOKEN), EAGLE3.meaning(files, target)
    layer, num_taps = package_layer(files.config, meaning.layers, *PACKAGE_KEYS, NESTED), len(meaning.form.taps)
    kind = "eagle3" if mask_token is None else "peagle"
    values = {
        "architectures": [KINDS[kind]],
        LAYER_CONFIG: layer if num_taps == USUAL_TAPS else layer | {"num_aux_hidden_states": num_taps},
        "draft_vocab_size": fields.whole("draft_vocab_size", fields.whole("vocab_size")),
        "target_hidden_size": fields.values.get("target_hidden_size"),
        TAP_IDS: fields.values.get(TAP_IDS, None if target is None else list(usual_taps(target.config.layers))),
        **{name: fields.flag(name) for name in OPTIONS},
        "embed_requires_grad": kind == "peagle",
        **({} if mask_token is None else {MASK_TOKEN: mask_token}),
    }
    files = files.renamed({f"{MIDLAYER}.": f"{FIRST_LAYER}."})
    return replace(files, config=package_config(fields, target, kind, values))


EAGLE3 = DraftMethod("EAGLE-3", "eagle", EagleTensors.of, infer_target("llama"))
EAGLE1 = replace(EAGLE3, label="EAGLE-1 or EAGLE-2")
IS_EAGLE3, IS_EAGLE1 = (partial(is_authors, joined=joined) for joined in (False, True))
PACKAGE = f"config.json with {SPECULATORS} eagle3 or peagle"
EAGLE3_SIGN, EAGLE1_SIGN = "fc.weight, norm.weight, midlayer.* or layers.0.*", "fc.weight, layers.0.*, no norm.weight"
LAYOUTS = (
    DraftLayout("speculators", EAGLE3, PACKAGE, of_speculators(*KINDS), read_fused, write_speculators, self_contained),
    DraftLayout("eagle", EAGLE3, EAGLE3_SIGN, IS_EAGLE3, read_fused),
    DraftLayout("eagle", EAGLE1, EAGLE1_SIGN, IS_EAGLE1, read_joined),
)
