"""Checkpoint: the tensors of a Hugging Face folder, read one at a time.

`check_weights` checks that all tensors of the configuration exist, with the right shapes, before any is loaded.
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
from forerun.models.foreign import INTERRUPTED, describe_unreadable, foreign_tensors
from forerun.models.gguf.folder import INDEX, stored_tensors
from forerun.models.gguf.tensors import GgufTensor
from forerun.models.inside import text_part
from forerun.models.mtp_names import find_modules
from forerun.models.projections import EMBEDDING, HEAD, expected_tensors, layer_tensors
from forerun.models.quantized.layouts import quantized_tensors
from forerun.models.quantized.scheme import read_scheme
from forerun.models.quantized.tensors import QuantizedTensor
from forerun.models.stored import DOWNLOAD, UNQUANTIZED, StoredTensor, read_header

MOST_SHARDS = 10_000  # larger numbers in file names are not believed
INTEGERS = ("I64", "I32", "I16", "U8")
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # tables of old checkpoints
FILE_NAME = re.compile(r"[^/\\\0]+\.safetensors")  # without folders: files elsewhere are not the checkpoint's
SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
MEDIA = ("vision", "visual", "image", "audio", "multi_modal", "connector")  # name prefixes of image and audio parts
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


def candidate_dtypes(requested: str, config: ModelConfig, activations_too: bool = False) -> tuple[torch.dtype, ...]:
    """The dtypes that weights may be loaded in, the preferred one first; `requested` is `ModelSpec.dtype`.

    An explicit dtype is used as it is. "auto" is the checkpoint's dtype if it has 16 bits, or float32 if that is
    faster; float64 becomes float32. With `activations_too`, as on GPUs, activations have the dtype of the weights, and
    float16 becomes bfloat16, because activations can exceed the range of float16.
    """
    if requested != "auto":
        return (DTYPES[requested],)
    if config.dtype not in (torch.float16, torch.bfloat16):
        return (torch.float32,)
    return (torch.bfloat16 if activations_too else config.dtype, torch.float32)


Stored = StoredTensor | GgufTensor | QuantizedTensor


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """The quantized weights of a checkpoint: the formats that can stay in groups, the most frequent first, and those
    that must be dequantized; and the average bytes of a weight, in layers and in the head, if groups stay."""

    formats: tuple[str, ...]
    unpacked: tuple[str, ...]
    layer_bytes: float
    head_bytes: float


class Checkpoint:
    """The tensors of a Hugging Face folder, read one at a time in `dtype`.

    The constructor reads all headers, so missing and damaged files are found before anything is loaded: it raises
    MissingWeights. A file is mapped only while one of its tensors is copied.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, on_gpu: bool = False) -> None:
        """`on_gpu`: whether GPU kernels multiply weights that are stored in groups."""
        self.folder = folder
        self.dtype = dtype
        self.on_gpu = on_gpu
        self.stored = read_tensors(folder)

    @classmethod
    def of_model(cls, folder: Path, dtype: torch.dtype, on_gpu: bool = False) -> Checkpoint:
        """The tensors of an entire model under Llama's names: base models without a head lack the prefix "model.", and
        wrappers add their own."""
        checkpoint = cls(folder, dtype, on_gpu)
        checkpoint.stored = with_llama_names(checkpoint.stored)
        return checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in `dtype`, contiguous, in new memory.

        Raises MissingWeights if it does not exist, WrongShape if it has another shape, UnsupportedModel if its format
        is not supported, or if it has numbers beyond the range of float16 and that is `dtype`.
        """
        entry = self.find(name, shape)
        tensor = entry.read_into(torch.empty(shape, dtype=self.dtype))
        if self.dtype == torch.float16 and entry.format != "F16" and tensor.isinf().any():
            raise UnsupportedModel(
                f"{entry.file}: {name} has numbers above 65504, the largest of float16: use dtype bfloat16 or float32"
            )
        return tensor

    def groups(self, name: str, shape: tuple[int, ...], part: int | None = None) -> GroupedWeight | None:
        """A matrix as stored in groups, [outputs, inputs], or that of expert `part` in a stacked tensor; None if it is
        not stored in groups that can stay. Raises the same errors as `take`."""
        entry = self.find(name, shape)
        return entry.groups(part) if self.group_bytes(entry) else None

    def group_bytes(self, entry: Stored) -> float:
        """The bytes of one weight of this tensor if it stays in groups; 0 if it is dequantized."""
        return entry.form.num_bytes(self.on_gpu) if entry.form else 0.0

    def stored_groups(self, config: ModelConfig) -> StoredGroups | None:
        """The quantized weights of a model with this configuration; None if there are none."""
        size = float(self.dtype.itemsize)
        quantized = [entry for entry in self.stored.values() if entry.format not in (*UNQUANTIZED, *INTEGERS)]
        kinds = Counter((bool(self.group_bytes(entry)), entry.format) for entry in quantized)
        layers = [entry for name, entry in self.stored.items() if name.startswith("model.layers.")]
        numbers = [math.prod(entry.shape) for entry in layers]
        total = sum(count * (self.group_bytes(entry) or size) for count, entry in zip(numbers, layers, strict=True))
        head = self.stored.get(EMBEDDING if config.tied else HEAD)
        head_bytes = (head and self.group_bytes(head)) or size
        in_groups = tuple(name for (stays, name), _ in kinds.most_common() if stays)
        unpacked = tuple(name for (stays, name), _ in kinds.most_common() if not stays)
        return StoredGroups(in_groups, unpacked, total / max(1, sum(numbers)), head_bytes) if kinds else None

    def take_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of token ids as int64. Raises UnsupportedModel if there is none of this shape, or MissingWeights."""
        entry = self.stored.get(name)
        if entry is None or entry.shape != shape or entry.format not in INTEGERS:
            finding = "is not there" if entry is None else f"is {entry.format} of shape {list(entry.shape)}"
            raise UnsupportedModel(f"{self.folder}: {name} {finding}; it must be integers of shape {list(shape)}")
        return entry.read().long()

    def find(self, name: str, shape: tuple[int, ...]) -> Stored:
        """The stored tensor of this name, checked by its header. Raises the same errors as `take`."""
        entry = self.stored.get(name)
        if entry is None:
            problem = "the checkpoint is incomplete or of another architecture than config.json says"
            raise MissingWeights(f"{self.folder} has no tensor {name}: {problem}; download it again")
        if entry.shape != shape:
            raise WrongShape(
                f"{entry.file}: {name} has shape {list(entry.shape)}, but config.json needs {list(shape)}: "
                "use the config.json that came with the weights"
            )
        if not entry.readable:
            lacking = "without scales that config.json describes: use the files that came with the weights"
            raise UnsupportedModel(f"{entry.file}: {name} is stored as {entry.format}, {lacking}")
        return entry


