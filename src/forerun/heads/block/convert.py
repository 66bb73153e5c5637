"""Conversions of block drafters: the layout of DFlash's authors, and dflash, dspark and dflash2 of `speculators`.

All layouts have the same tensor names; the intermediate form is the authors', which `block:DIR` reads. `speculators`
differs in three points. Its `aux_hidden_state_layer_ids` identify a state by the layer whose input it is, one more than
the authors' index of the layer whose output it is. Embedding and full head are always the target's. And dflash2 has
convolutions, which forerun does not compute: only identities are read and written.

The target's last layer is refused in both directions, because the authors read its output after the final norm, and
speculators before it. The converter of speculators omits its index, which leaves `fc.weight` too wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.errors import UnsupportedModel
from forerun.fields import Fields, is_list_of_whole
from forerun.heads.block import format as names
from forerun.heads.block.format import BlockConfig, BlockTensors
from forerun.heads.kinds import SPECULATORS
from forerun.heads.layouts import (
    LAYER_CONFIG,
    TRAINING,
    VERSION_KEY,
    DraftFiles,
    DraftLayout,
    DraftMethod,
    TargetFacts,
    infer_target,
    of_speculators,
    package_config,
    package_layer,
    refuse_fields,
)
from forerun.heads.vocabulary import OFFSETS
from forerun.models.config import config_of
from forerun.models.projections import HEAD

KINDS: Mapping[str, dict[str, Any]] = {  # the fields of each type, with their defaults
    "dflash": {},
    "dspark": {
        "sample_from_anchor": True,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dflash2": {"sliding_window_non_causal": True, "selector_rank": 256, "selector_top_k": 16},
}
ARCHITECTURES = {"dflash": names.ARCHITECTURE, "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}
COMMON = {"block_size": 8, "sample_from_anchor": False, "sliding_window_non_causal": False}  # of all types
IDS = "aux_hidden_state_layer_ids"
AUTHORS = (names.NESTED, names.TAP_IDS, names.MASK_ID, "causal", "is_causal", "num_target_layers", "draft_vocab_size")
CONVOLUTIONS = ("attention_conv", "mlp_conv")
CONVOLUTION_KEYS = ("conv_kernel_size", "conv_group_size")
PACKAGE_KEYS = (
    LAYER_CONFIG,
    SPECULATORS,
    VERSION_KEY,
    IDS,
    names.MASK_ID,
    "sliding_window_non_causal",
    "tie_word_embeddings",
)
PORTABLE = "`forerun train block --portable`, with --taps below the last layer, writes what speculators reads"
LAST = "its output is read before the target's final norm in speculators, and after it in the authors' layout"


def required_target(target: TargetFacts | None, files: DraftFiles) -> TargetFacts:
    """The target. Raises UnsupportedModel if none was given."""
    if target is None:
        problem = "the meaning of the target's last layer differs in this format, so the target must be known"
        raise UnsupportedModel(f"{files.folder}: {problem}: name it with --model")
    return target


def is_block(files: DraftFiles) -> bool:
    """Whether a folder is in the authors' layout."""
    return {names.MAP, names.MAP_NORM} <= files.tensors.keys() and SPECULATORS not in files.config


def read_block_package(files: DraftFiles, target: TargetFacts | None) -> DraftFiles:
    """Convert from `speculators` to the authors' layout. Raises UnsupportedModel if `block:DIR` cannot run it."""
    fields, num_layers = files.fields, required_target(target, files).config.layers
    stated = {key: value for key, value in files.config.items() if value is not None}
    values = COMMON | KINDS[str(stated[SPECULATORS])] | stated
    layer = {**fields.inside(LAYER_CONFIG).values, "model_type": "qwen3"}  # the only family of speculators' layers
    config = layer | {key: value for key, value in values.items() if key not in (*PACKAGE_KEYS, *CONVOLUTION_KEYS)}
    config |= {"architectures": [names.ARCHITECTURE], "num_target_layers": num_layers}
    config[names.NESTED] = {
        names.TAP_IDS: [each - 1 for each in read_ids_of_layers(fields, num_layers)],
        "causal": read_causal(replace(fields, values=values), replace(fields, values=layer)),
        names.MASK_ID: stated.get(names.MASK_ID),
    }
    over_all = stated.get("draft_vocab_size") == config.get("vocab_size")
    files = files.without(*TRAINING, *((OFFSETS,) if over_all else ()))
    return replace(files, config=config, tensors=without_convolutions(fields, files.tensors))


def read_ids_of_layers(fields: Fields, num_layers: int) -> list[int]:
    """The indices of the layers whose inputs the drafter reads."""
    ids: Any = fields.values.get(IDS)
    if not is_list_of_whole(ids, 0, num_layers) or not ids:
        raise fields.refuse(IDS, f"it must be a list of numbers from 0 to {num_layers - 1}: correct it")
    if num_layers in ids:
        raise fields.refuse(IDS, f"{num_layers} stands for the last layer's output, and {LAST}: use another drafter")
    return list(ids)


def read_causal(fields: Fields, layer: Fields) -> bool:
    """Whether the positions of a block see only those before them: by default in layers with sliding windows."""
    windows = config_of(layer).windows
    causal = any(windows) and not fields.flag("sliding_window_non_causal")
    if causal and not all(windows):
        rule = "layers with windows would be causal and the others not, but block:DIR has one rule for all layers"
        raise fields.refuse("sliding_window_non_causal", f"{rule}: use another drafter")
    return causal


