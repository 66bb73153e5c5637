"""The tensors of MTP modules in a checkpoint, and conversions of modules.

This file determines the number of modules and the shapes of their layers, and checks that each of their tensors is
either read or refused by name. `models/mtp_names.py` has the names of the tensors.

Modules are converted between the layouts of Qwen3-Next and of `speculators`. The computation is the same in both:
normed embedding and normed state, concatenated in this order; a projection, a layer, a norm. `speculators` has one
module with a qwen3 layer, and the target's embedding and head. It leaves the choice of the state to its caller; forerun
and vLLM use the target's state after the final norm.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from forerun.errors import UnsupportedModel
from forerun.fields import Fields
from forerun.heads.folder import HeadFolder, model_fields, refuse_sizes
from forerun.heads.kinds import SPECULATORS
from forerun.heads.layouts import (
    LAYER_CONFIG,
    TRAINING,
    DraftFiles,
    DraftLayout,
    DraftMethod,
    TargetFacts,
    infer_target,
    number_format,
    of_speculators,
    package_config,
    package_layer,
    refuse_fields,
)
from forerun.heads.vocabulary import OFFSETS
from forerun.models.bundled import BUNDLED, TARGET
from forerun.models.config import MOST_LAYERS, ModelConfig, config_of
from forerun.models.loading import Blueprint
from forerun.models.mtp_names import PACKAGE, QWEN, MtpNaming, find_modules
from forerun.models.projections import EMBEDDING, FINAL_NORM, HEAD, Shapes, layer_tensors
from forerun.models.weights import Checkpoint

COUNT_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # names for the number of modules
SHAPE_KEY = "hidden_size"  # a folder with this key describes its modules' layers; else they have the target's shapes
DRAFT_VOCAB = "draft_vocab_size"  # number of tokens of the heads; `d2t` has their ids
KIND, COUNT = "mtp", COUNT_KEYS[0]  # the type in speculators, and its key for the number of modules


@dataclass(frozen=True, slots=True)
class MtpTensors:
    """Names and shapes of all tensors of a checkpoint's modules; `layers` is the configuration of their layers.

    `behind` is the target's number of layers. `tables` are embeddings and heads that differ from the target's, and
    `idle` are the tensors that are not read, such as those equal to the target's.
    """

    layers: ModelConfig
    naming: MtpNaming
    behind: int
    draft_vocab: int
    tables: Collection[str] = ()
    idle: Collection[str] = ()

    @property
    def title(self) -> str:
        c = self.layers
        return f"{c.layers} MTP modules as {self.naming.name} name them, with layers of the family {c.family}"

    def for_length(self, max_model_len: int) -> MtpTensors:
        return replace(self, layers=self.layers.within(max_model_len))

    def name(self, module: int, pattern: str) -> str:
        """The tensor name of a naming's pattern for this module."""
        return pattern.format(self.naming.number(module, self.behind))

    def shapes(self) -> Shapes:
        """Names and shapes of all tensors except embeddings and heads that equal the target's."""
        c, n = self.layers, self.naming
        shapes: Shapes = dict.fromkeys(self.tables, (c.vocab_size, c.hidden))
        for module in range(c.layers):
            shapes[self.name(module, n.projection)] = (c.hidden, 2 * c.hidden)
            shapes |= {self.name(module, each): (c.hidden,) for each in (n.embedding_norm, n.state_norm, n.norm)}
            prefix = self.name(module, n.layer)
            shapes |= {prefix + name: shape for name, shape in layer_tensors(c, module).items()}
        return shapes

    def possible_tables(self) -> dict[str, bool]:
        """The names under which modules may store embeddings and heads, and whether each is a head."""
        pairs = ((self.naming.embedding, False), (self.naming.head, True))
        return {
            self.name(m, pattern): is_head for m in range(self.layers.layers) for pattern, is_head in pairs if pattern
        }

    def stored_name(self, name: str) -> str:
        """The name in the checkpoint of the tensor that a decoder calls `name`."""
        if name == FINAL_NORM:
            return self.name(0, self.naming.norm)
        _, _, layer, rest = name.split(".", 3)
        return self.name(int(layer), self.naming.layer) + rest


def check_modules(folder: HeadFolder) -> MtpTensors:
    """Check the tensors of a checkpoint's modules by their headers, and return them.

    In a folder of modules alone, the heads may be over a part of the target's tokens. Raises ModelError for a
    checkpoint without modules, and for tensors that are missing, unknown or of another shape.
    """
    checkpoint, target = folder.checkpoint, folder.target
    modules = find_modules(checkpoint.stored, target.config.layers)
    if modules is None:
        raise UnsupportedModel(no_modules(folder))
    naming, vocab_size = modules.naming, target.config.vocab_size
    draft_vocab = vocab_size if folder.is_targets else folder.fields.whole(DRAFT_VOCAB, vocab_size, most=vocab_size)
    tensors = MtpTensors(layer_config(folder, naming), naming, target.config.layers, draft_vocab)
    others = checkpoint.stored.keys() - modules.tensors if folder.is_targets else ()
    tensors = replace(tensors, idle=(*tensors.possible_tables(), *others, OFFSETS))
    folder.checked(tensors, "or name a folder with the modules alone")
    return replace(tensors, tables=own_tables(tensors, checkpoint, target))


