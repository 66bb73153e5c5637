"""EAGLE layers in their authors' layout and in that of `speculators`.

Both give the tensors the same names, but for the place of the layer's own, and both name a target's layer by its input,
so ids of taps stay as they are. The form that is kept in between is the authors', which `eagle:DIR` reads: EAGLE-3
under `midlayer.`, EAGLE-1 under `layers.0.`, and the head's tokens in the order of their ids. `t2d`, which says the
same as `d2t`, is left out there and written anew.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forerun.errors import UnsupportedModel
from forerun.heads.eagle.format import (
    ARCHITECTURE,
    EMBEDDING,
    HEAD,
    KINDS,
    MAP,
    MASK_TOKEN,
    OPTIONS,
    OUTSIDE,
    PLACES,
    TAP_IDS,
    EagleTensors,
    author_fields,
    fitted_tensors,
    usual_taps,
)
from forerun.heads.layouts import (
    DraftFiles,
    DraftLayout,
    DraftMethod,
    DraftSource,
    TargetFacts,
    check_tensors_of,
    listed,
    own_target,
    unchanged,
)
from forerun.heads.speculators import FORMAT_KEYS, KEPT, LAYER_CONFIG, SPECULATORS, of_speculators, package_config
from forerun.heads.vocabulary import MASK, OFFSETS, head_ids, id_tables
from forerun.models.config import MOST_LAYERS

ARCHITECTURES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}
USUAL_GUESSES = 3  # what the package's own converter writes
BLOCK_NORM = "hidden_norm.weight"  # of block drafters, whose tensors are otherwise named like these
FUSED, JOINED = PLACES  # where EAGLE-3 and EAGLE-1 have the layer


def is_eagle(source: DraftSource) -> bool:
    """Whether a folder is in the authors' layout."""
    layers = [f"{place}.mlp.down_proj.weight" for place in PLACES]
    there = MAP in source.shapes and any(name in source.shapes for name in layers)
    return there and SPECULATORS not in source.values and BLOCK_NORM not in source.shapes


def is_fused(source: DraftSource) -> bool:
    """Whether that is EAGLE-3's."""
    norms = ("norm.weight", *(f"{place}.hidden_norm.weight" for place in PLACES))
    return is_eagle(source) and any(name in source.shapes for name in norms)


def is_joined(source: DraftSource) -> bool:
    """Whether that is the layout of EAGLE-1 and EAGLE-2."""
    return is_eagle(source) and not is_fused(source)


def read_fused(source: DraftSource, _target: TargetFacts | None) -> DraftFiles:
    """EAGLE-3, in either spelling."""
    config = dict(author_fields(source.fields).values)
    inside = config.pop("eagle_config", None)
    if isinstance(inside, dict) and inside.get(TAP_IDS) is not None:
        config.setdefault(TAP_IDS, inside[TAP_IDS])
    config["architectures"] = [ARCHITECTURE]
    if source.values.get(KEPT) is not None:
        config[KEPT] = source.values[KEPT]
    return in_order(replace(placed(source.files(MASK), FUSED), config=config))


def read_joined(source: DraftSource, _target: TargetFacts | None) -> DraftFiles:
    """EAGLE-1 or EAGLE-2, in the authors' spelling."""
    return placed(source.files(MASK), JOINED)


def placed(files: DraftFiles, place: str) -> DraftFiles:
    """The drafter with the tensors of its layer at this place."""
    moved: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        old = next((p for p in PLACES if name.startswith(f"{p}.")), None)
        moved[name if old is None else place + name[len(old) :]] = tensor
    return replace(files, tensors=moved)


def in_order(files: DraftFiles) -> DraftFiles:
    """The same with the head's tokens in the order of their ids, and no table of ids for a head over all of them."""
    if OFFSETS not in files.tensors or HEAD not in files.tensors:
        return files
    tensors, size = dict(files.tensors), len(files.tensors[OFFSETS])
    ids = head_ids(files, files.fields.whole("vocab_size"))
    order = ids.argsort()
    tensors[HEAD] = tensors[HEAD] if torch.equal(order, torch.arange(size)) else tensors[HEAD][order].contiguous()
    del tensors[OFFSETS]
    if size < files.fields.whole("vocab_size"):
        tensors[OFFSETS] = ids[order] - torch.arange(size)
    return replace(files, tensors=tensors)


