"""Checkpoint: the tensors of a Hugging Face folder, read one at a time.

This file chooses the dtype of the weights, and checks that all tensors of the configuration exist before any is loaded.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import MissingWeights, UnsupportedModel, WrongShape
from forerun.fields import read_fields, short
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from forerun.models.config import DTYPES, ModelConfig
from forerun.models.foreign import BROKEN_OFF, describe_unreadable, foreign_tensors
from forerun.models.gguf.folder import INDEX, stored_tensors
from forerun.models.gguf.tensors import GgufTensor
from forerun.models.inside import text_part
from forerun.models.mtp_names import find_modules
from forerun.models.projections import EMBEDDING, HEAD, layer_tensors, promised_tensors
from forerun.models.quantized.layouts import quantized_tensors
from forerun.models.quantized.scheme import read_scheme
from forerun.models.quantized.tensors import QuantizedTensor
from forerun.models.spec import dtype_name
from forerun.models.stored import AGAIN, PLAIN, StoredTensor, read_header

MOST_SHARDS = 10_000  # a plausibility limit
WHOLE = ("I64", "I32", "I16", "U8")
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # tables of old checkpoints
FILE_NAME = re.compile(r"[^/\\\0]+\.safetensors")  # without folders: files elsewhere are not the checkpoint's
SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
SENSES = ("vision", "visual", "image", "audio", "multi_modal", "connector")  # name prefixes of image and audio parts
OUTER = "model."
OTHER_NAMES = {  # InternLM 2's names, mapped to Llama's
    "tok_embeddings": "embed_tokens",
    "attention.wqkv": "self_attn.qkv_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

log = logging.getLogger(__name__)


def number_formats(
    requested: str | torch.dtype, config: ModelConfig, activations_too: bool = False
) -> tuple[torch.dtype, ...]:
    """The possible dtypes of the weights for a requested one, the best first. Raises InvalidRequest.

    "auto" keeps the checkpoint's 16 bits, with float32 as the alternative if that is faster; float64 becomes float32.
    With `activations_too`, as on GPUs, activations have the dtype of the weights, and float16 becomes bfloat16, whose
    range they do not exceed. An explicit dtype is used as it is.
    """
    name = dtype_name(requested)
    if name != "auto":
        return (DTYPES[name],)
    if config.dtype not in (torch.float16, torch.bfloat16):
        return (torch.float32,)
    return (torch.bfloat16 if activations_too else config.dtype, torch.float32)


Stored = StoredTensor | GgufTensor | QuantizedTensor


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """The quantized weights of a checkpoint: the formats that can stay in groups, the most frequent first, and those
    that are dequantized; average bytes of a weight in layers and head if groups stay."""

    formats: tuple[str, ...]
    unpacked: tuple[str, ...]
    of_layers: float
    of_head: float


class Checkpoint:
    """The tensors of a Hugging Face folder in safetensors, read one at a time in `dtype`.

    All headers are read first, so missing and damaged files are found before anything is loaded. A file is mapped only
    while one of its tensors is copied, so loading needs memory for the weights and one tensor. Raises MissingWeights.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, on_gpu: bool = False) -> None:
        """`on_gpu`: weights stored in groups are for GPU kernels."""
        self.folder = folder
        self.dtype = dtype
        self.on_gpu = on_gpu
        self.stored = read_tensors(folder)

    @classmethod
    def of_model(cls, folder: Path, dtype: torch.dtype, on_gpu: bool = False) -> Checkpoint:
        """The tensors of a whole model, under their usual names: base models saved without a head lack the prefix
        "model.", and wrappers add their own."""
        checkpoint = cls(folder, dtype, on_gpu)
        checkpoint.stored = by_usual_names(checkpoint.stored)
        return checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, contiguous, in `dtype`, in memory of its own.

        Raises MissingWeights where it is not there, WrongShape where it is not as promised, UnsupportedModel where
        it is stored in a quantised format or has numbers that float16, if that is `dtype`, does not have.
        """
        entry = self.find(name, shape)
        tensor = entry.read_into(torch.empty(shape, dtype=self.dtype))
        if self.dtype == torch.float16 and entry.format != "F16" and tensor.isinf().any():
            raise UnsupportedModel(
                f"{entry.file}: {name} has numbers above 65504, the largest of float16: use dtype bfloat16 or float32"
            )
        return tensor

    def groups(self, name: str, shape: tuple[int, ...], part: int | None = None) -> GroupedWeight | None:
        """A matrix, or one expert's part of a stacked tensor, as stored in groups, with outputs before inputs; None if
        it is not stored in groups. Raises as `take`."""
        entry = self.find(name, shape)
        return entry.groups(part) if self.held_bytes(entry) else None

    def held_bytes(self, entry: Stored) -> float:
        """Bytes of a weight that stays in groups; 0 if it is dequantized."""
        return entry.form.num_bytes(self.on_gpu) if entry.form else 0.0

    def stored_groups(self, config: ModelConfig) -> StoredGroups | None:
        """The quantized weights of the model of this configuration; None if there are none."""
        size = float(self.dtype.itemsize)
        quantized = [entry for entry in self.stored.values() if entry.format not in (*PLAIN, *WHOLE)]
        kinds = Counter((bool(self.held_bytes(entry)), entry.format) for entry in quantized)
        layers = [entry for name, entry in self.stored.items() if name.startswith("model.layers.")]
        numbers = [math.prod(entry.shape) for entry in layers]
        held = sum(count * (self.held_bytes(entry) or size) for count, entry in zip(numbers, layers, strict=True))
        head = self.stored.get(EMBEDDING if config.tied else HEAD)
        of_head = (head and self.held_bytes(head)) or size
        stay, others = (
            tuple(name for (stays, name), _ in kinds.most_common() if stays is asked) for asked in (True, False)
        )
        return StoredGroups(stay, others, held / max(1, sum(numbers)), of_head) if kinds else None

    def take_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An integer tensor as int64. Raises MissingWeights or UnsupportedModel."""
        entry = self.stored.get(name)
        if entry is None or entry.shape != shape or entry.format not in WHOLE:
            finding = "is not there" if entry is None else f"is {entry.format} of shape {list(entry.shape)}"
            raise UnsupportedModel(f"{self.folder}: {name} {finding}; it must be whole numbers of shape {list(shape)}")
        return entry.read().long()

    def find(self, name: str, shape: tuple[int, ...]) -> Stored:
        """The stored tensor, checked by its header. Raises as `take`."""
        entry = self.stored.get(name)
        if entry is None:
            problem = "the checkpoint is incomplete or of another architecture than config.json says"
            raise MissingWeights(f"{self.folder} has no tensor {name}: {problem}; download it again")
        if entry.shape != shape:
            raise WrongShape(
                f"{entry.file}: {name} has shape {list(entry.shape)}, config.json promises {list(shape)}: "
                "use the config.json that came with the weights"
            )
        if not entry.readable:
            lacking = "without scales beside it that config.json would know: use the files that came with the weights"
            raise UnsupportedModel(f"{entry.file}: {name} is stored as {entry.format}, {lacking}")
        return entry