def without_convolutions(fields: Fields, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without convolutions. Raises UnsupportedModel for a convolution that is not the identity."""
    kept = dict(tensors)
    for name in [each for each in tensors if any(f".{conv}." in each for conv in CONVOLUTIONS)]:
        tensor = kept.pop(name)
        neutral = torch.zeros_like(tensor)
        if name.endswith(".base_kernel") and tensor.dim() == 3:
            neutral[:, 0] = 1
        if not torch.equal(tensor, neutral):
            problem = f"{name} is a convolution other than the identity, which forerun does not compute"
            raise fields.refuse("conv_kernel_size", f"{problem}: use another drafter")
    return kept


def without_own_tables(files: DraftFiles, target: TargetFacts | None) -> DraftFiles:
    """The drafter without embedding and full head. Raises UnsupportedModel if they differ from the target's.

    A reduced head that the drafter does not store is added, with rows of the target's head.
    """
    target = required_target(target, files)
    tables = {names.EMBEDDING: target.embedding} | ({} if OFFSETS in files.tensors else {HEAD: target.head})
    for name, table in tables.items():
        stored = files.tensors.get(name)
        if stored is not None and not torch.equal(stored, table().to(stored.dtype)):
            problem = f"{name} differs from that of {target.name}, which speculators uses: choose another format"
            raise UnsupportedModel(f"{files.folder}: {problem}")
    files = files.without(*tables)
    if OFFSETS not in files.tensors or HEAD in files.tensors:
        return files
    head = target.head()[files.head_ids(target.config.vocab_size)].to(files.tensors[names.MAP].dtype)
    return replace(files, tensors={**files.tensors, HEAD: head})


def write_block_package(files: DraftFiles, target: TargetFacts | None) -> DraftFiles:
    """Convert the drafter to the layout of `speculators`. Raises UnsupportedModel for one that it cannot store."""
    fields, target = files.fields, required_target(target, files)
    meaning = BLOCK.meaning(files, target)
    check_written(meaning, fields, target)
    config = meaning.config
    kind = "dflash2" if config.selector_rank else "dspark" if config.markov_rank or config.confidence else "dflash"
    usual = COMMON | KINDS[kind]
    usual |= {key: value for key, value in package_fields(config).items() if key in usual}
    strange = (*AUTHORS, *(key for each in KINDS.values() for key in each), *COMMON, "target_hidden_size")
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        LAYER_CONFIG: package_layer(files.config, config.layers, *strange),
        "draft_vocab_size": fields.whole("draft_vocab_size", config.layers.vocab_size),
        "target_hidden_size": fields.values.get("target_hidden_size"),
        IDS: list(config.taps),
        names.MASK_ID: config.mask_id,
        **usual,
    }
    tensors = dict(files.tensors)
    if kind == "dflash2":
        values |= {"conv_kernel_size": 1, "conv_group_size": config.layers.hidden}
        tensors |= neutral_convolutions(config, files.tensors[names.MAP].dtype)
    return replace(files, config=package_config(fields, target, kind, values, config.most_depth), tensors=tensors)


def package_fields(config: BlockConfig) -> Mapping[str, Any]:
    """This drafter's values for the fields of all types of `speculators`."""
    return {
        "block_size": config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
        **({"sliding_window_non_causal": not config.causal} if any(config.layers.windows) else {}),
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.top_k,
    }


def check_written(tensors: BlockTensors, fields: Fields, target: TargetFacts) -> None:
    """Raise UnsupportedModel for a drafter that `speculators` cannot store."""
    c, layers, selects = tensors.config, tensors.config.layers, tensors.config.selector_rank > 0
    some_tokens, other_width = tensors.draft_vocab != target.config.vocab_size, layers.hidden != target.config.hidden
    refused = {
        "model_type": (layers.family != "qwen3", "the layers of speculators are qwen3's"),
        names.TAP_IDS: (-1 in c.taps, f"one is the last of {target.name}'s {target.config.layers} layers, and {LAST}"),
        names.MASK_ID: (c.mask_id is None, "speculators cannot store an own embedding of masked positions"),
        "causal": (c.causal and not all(layers.windows), "in speculators only layers with sliding windows are causal"),
        "hidden_size": (other_width, f"{target.name} has {target.config.hidden}, and speculators uses its embedding"),
        "draft_vocab_size": (selects and some_tokens, "speculators has selectors for heads over all tokens only"),
        "enable_confidence_head": (selects and c.confidence, "speculators has no confidence head next to a selector"),
    }
    fields = replace(fields, values={**fields.values, **fields.inside(names.NESTED).values})
    refuse_fields(fields, refused, f"convert it to another format, or train another one: {PORTABLE}")


def neutral_convolutions(config: BlockConfig, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The convolutions that a dflash2 must have, as identities with one position and one group."""
    hidden, convolutions = config.layers.hidden, dict[str, Tensor]()
    for layer in range(config.layers.layers):
        for name in CONVOLUTIONS:
            convolutions[f"{names.LAYER.format(layer)}{name}.base_kernel"] = torch.ones(2, 1, hidden, dtype=dtype)
            convolutions[f"{names.LAYER.format(layer)}{name}.kernel_projection.weight"] = torch.zeros(
                2, hidden, dtype=dtype
            )
    return convolutions


BLOCK = DraftMethod("block drafter", "block", BlockTensors.of, infer_target("qwen3"))
LAYOUTS = (
    DraftLayout(
        "speculators",
        BLOCK,
        f"config.json with {SPECULATORS} dflash, dspark or dflash2",
        of_speculators(*KINDS),
        read_block_package,
        write_block_package,
        without_own_tables,
        is_runnable=False,
    ),
    DraftLayout("dflash", BLOCK, "fc.weight, hidden_norm.weight", is_block),
)