def read_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of the folder's safetensors files, or of the GGUF file that it represents; the several tensors of a
    quantized weight become one entry."""
    if (folder / INDEX).exists():
        return dict(stored_tensors(folder))
    stored = read_headers(folder)
    config = folder / "config.json"
    scheme = read_scheme(text_part(read_fields(config))) if config.exists() else None
    return dict(stored if scheme is None else quantized_tensors(scheme, stored))


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors or, without it, of all shards: those in the index, else by their file names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return read_header(single)
    if not index.exists():
        return {name: entry for file in shards_of(folder) for name, entry in read_header(file).items()}
    fields = read_fields(index, MissingWeights, MissingWeights)
    places = fields.inside("weight_map").values
    if not places or not all(isinstance(shard, str) and FILE_NAME.fullmatch(shard) for shard in places.values()):
        raise fields.refuse("weight_map", f"it must give the name of a file in the folder for every tensor: {DOWNLOAD}")
    require_files([folder / name for name in sorted(set(places.values()))])
    shards = {name: read_header(folder / name) for name in sorted(set(places.values()))}
    for name, shard in places.items():
        if name not in shards[shard]:
            raise MissingWeights(
                f"{folder / shard} has no tensor {short(name)}, which {index.name} says it has: {DOWNLOAD}"
            )
    return {name: shards[shard][name] for name, shard in places.items()}


def shards_of(folder: Path) -> list[Path]:
    """The shards of a checkpoint without an index. Raises MissingWeights if some are missing."""
    parts = [part for path in sorted(folder.glob("model-*")) if (part := SHARD.fullmatch(path.name))]
    if not parts:
        fix = "download the weights, or convert them if the model is published in another format only"
        problem = describe_unreadable(folder) or f"has no model.safetensors and no model.safetensors.index.json: {fix}"
        raise MissingWeights(f"{folder} {problem}")
    number, count = parts[0].groups()
    names = [f"model-{i:0{len(number)}}-of-{count}.safetensors" for i in range(1, min(int(count), MOST_SHARDS) + 1)]
    if others := sorted({part[0] for part in parts} - set(names)):
        raise MissingWeights(f"{folder} has {names[0]} and {others[0]}, of different checkpoints: remove one of them")
    require_files(files := [folder / name for name in names])
    return files


def require_files(files: Sequence[Path]) -> None:
    """Raise MissingWeights if some of a checkpoint's files are missing."""
    missing = [file for file in files if not file.exists()]
    if missing:
        others = f", and {len(missing) - 1} more of {len(files)} are too" if missing[1:] else ""
        cause = describe_unreadable(missing[0].parent, INTERRUPTED)
        raise MissingWeights(f"{missing[0]} is missing{others}: {f'the folder {cause}' if cause else DOWNLOAD}")