def read_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of the folder's safetensors files, or of the GGUF file that it represents; the tensors of a quantized
    weight are combined into one."""
    if (folder / INDEX).exists():
        return dict(stored_tensors(folder))
    stored = read_headers(folder)
    config = folder / "config.json"
    scheme = read_scheme(text_part(read_fields(config))) if config.exists() else None
    return dict(stored if scheme is None else quantized_tensors(scheme, stored))


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors or else of all shards, from the index or, without one, by their file names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return read_header(single)
    if not index.exists():
        return {name: entry for file in shards_of(folder) for name, entry in read_header(file).items()}
    fields = read_fields(index, MissingWeights, MissingWeights)
    places = fields.inside("weight_map").values
    if not places or not all(isinstance(shard, str) and FILE_NAME.fullmatch(shard) for shard in places.values()):
        raise fields.refuse("weight_map", f"it must give the name of a file in the folder for every tensor: {AGAIN}")
    require_files([folder / name for name in sorted(set(places.values()))])
    shards = {name: read_header(folder / name) for name in sorted(set(places.values()))}
    for name, shard in places.items():
        if name not in shards[shard]:
            raise MissingWeights(
                f"{folder / shard} has no tensor {short(name)}, which {index.name} says it has: {AGAIN}"
            )
    return {name: shards[shard][name] for name, shard in places.items()}


def shards_of(folder: Path) -> list[Path]:
    """The shards of a checkpoint without an index. Raises MissingWeights if some are missing."""
    parts = [part for path in sorted(folder.glob("model-*")) if (part := SHARD.fullmatch(path.name))]
    if not parts:
        cure = "download the weights, or convert them if the model is published in another format only"
        problem = describe_unreadable(folder) or f"has no model.safetensors and no model.safetensors.index.json: {cure}"
        raise MissingWeights(f"{folder} {problem}")
    number, count = parts[0].groups()
    names = [f"model-{i:0{len(number)}}-of-{count}.safetensors" for i in range(1, min(int(count), MOST_SHARDS) + 1)]
    if strange := sorted({part[0] for part in parts} - set(names)):
        raise MissingWeights(f"{folder} has {names[0]} and {strange[0]}, of different sets: remove what is not its own")
    require_files(files := [folder / name for name in names])
    return files


def require_files(files: Sequence[Path]) -> None:
    """Raise MissingWeights if some of a checkpoint's files are missing."""
    missing = [file for file in files if not file.exists()]
    if missing:
        others = f", and {len(missing) - 1} more of {len(files)} are too" if missing[1:] else ""
        cause = describe_unreadable(missing[0].parent, BROKEN_OFF)
        raise MissingWeights(f"{missing[0]} is missing{others}: {f'the folder {cause}' if cause else AGAIN}")