def layer_config(folder: HeadFolder, naming: MtpNaming) -> ModelConfig:
    """The configuration of the modules' layers; their number is that in config.json, or else that of the tensors."""
    target_config, fields, checkpoint = folder.target.config, folder.fields, folder.checkpoint
    count = promised_modules(fields) or max(1, naming.count(checkpoint.stored, target_config.layers))
    whole = target_config if folder.is_targets else module_config(fields, target_config, folder.target.name)
    experts, dense = whole.experts, f"{naming.layer.format(naming.number(0, target_config.layers))}mlp.gate_proj.weight"
    experts = None if experts is None or dense in checkpoint else replace(experts, layers=tuple(range(count)))
    return replace(whole, layers=count, windows=whole.windows[-1:] * count, experts=experts, tied=False)


def module_config(fields: Fields, target: ModelConfig, target_name: str) -> ModelConfig:
    """The configuration of the layers in a folder of modules; by default that of the target.

    Raises UnsupportedModel for modules of another target.
    """
    if SHAPE_KEY not in fields.values:
        return target
    refuse_sizes(fields, target_name, hidden_size=target.hidden, vocab_size=target.vocab_size)
    usual = {"max_position_embeddings": target.max_positions, "vocab_size": target.vocab_size}
    return config_of(model_fields(fields, {**usual, "model_type": target.family, "num_hidden_layers": 1}))


def promised_modules(fields: Fields) -> int:
    """The number of modules in config.json; 0 if it has no such field."""
    key = next((key for key in COUNT_KEYS if fields.values.get(key) is not None), COUNT_KEYS[0])
    return fields.whole(key, 0, least=0, most=MOST_LAYERS)


def no_modules(folder: HeadFolder) -> str:
    """The error message for a checkpoint without modules."""
    path, promised = folder.path, promised_modules(folder.fields)
    if promised:
        return (
            f"{path} has no tensors of MTP modules though its config.json promises {promised}: a conversion dropped "
            "them; download the original, or name a folder of trained modules, as in mtp:DIR"
        )
    if folder.is_targets:
        example = "mtp:stdlib-mtp" if path == BUNDLED[TARGET] else "mtp:DIR"
        return f"{path} ships no MTP modules: name a folder of trained ones, as in {example} (`forerun train mtp`)"
    return f"{path} has no tensors of MTP modules: name a folder that `forerun train mtp` wrote, or another drafter"


def own_tables(tensors: MtpTensors, checkpoint: Checkpoint, target: Blueprint) -> Collection[str]:
    """The stored embeddings and heads of modules that differ from the target's."""
    size = (tensors.layers.vocab_size, tensors.layers.hidden)
    whole, differing = target.checkpoint(target.dtype), list[str]()
    for name, is_head in tensors.possible_tables().items():
        if name in checkpoint:
            shared = HEAD if is_head and not target.config.tied else EMBEDDING
            if not torch.equal(checkpoint.take(name, size), whole.take(shared, size)):
                differing.append(name)
    return differing


def is_modules(files: DraftFiles) -> bool:
    """Whether a folder has modules with the names of Qwen3-Next, and nothing else."""
    return QWEN.projection in files.tensors and all(name.startswith(QWEN.prefix) for name in files.tensors)


def read_package(files: DraftFiles, _target: TargetFacts | None) -> DraftFiles:
    """Convert a module from the layout of `speculators`. Raises UnsupportedModel for layers other than qwen3's."""
    fields, layer = files.fields, files.fields.inside(LAYER_CONFIG)
    if layer.values.get("model_type") != "qwen3":
        raise layer.refuse("model_type", "the layer of a module of speculators must be qwen3's: use another drafter")
    config = {key: value for key, value in layer.values.items() if key not in ("layer_types", "max_window_layers")}
    config |= {"num_hidden_layers": 1, COUNT_KEYS[-1]: fields.whole(COUNT, 1), "dtype": number_format(fields)}
    return replace(files.without(*TRAINING).renamed(PACKAGE.names_in(QWEN)), config=config)


def converted_modules(fields: Fields, _stored: Collection[str], target: ModelConfig, target_name: str) -> MtpTensors:
    """The tensors of the modules that these fields describe, with the names of Qwen3-Next."""
    count, config = promised_modules(fields) or 1, module_config(fields, target, target_name)
    config = replace(config, layers=count, windows=config.windows[-1:] * count, tied=False, experts=None)
    return MtpTensors(config, QWEN, 0, config.vocab_size)


def write_package(files: DraftFiles, target: TargetFacts | None) -> DraftFiles:
    """Convert a module to the layout of `speculators`. Raises UnsupportedModel for one that the layout cannot store."""
    fields, config = files.fields, MTP.meaning(files, target).layers
    refused = {
        COUNT_KEYS[-1]: (config.layers != 1, "speculators has one module"),
        "model_type": (not config.qk_norm or config.qkv_bias, "the layers of speculators are qwen3's"),
        "sliding_window": (any(config.windows), "the layer of a module in speculators has no window"),
    }
    refuse_fields(fields, refused, "use another drafter, such as `forerun train mtp --portable` writes")
    layer = package_layer(files.config, config, *COUNT_KEYS, "use_sliding_window") | {"model_type": "qwen3"}
    if target is not None:
        layer["num_hidden_layers"] = target.config.layers  # selects the state that speculators reads
    values = {"architectures": ["MTPDraftModel"], LAYER_CONFIG: layer, COUNT: 1}
    return replace(files.renamed(QWEN.names_in(PACKAGE)), config=package_config(fields, target, KIND, values))


MTP = DraftMethod("MTP module", "mtp", converted_modules, infer_target("llama"))
LAYOUTS = (
    DraftLayout(
        "speculators",
        MTP,
        f"config.json with {SPECULATORS} mtp",
        of_speculators(KIND),
        read_package,
        write_package,
        is_runnable=False,
    ),
    DraftLayout("mtp", MTP, f"{QWEN.projection}, and no tensors but {QWEN.prefix}*", is_modules),
)