def with_llama_names(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors under Llama's names: the common prefix of embedding, layers and norm becomes "model.".

    Tensors with another prefix, such as those of an image encoder, are not part of the language model.
    """
    if any(name.endswith("tok_embeddings.weight") for name in stored):
        stored = {llama_name(name): entry for name, entry in stored.items()}
    tables = [name for name in stored if name.endswith(EMBEDDING.removeprefix(OUTER))]
    if EMBEDDING in stored or len(tables) != 1:
        return dict(stored)
    prefix = tables[0].removesuffix(EMBEDDING.removeprefix(OUTER))
    parts = tuple(f"{prefix}{part}." for part in ("embed_tokens", "layers", "norm"))
    head = f"{prefix.removesuffix(OUTER)}{HEAD}"
    ours = {n: f"{OUTER}{n.removeprefix(prefix)}" for n in stored if n.startswith(prefix or parts)}
    names = {n: n.removeprefix(OUTER) for n in stored} | ours | {head: HEAD, HEAD: HEAD}
    return {names[name]: entry for name, entry in stored.items()}


def llama_name(name: str) -> str:
    """Llama's name of a tensor of InternLM 2 (OTHER_NAMES)."""
    stem, dot, kind = name.rpartition(".")
    part = next((part for part in OTHER_NAMES if stem.endswith(part)), "")
    name = f"{stem.removesuffix(part)}{OTHER_NAMES.get(part, '')}{dot}{kind}"
    return HEAD if stem == "output" else name


def check_weights(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Check all tensors by their headers; returns `config` with `tied` and the experts' names as stored.

    If a head is stored that config.json ties to the embedding, and they differ, the stored head is used. Raises the
    same errors as `check_tensors`.
    """
    if problem := foreign_tensors(checkpoint.stored):
        raise UnsupportedModel(f"{checkpoint.folder} is not read: {problem}")
    config, size = with_stored_names(config, checkpoint), (config.vocab_size, config.hidden)
    if not config.tied and HEAD not in checkpoint and EMBEDDING in checkpoint:
        fix = (
            "save it with its head (AutoModelForCausalLM, not AutoModel), or download it again; if both are one table, "
            "set tie_word_embeddings to true"
        )
        raise MissingWeights(f"{checkpoint.folder} has no tensor {HEAD}, and config.json does not tie it: {fix}")
    if config.tied and HEAD in checkpoint:
        head, embedding = (checkpoint.take(name, size) for name in (HEAD, EMBEDDING))
        if not torch.equal(head, embedding):
            log.warning(
                "%s: %s differs from the embedding, though config.json ties them: the stored one is used (set "
                "tie_word_embeddings to false to avoid this warning)",
                checkpoint.folder,
                HEAD,
            )
            config = replace(config, tied=False)
    modules = find_modules(checkpoint.stored, config.layers)
    if modules is not None:
        log.info("%s has MTP modules: use --draft mtp to draft with them", checkpoint.folder)
    ignored = [HEAD, *(modules.tensors if modules else ())]
    check_tensors(expected_tensors(config), checkpoint, layers=config.layers, ignored=ignored)
    return config


def with_stored_names(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """`config` with the names of stacked experts, if the checkpoint has more tensors of those names."""
    experts = config.experts
    if experts is None or experts.names.stacked is None:
        return config
    stacked = replace(config, experts=replace(experts, names=experts.names.stacked))

    def share(form: ModelConfig) -> float:
        names = layer_tensors(form, experts.layers[0])
        return sum(f"model.layers.{experts.layers[0]}.{name}" in checkpoint for name in names) / len(names)

    return stacked if share(stacked) > share(config) else config


def check_tensors(
    expected: Iterable[tuple[str, tuple[int, ...]]], checkpoint: Checkpoint, layers: int, ignored: Collection[str] = ()
) -> None:
    """Check the expected tensors by their headers, and all other stored tensors except `ignored` by their names.

    Raises the same errors as `take` at the first tensor that is missing. Another tensor inside the layers, or next to
    embedding, norm and head, would change results: it raises UnsupportedModel, unless it is a bias of zeros or a buffer
    that can be recomputed. Others, such as heads for other tasks or further layers, cause a warning.
    """
    read = set(ignored)
    for name, shape in expected:
        checkpoint.find(name, shape)
        read.add(name)
    others = [n for n in checkpoint.stored if n not in read and not n.endswith(BUFFERS)]
    unread = []
    for name in others:
        if not changes_logits(name, layers):
            unread.append(name)
        elif not is_zero_bias(name, checkpoint):
            raise UnsupportedModel(
                f"{checkpoint.stored[name].file}: the tensor {short(name)} would change results, and the model that "
                "config.json describes does not have it: use the config.json that came with the weights, or another "
                "checkpoint"
            )
    multimodal = sorted({n.partition(".")[0] for n in unread if n.startswith(MEDIA)})
    if multimodal:
        log.warning("%s: only text is supported: %s are not loaded", checkpoint.folder, ", ".join(multimodal))
        unread = [n for n in unread if n.partition(".")[0] not in multimodal]
    if unread:
        log.warning(
            "%s: %d tensors are not used, such as %s",
            checkpoint.folder,
            len(unread),
            ", ".join(map(short, unread[:3])),
        )


def changes_logits(name: str, layers: int) -> bool:
    """Whether a tensor of this name can belong to a decoder with this many layers."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal():
        return int(parts[2][:9]) < layers
    return parts[0] in ("model", "lm_head")


def is_zero_bias(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a tensor is a bias of zeros, as conversions between families may write."""
    entry = checkpoint.stored[name]
    return name.endswith(".bias") and entry.readable and not checkpoint.take(name, entry.shape).any()
