"""Checkpoint: the tensors of a Hugging Face folder, one at a time.

The file decides which number format the weights are held in, and checks that every tensor the configuration promises is
there before any is loaded. What the tensors are for is the decoder's business.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.device import CPU
from forerun.errors import MissingWeights, UnsupportedModel, WrongShape
from forerun.models.config import ModelConfig
from forerun.models.spec import dtype_name

STORED = ("F64", "F32", "F16", "BF16")  # number formats that mean what they say, without scales beside them
HELD = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
AGAIN = "download it again (`hf download owner/name FILE`; in a git clone, `git lfs pull`)"


def resolve_dtype(requested: str | torch.dtype, config: ModelConfig, device: torch.device = CPU.device) -> torch.dtype:
    """The number format to hold the weights in, and to compute in, for what was asked for in any spelling.

    "auto" keeps the checkpoint's own, with float16 held as bfloat16 and float64 as float32; 16 bits need a GPU or a
    CPU with bfloat16 linears, and become float32 elsewhere. A format that is named is taken at its word. float16 has no
    compiled kernels: on a CPU torch computes it, in blocks of a fixed number of rows. Raises InvalidRequest.
    """
    name = dtype_name(requested)
    if name != "auto":
        return HELD[name]
    half = config.dtype in (torch.float16, torch.bfloat16)
    return torch.bfloat16 if half and (device.type == "cuda" or has_bfloat16_linears()) else torch.float32


def has_bfloat16_linears() -> bool:
    """Whether this CPU and this build of torch run packed bfloat16 linears."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies and what its file's header says of it."""

    file: Path
    shape: tuple[int, ...]
    format: str


class Checkpoint:
    """The tensors of a Hugging Face folder, in safetensors, handed out one at a time in `dtype`.

    All headers are read at once, so missing and damaged files are found before anything is loaded. A file is open,
    and its pages counted as ours, only while one of its tensors is copied: loading holds the weights and a tensor.
    Raises MissingWeights.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder = folder
        self.dtype = dtype
        self.stored = read_headers(folder)

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    @property
    def num_bytes(self) -> int:
        """The size of all tensors together, in `dtype`."""
        return sum(torch.Size(entry.shape).numel() for entry in self.stored.values()) * self.dtype.itemsize

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, contiguous, in `dtype`, in memory of its own.

        Raises MissingWeights where it is not there, WrongShape where it is not as promised, UnsupportedModel where
        it is stored in a quantised format.
        """
        entry = self.find(name, shape)
        with safe_open(entry.file, framework="pt") as file:
            return torch.empty(shape, dtype=self.dtype).copy_(file.get_tensor(name))

    def find(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Where a tensor lies, judged by its header."""
        entry = self.stored.get(name)
        if entry is None:
            wanted = "the checkpoint is incomplete or of another architecture than config.json says"
            raise MissingWeights(f"{self.folder} has no tensor {name}: {wanted}; download it again")
        if entry.shape != shape:
            raise WrongShape(
                f"{entry.file}: {name} has shape {list(entry.shape)}, config.json promises {list(shape)}: "
                "use the config.json that came with the weights"
            )
        if entry.format not in STORED:
            wanted = "quantised checkpoints are not read: use the float16 or bfloat16 original"
            raise UnsupportedModel(f"{entry.file}: {name} is stored as {entry.format}; {wanted}")
        return entry


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of model.safetensors or, where that is absent, of the shards that the index lists."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return read_header(single)
    if not index.exists():
        raise no_weights(folder)
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise MissingWeights(f"{index} is damaged ({error!r}): download it again") from error
    shards = {name: read_header(folder / name) for name in sorted(set(places.values()))}
    for name, shard in places.items():
        if name not in shards[shard]:
            raise MissingWeights(f"{folder / shard} has no tensor {name}, which {index.name} says it has: {AGAIN}")
    return {name: shards[shard][name] for name, shard in places.items()}


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file."""
    if not file.exists():
        raise MissingWeights(f"{file} is missing: {AGAIN}")
    found = {}
    try:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (the handle is no mapping)
                part = shard.get_slice(name)
                found[name] = Stored(file, tuple(part.get_shape()), part.get_dtype())
    except SafetensorError as error:
        size = file.stat().st_size
        raise MissingWeights(f"{file} is damaged or incomplete ({size} bytes; {error}): {AGAIN}") from error
    return found


def no_weights(folder: Path) -> MissingWeights:
    """The error for a folder without safetensors, by what lies there instead."""
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if not pickles:
        wanted = "download the weights, or convert them if the model is published in another format only"
        return MissingWeights(f"{folder} has no model.safetensors and no model.safetensors.index.json: {wanted}")
    convert = (
        "from transformers import AutoModelForCausalLM as M; "
        f"M.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained({str(folder)!r})"
    )
    return MissingWeights(
        f"{folder} has {pickles[0]} but no safetensors, and pickles can run code, so they are not read: convert it, if "
        f'you trust it, with `python -c "{convert}"`'
    )


def check_weights(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Judge all tensors by their headers before any is loaded; `config` with `tied` as the tensors have it.

    A head stored beside an embedding it should be tied to counts where it differs from it. Raises as `take` does.
    Warns of layers' tensors that nothing reads.
    """
    if config.tied and "lm_head.weight" in checkpoint:
        size = (config.vocab_size, config.hidden)
        head, embedding = (checkpoint.take(n, size) for n in ("lm_head.weight", "model.embed_tokens.weight"))
        if not torch.equal(head, embedding):
            warnings.warn(
                f"{checkpoint.folder}: lm_head.weight differs from the embedding though config.json ties them; it is "
                "used as stored (set tie_word_embeddings to false to say so)",
                UserWarning,
                stacklevel=2,
            )
            config = replace(config, tied=False)
    check_tensors(tensor_shapes(config), checkpoint)
    return config


def check_tensors(shapes: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint) -> None:
    """Judge tensors by their headers, and warn of layers' tensors that are not among them. Raises as `take` does."""
    for name, shape in shapes.items():
        checkpoint.find(name, shape)
    unread = [n for n in checkpoint.stored if n.startswith("model.layers.") and n not in shapes]
    unread = [n for n in unread if not n.endswith("rotary_emb.inv_freq")]  # tables that old checkpoints carry
    if unread:
        some = ", ".join(unread[:3])
        message = f"{checkpoint.folder}: {len(unread)} tensors are not read, among them {some}: is config.json right?"
        warnings.warn(message, UserWarning, stacklevel=3)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The checkpoint's name and shape of every tensor of the model, in the order of computation."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden)}
    for layer in range(config.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden)
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer: the names that all families share, and their shapes."""
    hidden, inner = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.out_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms.items()}
    shapes |= {f"{name}.weight": (out, into) for name, (out, into, _) in projections.items()}
    return shapes | {f"{name}.bias": (out,) for name, (out, _, bias) in projections.items() if bias}
