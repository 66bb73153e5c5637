"""MTP modules in the layout of Qwen3-Next, which `mtp:DIR` reads, and in that of `speculators`.

Both compute the same: the embedding, normed, before the state, normed; a projection, a layer, a norm. In `speculators`
there is one module, its layer is qwen3's, and embedding and head are the target's. The state that enters is the
target's behind its final norm where a module serves, in vLLM as here; the package computes with what it is given.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.heads.layouts import (
    DraftFiles,
    DraftLayout,
    DraftMethod,
    DraftSource,
    TargetFacts,
    check_tensors_of,
    own_target,
    unchanged,
)
from forerun.heads.mtp.format import COUNT_KEYS, SHAPE_KEY, MtpTensors, described, promised_modules
from forerun.heads.speculators import (
    FORMAT_KEYS,
    KEPT,
    LAYER_CONFIG,
    SPECULATORS,
    TRAINING,
    number_format,
    of_speculators,
    package_config,
    resolved,
)
from forerun.models.config import ModelConfig
from forerun.models.mtp_names import QWEN
from forerun.models.weights import BUFFERS

KIND = "mtp"  # its type in speculators
COUNT, OWN_COUNT = "num_nextn_predict_layers", "mtp_num_hidden_layers"  # what a number is called there, and here
USUAL_GUESSES = 3  # what the package's own converter writes
LAYER, PACKAGE_LAYER = QWEN.layer.format(0), "mtp_layers.0."
PACKAGE_NAMES = {  # of what is not in the layer
    QWEN.projection: f"{PACKAGE_LAYER}input_proj.weight",
    QWEN.embedding_norm: f"{PACKAGE_LAYER}token_layernorm.weight",
    QWEN.state_norm: f"{PACKAGE_LAYER}hidden_layernorm.weight",
    QWEN.norm: f"{PACKAGE_LAYER}final_layernorm.weight",
}


def is_modules(source: DraftSource) -> bool:
    """Whether a folder holds modules as Qwen3-Next names them, and nothing else."""
    names = [name for name in source.shapes if not name.endswith(BUFFERS)]
    return QWEN.projection in names and all(name.startswith(QWEN.prefix) for name in names)


def read_modules(source: DraftSource, _target: TargetFacts | None) -> DraftFiles:
    """As `mtp:DIR` reads them."""
    return source.files()


def read_package_module(source: DraftSource, _target: TargetFacts | None) -> DraftFiles:
    """A module of `speculators`. Raises UnsupportedModel for layers of other families than qwen3."""
    fields = source.fields
    layer = fields.inside(LAYER_CONFIG)
    if layer.values.get("model_type") != "qwen3":
        raise layer.refuse("model_type", "a module of speculators is read if its layer is qwen3's: use another")
    config = {**layer.values, "num_hidden_layers": 1, OWN_COUNT: fields.whole(COUNT, 1)}
    config = {key: value for key, value in config.items() if key not in ("layer_types", "max_window_layers")}
    config["dtype"] = number_format(fields)
    if source.values.get(KEPT) is not None:
        config[KEPT] = source.values[KEPT]
    own = {theirs: ours for ours, theirs in PACKAGE_NAMES.items()}
    files = source.files(*TRAINING)
    tensors = {
        own.get(name, LAYER + name.removeprefix(PACKAGE_LAYER) if name.startswith(PACKAGE_LAYER) else name): tensor
        for name, tensor in files.tensors.items()
    }
    return replace(files, config=config, tensors=tensors)


def modules_meaning(files: DraftFiles, target: TargetFacts | None) -> MtpTensors:
    """What the files describe, for comparison. Raises ModelError unless every tensor is used and all are there."""
    found = MtpTensors(layers_of(files, target), QWEN, 0)
    check_tensors_of(files, found.shapes())
    return found


def layers_of(files: DraftFiles, target: TargetFacts | None) -> ModelConfig:
    """The configuration of the modules' layers: what config.json says, and else the target's.

    Raises UnsupportedModel for those of another target.
    """
    fields = files.fields
    if target is None:
        config = own_target(fields)
    else:
        config = described(fields, target.config, target.name) if SHAPE_KEY in fields.values else target.config
    count = promised_modules(fields) or 1
    return replace(config, layers=count, windows=config.windows[-1:] * count, tied=False, experts=None)


def write_package_module(files: DraftFiles, target: TargetFacts | None) -> DraftFiles:
    """As `speculators` saves it. Raises UnsupportedModel for what it has no field for."""
    fields, config = files.fields, layers_of(files, target)
    refused = {
        OWN_COUNT: (config.layers != 1, "speculators has one module"),
        "model_type": (not config.qk_norm or config.qkv_bias, "the layers of speculators are qwen3's"),
        "sliding_window": (any(config.windows), "the layer of a module in speculators has no window"),
    }
    for key, (is_refused, why) in refused.items():
        if is_refused:
            raise fields.refuse(key, f"{why}: use another drafter, such as `forerun train mtp --portable` writes")
    strange = (*FORMAT_KEYS, *COUNT_KEYS, "use_sliding_window")
    layer = {key: value for key, value in files.config.items() if key not in strange}
    num_layers = 1 if target is None else target.config.layers  # by which the package finds the state that it reads
    layer |= {
        "model_type": "qwen3",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_attention_heads": config.heads,
        **resolved(config),
        "num_hidden_layers": num_layers,
    }
    values = {"architectures": ["MTPDraftModel"], LAYER_CONFIG: layer, COUNT: 1}
    tensors = {
        PACKAGE_NAMES.get(name, PACKAGE_LAYER + name.removeprefix(LAYER)): tensor
        for name, tensor in files.tensors.items()
    }
    return DraftFiles(files.path, package_config(fields, target, KIND, USUAL_GUESSES, values), tensors)


MTP = DraftMethod("MTP module", "mtp", modules_meaning)
LAYOUTS = (
    DraftLayout(
        "speculators",
        MTP,
        f"config.json with {SPECULATORS} mtp",
        of_speculators(KIND),
        read_package_module,
        write_package_module,
        is_run=False,
    ),
    DraftLayout("mtp", MTP, "mtp.fc.weight, and no tensors but mtp.*", is_modules, read_modules, unchanged),
)