def by_usual_names(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors under Llama's names, with any prefix of embedding, layers and norm replaced.

    Tensors with another prefix, as of an image encoder, are not part of the language model and keep other names.
    """
    if any(name.endswith("tok_embeddings.weight") for name in stored):
        stored = {usual_name(name): entry for name, entry in stored.items()}
    tables = [name for name in stored if name.endswith(EMBEDDING.removeprefix(OUTER))]
    if EMBEDDING in stored or len(tables) != 1:
        return dict(stored)
    prefix = tables[0].removesuffix(EMBEDDING.removeprefix(OUTER))
    parts = tuple(f"{prefix}{part}." for part in ("embed_tokens", "layers", "norm"))
    head = f"{prefix.removesuffix(OUTER)}{HEAD}"
    ours = {n: f"{OUTER}{n.removeprefix(prefix)}" for n in stored if n.startswith(prefix or parts)}
    names = {n: n.removeprefix(OUTER) for n in stored} | ours | {head: HEAD, HEAD: HEAD}
    return {names[name]: entry for name, entry in stored.items()}


def usual_name(name: str) -> str:
    """The name in Llama's naming of a tensor of InternLM 2 (OTHER_NAMES)."""
    stem, dot, kind = name.rpartition(".")
    part = next((part for part in OTHER_NAMES if stem.endswith(part)), "")
    name = f"{stem.removesuffix(part)}{OTHER_NAMES.get(part, '')}{dot}{kind}"
    return HEAD if stem == "output" else name


def check_weights(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Check all tensors by their headers; returns `config` with `tied` and the experts' names as stored.

    A stored head that differs from the embedding to which it should be tied is used. Raises as `check_tensors`.
    """
    if problem := foreign_tensors(checkpoint.stored):
        raise UnsupportedModel(f"{checkpoint.folder} is not read: {problem}")
    config, size = with_stored_names(config, checkpoint), (config.vocab_size, config.hidden)
    if not config.tied and HEAD not in checkpoint and EMBEDDING in checkpoint:
        cure = (
            "save it with its head (AutoModelForCausalLM, not AutoModel), or download it again; if both are one table, "
            "set tie_word_embeddings to true"
        )
        raise MissingWeights(f"{checkpoint.folder} has no tensor {HEAD}, and config.json does not tie it: {cure}")
    if config.tied and HEAD in checkpoint:
        head, embedding = (checkpoint.take(name, size) for name in (HEAD, EMBEDDING))
        if not torch.equal(head, embedding):
            log.warning(
                "%s: %s differs from the embedding though config.json ties them; it is used as stored "
                "(set tie_word_embeddings to false to say so)",
                checkpoint.folder,
                HEAD,
            )
            config = replace(config, tied=False)
    modules = find_modules(checkpoint.stored, config.layers)
    if modules is not None:
        log.info("%s ships MTP modules, which --draft mtp drafts with", checkpoint.folder)
    idle = [HEAD, *(modules.tensors if modules else ())]
    check_tensors(promised_tensors(config), checkpoint, layers=config.layers, idle=idle)
    return config


def with_stored_names(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """`config` with the stacked names of experts if more of the checkpoint's tensors have those."""
    experts = config.experts
    if experts is None or experts.names.stacked is None:
        return config
    stacked = replace(config, experts=replace(experts, names=experts.names.stacked))

    def share(form: ModelConfig) -> float:
        names = layer_tensors(form, experts.layers[0])
        return sum(f"model.layers.{experts.layers[0]}.{name}" in checkpoint for name in names) / len(names)

    return stacked if share(stacked) > share(config) else config


def check_tensors(
    promised: Iterable[tuple[str, tuple[int, ...]]], checkpoint: Checkpoint, layers: int, idle: Collection[str] = ()
) -> None:
    """Check the promised tensors by their headers, and the other stored tensors by their names.

    Raises as `take` at the first missing tensor. An unread tensor inside the layers, or beside embedding, norm and
    head, would change results: it raises UnsupportedModel, unless it is a bias of zeros or a buffer that can be
    recomputed. Others, such as heads for other tasks and further layers, are logged. `idle` are names to ignore.
    """
    read = set(idle)
    for name, shape in promised:
        checkpoint.find(name, shape)
        read.add(name)
    others = [n for n in checkpoint.stored if n not in read and not n.endswith(BUFFERS)]
    for name in others:
        if changes_logits(name, layers) and not is_idle_bias(name, checkpoint):
            raise UnsupportedModel(
                f"{checkpoint.stored[name].file}: the tensor {short(name)} would change what the model computes, and "
                "the model of config.json does not have it: use the config.json that came with the weights, or another "
                "checkpoint"
            )
    unread = [n for n in others if not changes_logits(n, layers)]
    senses = sorted({n.partition(".")[0] for n in unread if n.startswith(SENSES)})
    if senses:
        log.warning("%s: text alone is read; %s are left out", checkpoint.folder, ", ".join(senses))
        unread = [n for n in unread if n.partition(".")[0] not in senses]
    if unread:
        log.warning(
            "%s: %d tensors are not read, among them %s",
            checkpoint.folder,
            len(unread),
            ", ".join(map(short, unread[:3])),
        )


def changes_logits(name: str, layers: int) -> bool:
    """Whether a tensor of this name would affect the logits of a decoder with this many layers."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal():
        return int(parts[2][:9]) < layers
    return parts[0] in ("model", "lm_head")


def is_idle_bias(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a tensor is a bias of zeros, which conversions between families leave."""
    entry = checkpoint.stored[name]
    return name.endswith(".bias") and entry.readable and not checkpoint.take(name, entry.shape).any()