def eagle_meaning(files: DraftFiles, target: TargetFacts | None) -> EagleTensors:
    """What the files describe, for comparison. Raises ModelError unless every tensor is used and all are there."""
    of = own_target(files.fields) if target is None else target.config
    name = "its own config.json" if target is None else target.name
    found = fitted_tensors(files.fields, files.tensors, of, name)
    check_tensors_of(files, found.shapes(), () if found.form.joined else (OFFSETS,))
    if not found.form.joined and len(head_ids(files, of.vocab_size)) != found.draft_vocab:
        raise files.fields.refuse("draft_vocab_size", f"{OFFSETS} has another size, or is missing: correct it")
    return found


def write_fused(files: DraftFiles, _target: TargetFacts | None) -> DraftFiles:
    """EAGLE-3 as its authors' code writes it."""
    return replace(files, tensors={**files.tensors, **id_tables(files)})


def self_contained(files: DraftFiles, target: TargetFacts | None) -> DraftFiles:
    """The same with an embedding and a head of its own, which `speculators` expects: the target's where it has none."""
    missing = [name for name in (EMBEDDING, HEAD) if name not in files.tensors]
    if missing and target is None:
        raise UnsupportedModel(f"{files.path.parent} uses its target's {listed(missing)}: name that with --model")
    if target is None:
        return files
    dtype, own = files.tensors[MAP].dtype, {EMBEDDING: target.embedding, HEAD: target.head}
    return replace(files, tensors={**files.tensors, **{name: own[name]().to(dtype) for name in missing}})


def write_speculators(files: DraftFiles, target: TargetFacts | None) -> DraftFiles:
    """EAGLE-3 as `speculators` saves it. Raises UnsupportedModel for what it has no field for."""
    fields = files.fields
    if fields.flag("qkv_bias"):
        raise fields.refuse("qkv_bias", "speculators has no such layer: convert it to another format")
    layer = {key: value for key, value in files.config.items() if key not in (*OUTSIDE, *FORMAT_KEYS, "eagle_config")}
    layer = {"model_type": "llama", "num_hidden_layers": 1} | layer
    own = replace(own_target(fields), layers=MOST_LAYERS)
    layer |= {"head_dim": own.head_dim, "num_key_value_heads": own.kv_heads, "rms_norm_eps": own.norm_eps}
    mask_token = fields.values.get(MASK_TOKEN)
    kind = "eagle3" if mask_token is None else "peagle"
    values = {
        "architectures": [ARCHITECTURES[kind]],
        LAYER_CONFIG: layer | {"tie_word_embeddings": False},
        "draft_vocab_size": fields.whole("draft_vocab_size", fields.whole("vocab_size")),
        "target_hidden_size": fields.values.get("target_hidden_size"),
        TAP_IDS: fields.values.get(TAP_IDS, None if target is None else list(usual_taps(target.config.layers))),
        **{name: fields.flag(name) for name in OPTIONS},
        "embed_requires_grad": kind == "peagle",
        **({} if mask_token is None else {MASK_TOKEN: mask_token}),
    }
    names = {name: name.replace(f"{FUSED}.", f"{JOINED}.", 1) for name in files.tensors}
    tensors = {names[name]: tensor for name, tensor in files.tensors.items()}
    config = package_config(fields, target, kind, USUAL_GUESSES, values)
    return DraftFiles(files.path, config, tensors | id_tables(files))


EAGLE3 = DraftMethod("EAGLE-3", "eagle", eagle_meaning)
EAGLE1 = DraftMethod("EAGLE-1 or EAGLE-2", "eagle", eagle_meaning)
LAYOUTS = (
    DraftLayout(
        "speculators",
        EAGLE3,
        f"config.json with {SPECULATORS} eagle3 or peagle",
        of_speculators(*KINDS),
        read_fused,
        write_speculators,
        self_contained,
    ),
    DraftLayout("eagle", EAGLE3, "fc.weight, norm.weight, midlayer.* or layers.0.*", is_fused, read_fused, write_fused),
    DraftLayout("eagle", EAGLE1, "fc.weight, layers.0.*, no norm.weight", is_joined, read_joined, unchanged),
)
